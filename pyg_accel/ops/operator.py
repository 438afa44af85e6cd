"""Operators: registered with torch.library under ``pyg_accel``, and a short way to call them.

torch.compile, tensor subclasses and modes see registered operators. The dispatcher of torch takes
several times as long as a launch, so :func:`call` bypasses it where nothing observes the call. Both
record the node of :mod:`.autograd`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.backends.dispatch import asked_for
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.autograd import (
    NO_GRADIENT,
    Gradient,
    OperatorPlan,
    Result,
    Rule,
    apply,
    apply_unchecked,
    each_of,
)

__all__ = ["Recorded", "call", "define"]

_library = torch.library.Library("pyg_accel", "FRAGMENT")


class Recorded(NamedTuple):
    """The gradient of a call of an operator.

    Attributes:
        rule: states the gradient.
        keeps: places of saved tensors in arguments and results. If an argument is a list of
            tensors, places count its items instead of arguments.
        graph: the graph, for the rule.
        results: number of results with gradients; 0 if the operator returns a tensor.
    """

    rule: Rule
    keeps: tuple[int, ...]
    graph: Any = None
    results: int = 0


Gradients = Mapping[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class _Operator:
    run: Callable[..., Any]
    record: Callable[..., Recorded] | None


_operators: dict[str, _Operator] = {}


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    record: Callable[..., Recorded] | Gradients | None = None,
) -> None:
    """Register an operator.

    Rename an operator if its arguments change: the disk cache of inductor identifies graphs by the
    names of operators, and would run code from an older release.

    Args:
        schema: name, arguments and results, as ``torch.library`` writes them.
        run: computes the results.
        fake: computes results without data.
        record: takes the arguments and returns the gradient of a call; or gradients by names of
            arguments. Such a gradient is a function of the gradient of the first result and of
            parameters, selected by name: arguments of the operator, ``output`` for its last
            result, ``x_rows`` and ``x_columns`` for the sizes of argument x, and ``arrays`` for the
            arrays of the graph. Only inputs of needed gradients are saved.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(
        name, fake, "Meta"
    )  # register_fake() takes 0.1 s to find the source of a function
    overload = getattr(torch.ops.pyg_accel, name).default
    if isinstance(record, Mapping):
        record = _declared(overload._schema, record)
    if record is not None:
        dispatched = partial(_dispatched, overload, record)
        _library.impl(name, dispatched, "Autograd", with_keyset=True)
    torch.library.register_vmap(
        f"pyg_accel::{name}",
        lambda info, dims, *args: each_of(overload, info.batch_size, dims, args),
        lib=_library,
    )
    _operators[name] = _Operator(run, record)


def _dispatched(overload: Any, record: Callable[..., Recorded], keys: Any, *args: Any) -> Any:
    """Run an operator below autograd, and record it if a gradient is needed."""

    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return _record(run, record, args, apply)
    return run(*args)


def call(name: str, *args: Any) -> Any:
    """Call an operator."""
    if torch.compiler.is_compiling() or _is_observed():
        return getattr(torch.ops.pyg_accel, name)(*args)
    needs = False
    for argument in args:
        for item in argument if type(argument) is list else (argument,):
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                needs = needs or item.requires_grad
            elif isinstance(item, Tensor):
                return getattr(torch.ops.pyg_accel, name)(*args)
    operator = _operators[name]
    if not needs or operator.record is None or not torch.is_grad_enabled():
        return operator.run(*args)
    return _record(operator.run, operator.record, args, apply_unchecked)


def _is_observed() -> bool:
    """Whether a mode or a function transform observes calls."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _record(
    run: Callable[..., Any],
    record: Callable[..., Recorded],
    args: tuple[Any, ...],
    apply: Callable[..., Any],
) -> Any:
    """Run an operator as a node of autograd."""
    rule, keeps, graph, results = record(*args)
    at = next((i for i, a in enumerate(args) if type(a) is list and a
               and isinstance(a[0], Tensor)), None)  # fmt: skip
    operands = args if at is None else args[at]
    others = () if at is None else (*args[:at], *args[at + 1 :])
    n, hidden = len(operands), list[Any]()

    def compute(*flat: Any) -> Any:
        arguments = flat if at is None else (*flat[n : n + at], [*flat[:n]], *flat[n + at :])
        outs = run(*arguments)
        hidden.extend(outs[results:] if results else ())
        return outs

    keeps = tuple([place if place < n else place + len(others) for place in keeps])
    plain = at is None and not results
    plan = OperatorPlan(run if plain else compute, {}, results, rule, keeps, requested=asked_for())
    outs = apply(plan, graph, None, *operands, *others)
    return [*outs, *hidden] if results else outs


class _Declared(NamedTuple):
    """Gradients by arguments.

    Attributes:
        gradients: the place of an argument, the function, and the names of its parameters.
        saved: names of saved tensors.
        others: other parameters, by name.
        arrays: names of the arrays of the graph.
    """

    gradients: list[tuple[int, Callable[..., Tensor], tuple[str, ...]]]
    saved: list[str]
    others: dict[str, Any]
    arrays: list[str]

    def bind(self, graph: Any, tensors: list[Any]) -> Gradient | None:
        """Plan the pass, which is the same for every purpose."""
        if tensors[-1] is None:
            return NO_GRADIENT
        saved = len(self.saved)
        used = (saved, *range(saved))
        launches = [(partial(self._evaluate, function, names), False, used, (Result(place, None),))
                    for place, function, names in self.gradients]  # fmt: skip
        return Gradient((), (), launches, {})

    def operators(self, graph: Any, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass."""
        gradient = self.bind(graph, tensors)
        assert gradient is not None
        return gradient

    def _evaluate(
        self, function: Callable[..., Tensor], names: tuple[str, ...], grad: Tensor, *saved: Tensor
    ) -> Tensor:
        values = {**self.others, **dict(zip(self.saved, saved, strict=True))}
        if "arrays" in names:
            values["arrays"] = [values[name] for name in self.arrays]
        return function(grad, *map(values.__getitem__, names))


_SIZES = {"rows": 0, "columns": 1}
_ARRAYS = ("rowptr", "col", "eid", "rowptr_t", "col_t", "eid_t", "num_cols", "sorted")


def _declared(schema: Any, gradients: Gradients) -> Callable[..., Recorded]:
    """Return the function that records calls, from gradients by arguments."""
    names = [argument.name for argument in schema.arguments]
    read = {name: tuple(inspect.signature(g).parameters)[1:] for name, g in gradients.items()}
    arrays = [name for name in names if name in _ARRAYS]
    each = {name: [n for parameter in parameters
                   for n in (arrays if parameter == "arrays" else [parameter])]
            for name, parameters in read.items()}  # fmt: skip
    places = {"output": -1} | {name: place for place, name in enumerate(names)}
    results = int(isinstance(schema.returns[0].type, torch.ListType))

    def record(*args: Any) -> Recorded:
        arguments = dict(zip(names, args, strict=True))
        wanted = [n for n in gradients if arguments[n] is not None and arguments[n].requires_grad]
        saved, others = [], {}
        for name in dict.fromkeys(name for n in wanted for name in each[n]):
            if name == "output" or isinstance(arguments.get(name), Tensor):
                saved.append(name)
            elif name in arguments:
                others[name] = arguments[name]
            else:
                argument, _, size = name.rpartition("_")
                others[name] = arguments[argument].size(_SIZES[size])
        entries = [(places[n], gradients[n], read[n]) for n in wanted]
        rule = _Declared(entries, saved, others, arrays)
        return Recorded(rule, tuple([places[name] for name in saved]), results=results)

    return record
