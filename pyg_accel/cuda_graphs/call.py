"""A call, taken apart: its arguments, the modes in force, and the modules that take part."""

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.data import Data

from pyg_accel.checks import check_arguments
from pyg_accel.cuda_graphs.ledger import Ledger
from pyg_accel.patching.rng_state import random_state, restore

__all__ = ["Arguments", "Checkpoint", "Modes", "State", "Subject", "Uncapturable", "flatten",
           "names_of", "naming", "replaced"]  # fmt: skip

_SCALARS = (bool, int, float, complex, str, type(None))
_CONSTANTS = (*_SCALARS, bytes, torch.dtype, torch.device)
_PLAIN = (Tensor, torch.nn.Parameter)
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAPHS = "_num_graphs"  # where a batch of PyG keeps how many there are
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Uncapturable(Exception):
    """Why a call cannot be captured; eager execution goes on."""


def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a function."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature(function).parameters.values() if p.kind in kinds)


@contextmanager
def naming(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Name the arguments that are no tensors where a call of a function fails."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and isinstance(sys.exc_info()[1], Exception):  # an interrupt stays one
            check_arguments({**dict(zip(names_of(function), args, strict=False)), **kwargs})


def _is_text(value: Any) -> bool:
    """Names of molecules and the like, new in each batch and of no use to a model."""
    several = isinstance(value, (list, tuple))
    return all(map(_is_text, value)) if several else isinstance(value, str)


def _items(value: Any, name: str) -> list[tuple[Any, Any]] | None:
    """Return what is in a container, by key or by its own name; None for what is no container."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, tuple)):
        return [(name, item) for item in value]
    if isinstance(value, Data):
        known = {n[1:]: v for n, v in vars(value).items() if n == _GRAPHS}
        return [(k, v) for k, v in (value.to_dict() | known).items() if not _is_text(v)]
    return None


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any, tuple[type, Any] | None]]:
    """Yield name and value of each leaf, and class and keys where a container begins."""
    items = _items(value, name)
    if items is None:
        yield name, value, None
        return
    yield name, None, (type(value), tuple(key for key, _ in items))
    for key, item in items:
        yield from _leaves(item, str(key))


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a value with others in the places of its leaves, in the order of `_leaves`."""
    items = _items(value, "")
    if items is None:
        return leaf(value)
    made = [(key, _mapped(item, leaf)) for key, item in items]
    if isinstance(value, Data):
        other = copy.copy(value)
        for key, item in made:
            if key == _GRAPHS[1:] and _GRAPHS in vars(other):
                vars(other)[_GRAPHS] = item
            else:
                other[key] = item
        return other
    parts = made if isinstance(value, dict) else [item for _, item in made]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        tensors: all of them, also those inside lists, tuples, dictionaries and ``Data``.
        names: of the tensors: the last part of the way to each.
        form: everything else: calls of one form differ in their tensors and ``numbers`` alone.
        numbers: Python integers, by name; they may count rows, or how many of them are cut off.
    """

    __slots__ = ("_args", "_kwargs", "form", "names", "numbers", "tensors")

    def __init__(
        self, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Take arguments apart.

        Raises:
            Uncapturable: for arguments that are neither tensors nor constants.
        """
        self._args, self._kwargs = args, kwargs
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}
        form: list[Hashable] = [len(args), *kwargs]
        names = [*positional[: len(args)], *map(str, range(len(positional), len(args))), *kwargs]
        for top, argument in zip(names, (*args, *kwargs.values()), strict=True):
            for name, value, container in _leaves(argument, top):
                kind = type(value)
                if kind in _PLAIN:
                    self.tensors.append(value)
                    self.names.append(name)
                elif kind is int:
                    new = name not in self.numbers and name not in ("nodes", "graphs")
                    self.numbers[name if new else f"{name} {len(form)}"] = value
                elif kind not in _CONSTANTS:
                    raise Uncapturable(f"'{name}' is a {kind.__name__}")
                variable = kind is int or kind in _PLAIN
                form.append((kind, None if variable else value, container))
        self.form: Hashable = tuple(form)

    def over(self, tensors: Sequence[Tensor]) -> "Arguments":
        """Return arguments that hold other tensors, and let go of these."""
        other = copy.copy(self)
        other._args, other._kwargs = self.rebuild(tensors, {})
        other.tensors = [*tensors]
        return other

    def rebuild(
        self, tensors: Sequence[Tensor], numbers: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors and numbers in their places."""
        places = iter(tensors)
        counts = iter([numbers.get(name, number) for name, number in self.numbers.items()])

        def leaf(value: Any) -> Any:
            kind = type(value)
            return next(places) if kind in _PLAIN else next(counts) if kind is int else value

        args = tuple(_mapped(value, leaf) for value in self._args)
        return args, {name: _mapped(value, leaf) for name, value in self._kwargs.items()}


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors of a result.

    Raises:
        Uncapturable: for results that hold anything else than tensors and constants.
    """
    leaves = [(leaf, type(leaf) if container is None else container[0])
              for _, leaf, container in _leaves(value)]  # fmt: skip
    for _, kind in leaves:
        if kind not in (*_PLAIN, *_CONSTANTS) and not issubclass(kind, (dict, list, tuple)):
            raise Uncapturable(f"it returns a {kind.__name__}")
    return [leaf for leaf, kind in leaves if kind in _PLAIN]


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a result with other tensors in their places."""
    return _mapped(value, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf)


class Modes(NamedTuple):
    """What decides, beside its arguments, how torch makes a call."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    precision: str
    deterministic: bool

    @classmethod
    def now(cls, device: str) -> "Modes":
        """Return those in force."""
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast,
                   torch.get_float32_matmul_precision(),
                   torch.are_deterministic_algorithms_enabled())  # fmt: skip


class Subject:
    """A model as what is captured; :mod:`.step` has a subclass for functions.

    Args:
        call: makes an eager call.
        roots: modules that take part.
        name: for the report.
    """

    def __init__(
        self, call: Callable[..., Any], roots: Iterable[torch.nn.Module], name: str
    ) -> None:
        self.call, self.roots, self.name = call, tuple(dict.fromkeys(roots)), name

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that take part, and those inside them, each once."""
        return list(dict.fromkeys(m for root in self.roots for m in root.modules()))

    def of_modules(self, kind: str) -> list[Tensor]:
        """Return the ``"_parameters"`` or ``"_buffers"`` of the modules, each once."""
        each = (t for m in self.modules for t in vars(m)[kind].values() if t is not None)
        return list(dict.fromkeys(each))

    def reasons(self) -> list[str]:
        """Return why no call can be captured."""
        return []

    def key(self) -> Any:
        """Return what else than its modules decides what a call does."""

    def tensors(self) -> list[Tensor]:
        """Return what a call may change in place, beside buffers."""
        return []

    def evidence(self) -> dict[str, list[Tensor]]:
        """Return what a call changes that tells whether it was right."""
        return {"buffer": self.of_modules("_buffers")}

    def prepare(self) -> None:
        """Get ready to be captured."""

    def recorded(self) -> Any:
        """Return what a call leaves behind, after a recording was made."""

    def finish(self, left: Any) -> None:
        """Leave that behind, after a recording was replayed."""


class State:
    """Attributes, parameters and buffers of modules as they are, by identity.

    Replacing any of them, also by ``train()``, ``to()`` or ``load_state_dict(assign=True)``, makes
    another state; values in parameters and buffers may change. What is in a list or a dictionary
    that a module keeps is not looked at.

    Attributes:
        ledger: the account of the calls in this state.
    """

    def __init__(self, subject: Subject) -> None:
        """Look at the modules."""
        self.modules = subject.modules
        dicts = [vars(module) for module in self.modules]
        inner = [d[name] for d in dicts for name in ("_parameters", "_buffers", "_modules")]
        self._dicts = [*dicts, *inner]
        self._values = [value for d in self._dicts for value in d.values()]
        self._hooks = [d[name] for d in dicts for name in _HOOKS]
        self.parameters = subject.of_modules("_parameters")
        self._all = [*self.parameters, *subject.of_modules("_buffers")]
        self._tensors = self._look()
        self.ledger = Ledger()

    def _look(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self._all), *map(_REQUIRES_GRAD, self._all)]

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was."""
        if sum(map(len, self._dicts)) != len(self._values):
            return ["which attributes there are"]
        now = chain.from_iterable(map(dict.values, self._dicts))
        if not all(map(is_, now, self._values)):
            items = chain.from_iterable(map(dict.items, self._dicts))
            pairs = zip(items, self._values, strict=True)
            return list(dict.fromkeys(name for (name, value), then in pairs if value is not then))
        return [] if self._look() == self._tensors else ["the memory of its parameters"]

    def key(self) -> Hashable:
        """Return by what this state is found again; it holds while this object lives."""
        values = [value if type(value) in _SCALARS else id(value) for value in self._values]
        return tuple(map(len, self._dicts)), tuple(values), tuple(self._tensors)

    def reasons(self) -> list[str]:
        """Return why calls of these modules cannot be captured."""
        if any(self._hooks) or _has_any_global_hook():
            return ["a hook on one of its modules"]
        hooked = any(p._backward_hooks for p in self.parameters)
        return ["a hook on one of its parameters"] if hooked else []


class Checkpoint:
    """Random numbers, modules and what a call may change, as they are, to go back to."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        """Copy everything."""
        self._states = [random_state(device, root) for root in subject.roots]
        self._tensors = [(t, t.detach().clone()) for t in subject.tensors()]
        self._grads = [(p, p.grad) for p in subject.of_modules("_parameters")]

    def restore(self) -> None:
        """Put everything back."""
        for state in self._states:
            restore(state)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
