"""The parts of a call: its arguments, the modes of torch, and the modules that run."""

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

from pyg_accel.cuda_graphs.ledger import Ledger
from pyg_accel.runtime.checks import check_arguments
from pyg_accel.runtime.hooks import HOOKS
from pyg_accel.runtime.module_state import PROGRAMS, ModuleState

__all__ = ["Arguments", "Checkpoint", "Modes", "State", "Subject", "Uncapturable", "flatten",
           "names_of", "naming", "replaced"]  # fmt: skip

_SCALARS = (bool, int, float, complex, str, type(None))
_CONSTANTS = (*_SCALARS, bytes, torch.dtype, torch.device)
_PLAIN = (Tensor, torch.nn.Parameter)
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAPHS = "_num_graphs"  # the attribute of a batch of PyG with its number of graphs


class Uncapturable(Exception):
    """A call cannot be captured, with the reason; it runs eagerly."""


def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of a function."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature(function).parameters.values() if p.kind in kinds)


@contextmanager
def naming(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """If a call fails because of wrong types of arguments, raise an error that names them."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and isinstance(sys.exc_info()[1], Exception):  # not KeyboardInterrupt
            check_arguments({**dict(zip(names_of(function), args, strict=False)), **kwargs})


def _is_text(value: Any) -> bool:
    """Whether a value is text, which models do not read, such as names of molecules."""
    several = isinstance(value, (list, tuple))
    return all(map(_is_text, value)) if several else isinstance(value, str)


def _items(value: Any, name: str) -> list[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or its name; None for other values."""
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, tuple)):
        return [(name, item) for item in value]
    if isinstance(value, Data):
        graphs = {n[1:]: v for n, v in vars(value).items() if n == _GRAPHS}
        return [(k, v) for k, v in (value.to_dict() | graphs).items() if not _is_text(v)]
    return None


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any, tuple[type, Any] | None]]:
    """Yield name and value of each leaf, and class and keys of each container before its leaves."""
    items = _items(value, name)
    if items is None:
        yield name, value, None
        return
    yield name, None, (type(value), tuple(key for key, _ in items))
    for key, item in items:
        yield from _leaves(item, str(key))


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a value with its leaves replaced, in the order of `_leaves`."""
    items = _items(value, "")
    if items is None:
        return leaf(value)
    mapped = [(key, _mapped(item, leaf)) for key, item in items]
    if isinstance(value, Data):
        other = copy.copy(value)
        for key, item in mapped:
            if key == _GRAPHS[1:] and _GRAPHS in vars(other):
                vars(other)[_GRAPHS] = item
            else:
                other[key] = item
        return other
    parts = mapped if isinstance(value, dict) else [item for _, item in mapped]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


class Arguments:
    """The arguments of one call.

    Attributes:
        tensors: all tensors, also inside of lists, tuples, dictionaries and ``Data``.
        names: for each tensor, the name of the argument, or its key in the innermost container.
        form: everything else: calls of one form only differ in their tensors and ``numbers``.
        numbers: Python integers, by name; they may be numbers of rows.
    """

    __slots__ = ("_args", "_kwargs", "form", "names", "numbers", "tensors")

    def __init__(
        self, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Collect the tensors and numbers.

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
        """Return arguments with other tensors, without references to the old ones."""
        other = copy.copy(self)
        other._args, other._kwargs = self.rebuild(tensors, {})
        other.tensors = [*tensors]
        return other

    def rebuild(
        self, tensors: Sequence[Tensor], numbers: Mapping[str, int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors and numbers."""
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
        Uncapturable: for results with anything else than tensors and constants.
    """
    leaves = [(leaf, type(leaf) if container is None else container[0])
              for _, leaf, container in _leaves(value)]  # fmt: skip
    for _, kind in leaves:
        if kind not in (*_PLAIN, *_CONSTANTS) and not issubclass(kind, (dict, list, tuple)):
            raise Uncapturable(f"it returns a {kind.__name__}")
    return [leaf for leaf, kind in leaves if kind in _PLAIN]


def replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a result with other tensors."""
    return _mapped(value, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf)


class Modes(NamedTuple):
    """The global state of torch that a call depends on."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    precision: str
    deterministic: bool

    @classmethod
    def now(cls, device: str) -> "Modes":
        """Return the current modes."""
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast,
                   torch.get_float32_matmul_precision(),
                   torch.are_deterministic_algorithms_enabled())  # fmt: skip


class Subject:
    """A function to capture: a model here, a step in the subclass of :mod:`.step`.

    Args:
        call: makes an eager call.
        roots: modules that run.
        name: for the report.
    """

    def __init__(
        self, call: Callable[..., Any], roots: Iterable[torch.nn.Module], name: str
    ) -> None:
        self.call, self.roots, self.name = call, tuple(dict.fromkeys(roots)), name

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules that run, each once."""
        return list(dict.fromkeys(m for root in self.roots for m in root.modules()))

    def of_modules(self, kind: str) -> list[Tensor]:
        """Return the ``"_parameters"`` or ``"_buffers"`` of the modules, each once."""
        tensors = (t for m in self.modules for t in vars(m)[kind].values() if t is not None)
        return list(dict.fromkeys(tensors))

    def reasons(self) -> list[str]:
        """Return why no call can be captured."""
        return []

    def key(self) -> Any:
        """Return a key of the state outside of modules on which a call depends."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a call may change in place, besides buffers."""
        return []

    def evidence(self) -> dict[str, list[Tensor]]:
        """Return the tensors that a call changes, by kind, to compare them between calls."""
        return {"buffer": self.of_modules("_buffers")}

    def prepare(self) -> None:
        """Prepare for a capture."""

    def recorded(self) -> Any:
        """Return the assignments of a recorded call, such as gradients."""

    def finish(self, left: Any) -> None:
        """Repeat the assignments after a replay."""


class State:
    """Attributes, parameters and buffers of modules, by identity.

    Replacing any of them, also by ``train()``, ``to()`` or ``load_state_dict(assign=True)``, makes
    another state; values in parameters and buffers may change. Contents of lists and dictionaries
    in attributes are not compared.

    Attributes:
        ledger: the account of the calls in this state.
    """

    def __init__(self, subject: Subject) -> None:
        """Read the modules."""
        self.modules = subject.modules
        dicts = [vars(module) for module in self.modules]
        inner = [d[name] for d in dicts for name in ("_parameters", "_buffers", "_modules")]
        self._dicts = [*dicts, *inner]
        self._values = [value for d in self._dicts for value in d.values()]
        self._items = self._read()
        self._hooks = [d[name] for d in dicts for name in HOOKS]
        self.parameters = subject.of_modules("_parameters")
        self._all = [*self.parameters, *subject.of_modules("_buffers")]
        self._tensors = self._look()
        self.ledger = Ledger()

    def _look(self) -> list[Any]:
        return [*map(Tensor.data_ptr, self._all), *map(_REQUIRES_GRAD, self._all)]

    def _read(self) -> list[tuple[str, Any]]:
        return [item for d in self._dicts for item in d.items() if item[0] != PROGRAMS]

    def changed(self) -> list[str]:
        """Return the names of attributes that have changed."""
        now = [*chain.from_iterable(map(dict.values, self._dicts))]
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            items = self._read()
            if len(items) != len(self._items):
                return ["which attributes there are"]
            pairs = zip(items, self._items, strict=True)
            if names := [name for (name, value), (_, then) in pairs if value is not then]:
                return list(dict.fromkeys(names))
            self._values = now
        return [] if self._look() == self._tensors else ["the memory of its parameters"]

    def key(self) -> Hashable:
        """Return a key of this state, which is valid while this object is alive."""
        values = [(n, v if type(v) in _SCALARS else id(v)) for n, v in self._items]
        return tuple(values), tuple(self._tensors)

    def reasons(self) -> list[str]:
        """Return why calls of these modules cannot be captured."""
        if any(self._hooks) or _has_any_global_hook():
            return ["a hook on one of its modules"]
        hooked = any(p._backward_hooks for p in self.parameters)
        return ["a hook on one of its parameters"] if hooked else []


class Checkpoint:
    """A copy of all state that a call may change, to restore it."""

    def __init__(self, subject: Subject, device: torch.device) -> None:
        """Copy the state."""
        self._state = ModuleState(subject.modules, device)
        self._tensors = [(t, t.detach().clone()) for t in subject.tensors()]
        self._grads = [(p, p.grad) for p in subject.of_modules("_parameters")]

    def restore(self) -> None:
        """Restore the state."""
        self._state.restore()
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
