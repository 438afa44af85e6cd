"""A call, taken apart: its arguments, the modes in force, and the modules that take part."""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.data import Data

from pyg_accel.cuda_graphs.ledger import Ledger
from pyg_accel.patching.rng_state import random_state, restore

__all__ = [
    "Arguments", "Checkpoint", "Modes", "ModuleState", "Uncapturable", "buffers_of", "flatten",
    "modules_of", "names_of", "parameters_of", "replaced",
]  # fmt: skip

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


def _is_text(value: Any) -> bool:
    """Names of molecules and the like, new in each batch and of no use to a model."""
    return isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(map(_is_text, value))
    )


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
    keys = len(items) if isinstance(value, (list, tuple)) else tuple(key for key, _ in items)
    yield name, None, (type(value), keys)
    for key, item in items:
        yield from _leaves(item, str(key))


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a value with others in the places of its leaves, in the order of `_leaves`."""
    items = _items(value, "")
    if items is None:
        return leaf(value)
    made = [(key, _mapped(item, leaf)) for key, item in items]
    if isinstance(value, dict):
        return type(value)(made)
    if isinstance(value, Data):
        other = copy.copy(value)
        for key, item in made:
            if _GRAPHS in vars(other) and key == _GRAPHS[1:]:
                vars(other)[_GRAPHS] = item
            else:
                other[key] = item
        return other
    parts = [item for _, item in made]
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
                if container is not None:
                    form.append(container)
                elif kind in _PLAIN:
                    form.append(Tensor)
                    self.tensors.append(value)
                    self.names.append(name)
                elif kind is int:
                    form.append(int)
                    new = name not in self.numbers and name not in ("nodes", "graphs")
                    self.numbers[name if new else f"{name} {len(form)}"] = value
                elif kind in _CONSTANTS:
                    form.append((kind, value))
                else:
                    raise Uncapturable(f"'{name}' is a {kind.__name__}")
        self.form: Hashable = tuple(form)

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
        kwargs = {name: _mapped(value, leaf) for name, value in self._kwargs.items()}
        return args, kwargs


def flatten(value: Any) -> list[Tensor]:
    """Return the tensors of a result.

    Raises:
        Uncapturable: for results that hold anything else than tensors and constants.
    """
    found = []
    for _, leaf, container in _leaves(value):
        kind = type(leaf) if container is None else container[0]
        if kind in _PLAIN:
            found.append(leaf)
        elif kind not in _CONSTANTS and not issubclass(kind, (dict, list, tuple)):
            raise Uncapturable(f"it returns a {kind.__name__}")
    return found


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
        return cls(
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip


def modules_of(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return modules and those inside them, each once."""
    return list(dict.fromkeys(m for root in roots for m in root.modules()))


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[Tensor]:
    """Return the parameters of these modules themselves, each once."""
    return list(dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None))


def buffers_of(modules: Iterable[torch.nn.Module]) -> list[Tensor]:
    """Return the buffers of these modules themselves, each once."""
    return list(dict.fromkeys(b for m in modules for b in m._buffers.values() if b is not None))


class ModuleState:
    """Attributes, parameters and buffers of modules as they are, by identity.

    Replacing any of them, also by ``train()``, ``to()`` or ``load_state_dict(assign=True)``, makes
    another state; values in parameters and buffers may change. What is in a list or a dictionary
    that a module keeps is not looked at.

    Attributes:
        ledger: the account of the calls in this state.
    """

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        """Look at the modules."""
        self.modules = modules_of(roots)
        dicts = [vars(module) for module in self.modules]
        inner = [d[name] for d in dicts for name in ("_parameters", "_buffers", "_modules")]
        self._dicts = [*dicts, *inner]
        self._values = [value for d in self._dicts for value in d.values()]
        self._hooks = [d[name] for d in dicts for name in _HOOKS]
        self.parameters, self.buffers = parameters_of(self.modules), buffers_of(self.modules)
        self._tensors = self._look()
        self.ledger = Ledger()

    def _look(self) -> list[Any]:
        tensors = [*self.parameters, *self.buffers]
        return [*map(Tensor.data_ptr, tensors), *map(_REQUIRES_GRAD, tensors)]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        now = chain.from_iterable(map(dict.values, self._dicts))
        return (
            sum(map(len, self._dicts)) == len(self._values)
            and all(map(is_, now, self._values))
            and self._look() == self._tensors
        )

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was."""
        names = [name for d in self._dicts for name in d]
        now = chain.from_iterable(map(dict.values, self._dicts))
        if len(names) != len(self._values):
            return ["which attributes there are"]
        found = zip(names, now, self._values, strict=True)
        changed = dict.fromkeys(name for name, value, then in found if value is not then)
        if not changed and self._look() != self._tensors:
            return ["the memory of its parameters"]
        return list(changed)

    def key(self) -> Hashable:
        """Return by what this state is found again; it holds while this object lives."""
        values = [value if type(value) in _SCALARS else id(value) for value in self._values]
        return tuple(map(len, self._dicts)), tuple(values), tuple(self._tensors)

    def reasons(self) -> list[str]:
        """Return why calls of these modules cannot be captured."""
        if any(self._hooks) or _has_any_global_hook():
            return ["a hook on one of its modules"]
        if any(p._backward_hooks for p in self.parameters):
            return ["a hook on one of its parameters"]
        return []


class Checkpoint:
    """Random numbers, attributes and tensors as they are, to go back to after a trial."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], tensors: Iterable[Tensor], device: torch.device
    ) -> None:
        """Copy everything."""
        self._random = random_state(device)
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._grads = [(p, p.grad) for p in parameters_of(modules)]
        dicts = [d for m in modules for d in (vars(m), m._parameters, m._buffers, m._modules)]
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = [(d, dict(d)) for d in dicts]

    def restore(self) -> None:
        """Put everything back."""
        for now, then in self._dicts:
            if list(now) != list(then) or not all(map(is_, now.values(), then.values())):
                now.clear()
                now.update(then)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        with torch.no_grad():
            for tensor, copy in self._tensors:  # batch_norm changes its buffers without a version
                tensor.copy_(copy)
        restore(self._random)
