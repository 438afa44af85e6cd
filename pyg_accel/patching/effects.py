"""Effects of the code of a message that cannot be undone if its trace fails.

A message without a formula runs again, in PyG's own path. A
:class:`~pyg_accel.runtime.module_state.ModuleState` restores the layer before that, but not random
numbers of NumPy and Python, generators of the user and objects outside of the layer. So a message
is traced only if its code reads torch, PyG, its layer, numbers, and functions with the same
property. It must not read the identity of a tensor either: traced messages have another class.
"""

import builtins
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.record.code import assigned_outside, is_library, module_of, named_in
from pyg_accel.runtime.module_state import modules_in

__all__ = ["effect_reasons", "tensors_outside"]

# The methods that a rendered `propagate` and `edge_updater` call.
METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
# Besides torch and PyG, whose functions only change generators of torch and arguments.
_PURE_MODULES = ("math", "operator", "_operator", "typing", "abc", "collections")
_PURE = frozenset({
    "abs", "all", "any", "bool", "bytes", "callable", "complex", "dict", "divmod", "enumerate",
    "filter", "float", "frozenset", "getattr", "hasattr", "int", "isinstance", "issubclass", "len",
    "list", "map", "max", "min", "object", "pow", "property", "range", "reversed", "round", "set",
    "slice", "sorted", "sum", "super", "tuple", "zip",
})  # fmt: skip
_IDENTITY = frozenset({"__class__", "__dict__", "data_ptr"})  # of a tensor
_CONTAINERS = (dict, list, set)
# Methods that change a container.
_CHANGES = frozenset(name for cls in _CONTAINERS for name in dir(cls)).difference(
    ("get", "items", "keys", "values"), dir(tuple), dir(frozenset)
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))


def effect_reasons(module: MessagePassing) -> list[str]:
    """Return why the message of a layer must not be traced."""
    return list(islice((finding for finding in _findings(module) if isinstance(finding, str)), 1))


def tensors_outside(module: MessagePassing) -> list[Tensor]:
    """Return the tensors outside of the layer that the code of a message reads."""
    return [finding for finding in _findings(module) if isinstance(finding, Tensor)]


def _findings(module: MessagePassing) -> Iterator[str | Tensor]:
    reader = _Reader(module)
    yield from reader.methods(*METHODS)
    for part in modules_in(*module.children()):
        if not _is_of_packages(type(part)) or "forward" in vars(part):
            yield from _Reader(part).methods("forward")


class _Reader:
    """Visits the functions that methods of a layer, or of a module in it, call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self._visited = module, set[int]()
        self._containers: list[str] = []  # outside of the layer
        self._changes = False

    def methods(self, *names: str) -> Iterator[str | Tensor]:
        """Yield the reasons against the code of methods, and the tensors that it reads."""
        for name in names:
            yield from self.attribute(name)
        if self._changes:
            yield from (f"a message that may change '{name}'" for name in self._containers)

    def value(self, value: Any, name: str) -> Iterator[str | Tensor]:
        """Yield the reasons against a value that code reads, and the tensors in it."""
        cls = type(value)  # `__class__` may differ
        if issubclass(cls, FunctionType):
            yield from self._function(value)
        elif issubclass(cls, MethodType):
            yield from self.value(value.__func__, name)
            if value.__self__ is not self.module:
                yield from self.value(value.__self__, name)
        elif issubclass(cls, (staticmethod, classmethod)):
            yield from self.value(value.__func__, name)
        elif issubclass(cls, property):
            yield from self.value(value.fget, name)
        elif issubclass(cls, Tensor):
            yield value
        elif issubclass(cls, (tuple, frozenset)):
            yield from self._all(value, name)
        elif issubclass(cls, _CONTAINERS):
            self._containers.append(name)
            if id(value) not in self._visited:  # it may contain itself
                self._visited.add(id(value))
                yield from self._all(value.values() if isinstance(value, dict) else value, name)
        elif issubclass(cls, partial):
            yield from self._all((value.func, *value.args, *value.keywords.values()), name)
        elif not _is_harmless(value):
            yield f"a message that reads '{name}'"

    def attribute(self, name: str) -> Iterator[str | Tensor]:
        """Yield the same for an attribute of the layer, from all classes that define it."""
        attributes = vars(self.module)
        if name in attributes:
            value = attributes[name]
            if isinstance(value, _CONTAINERS):  # restored by ModuleState
                value = tuple(value.values() if isinstance(value, dict) else value)
            if not isinstance(value, (Tensor, torch.nn.Module)):
                yield from self.value(value, name)
        for cls in type(self.module).__mro__:
            if not _is_of_packages(cls) and name in vars(cls):
                yield from self.value(vars(cls)[name], name)

    def _all(self, values: Iterable[Any], name: str) -> Iterator[str | Tensor]:
        for value in values:
            yield from self.value(value, name)

    def _function(self, function: FunctionType) -> Iterator[str | Tensor]:
        if id(function) in self._visited or _is_pure(function.__globals__.get("__name__")):
            return
        self._visited.add(id(function))
        code = function.__code__
        attributes = named_in(code, "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
        self._changes |= bool(named_in(code, "STORE_SUBSCR", "DELETE_SUBSCR"))
        self._changes |= not _CHANGES.isdisjoint(attributes)
        for name in assigned_outside(code):
            yield f"a message that assigns '{name}' outside of its layer"
        for name in named_in(code, "IMPORT_NAME"):
            if not _is_pure(name):
                yield f"a message that reads '{name}'"
        for name in named_in(code, "LOAD_GLOBAL", "LOAD_NAME"):
            if name in function.__globals__:
                yield from self.value(function.__globals__[name], name)
            elif hasattr(builtins, name):
                yield from self.value(getattr(builtins, name), name)
        for name in attributes:
            if name in _IDENTITY:
                yield f"a message that reads '{name}'"
            yield from self.attribute(name)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and cell != CellType():  # it may be empty
                yield from self.value(cell.cell_contents, name)
        yield from self._all(function.__defaults__ or (), "a default")


def _is_pure(module: str | None) -> bool:
    return is_library(module) or str(module).partition(".")[0] in _PURE_MODULES


def _is_of_packages(value: Any) -> bool:
    return _is_pure(module_of(value))


def _is_harmless(value: Any) -> bool:
    """Whether a value is immutable, without methods that have effects."""
    cls = type(value)
    if issubclass(cls, _PLAIN):
        return True
    if issubclass(cls, ModuleType):
        return _is_pure(value.__name__)
    if issubclass(cls, (type, BuiltinFunctionType)):
        if issubclass(cls, type) and issubclass(value, BaseException):
            return True
        name = value.__name__
        if getattr(builtins, name, None) is value:
            return name in _PURE
        owner = None if issubclass(cls, type) else value.__self__
        return _is_of_packages(value) or (owner is not None and _is_harmless(owner))
    if issubclass(cls, torch.nn.Module):
        return _is_of_packages(cls) and not list(value.buffers())
    return _is_of_packages(cls) and not issubclass(cls, torch.Generator)
