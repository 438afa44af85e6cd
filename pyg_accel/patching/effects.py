"""Effects of a message's code that cannot be undone if an attempt to trace it fails.

A message that turns out to be no formula runs again, in PyG's own path. What is put back before is
listed in :mod:`.rng_state`; numbers of NumPy and Python, generators of the user and objects outside
of the layer are not. So a message may be attempted only if its code reads nothing but torch, PyG,
its layer, numbers, and functions of which the same is true. Nor may it ask a tensor which object it
is: messages are of another class while they are recorded.
"""

import builtins
import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.patching.reasons import modules_in

__all__ = ["effect_reasons", "tensors_outside"]

# What a rendered `propagate` and `edge_updater` call.
METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
# Packages whose functions change nothing but random numbers of torch and what they are given.
_PACKAGES = frozenset({
    "torch", "torch_geometric", "torch_scatter", "torch_sparse", "pyg_accel", "math", "operator",
    "_operator", "typing", "abc", "collections",
})  # fmt: skip
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
    """Return why a layer's message must run once, on ordinary tensors."""
    return list(islice((found for found in _found(module) if isinstance(found, str)), 1))


def tensors_outside(module: MessagePassing) -> list[Tensor]:
    """Return the tensors that the code of a message reads and that are not the layer's."""
    return [found for found in _found(module) if isinstance(found, Tensor)]


def _found(module: MessagePassing) -> Iterator[str | Tensor]:
    reader = _Reader(module)
    yield from reader.methods(*METHODS)
    for part in modules_in(*module.children()):
        if not _is_of_packages(type(part)) or "forward" in vars(part):
            yield from _Reader(part).methods("forward")


class _Names(NamedTuple):
    """What code and the functions inside of it read and assign, each name once."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    assigned: tuple[str, ...]
    imported: tuple[str, ...]
    changes: bool  # what is in a container


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> _Names:
    read: tuple[dict[str, None], ...] = ({}, {}, {}, {})
    codes, changes = [code], False
    for inner in codes:  # as it grows
        codes += [constant for constant in inner.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(inner):
            operation, name = instruction.opname, instruction.argval
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                read[0][name] = None
            elif operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                read[1][name] = None
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                operation in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars
            ):
                read[2][name] = None
            elif operation == "IMPORT_NAME":
                read[3][name] = None
            changes |= operation in ("STORE_SUBSCR", "DELETE_SUBSCR")
    changes = changes or not _CHANGES.isdisjoint(read[1])
    return _Names(tuple(read[0]), tuple(read[1]), tuple(read[2]), tuple(read[3]), changes)


class _Reader:
    """Goes through the functions that the methods of a layer, or of a module in it, call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self._seen = module, set[int]()
        self._containers: list[str] = []  # outside of the layer
        self._changes = False

    def methods(self, *names: str) -> Iterator[str | Tensor]:
        """Yield what is known against the code of methods, and tensors that it reads."""
        for name in names:
            yield from self.attribute(name)
        if self._changes:
            yield from (f"a message that may change '{name}'" for name in self._containers)

    def value(self, value: Any, name: str) -> Iterator[str | Tensor]:
        """Yield what is known against a value that code reads, and tensors in it."""
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from self.value(value.__func__, name)
            if value.__self__ is not self.module:
                yield from self.value(value.__self__, name)
        elif isinstance(value, (staticmethod, classmethod)):
            yield from self.value(value.__func__, name)
        elif isinstance(value, property):
            yield from self.value(value.fget, name)
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, frozenset)):
            yield from self._all(value, name)
        elif isinstance(value, _CONTAINERS):
            self._containers.append(name)
            yield from self._all(value.values() if isinstance(value, dict) else value, name)
        elif isinstance(value, partial):
            yield from self._all((value.func, *value.args, *value.keywords.values()), name)
        elif not _is_harmless(value):
            yield f"a message that reads '{name}'"

    def attribute(self, name: str) -> Iterator[str | Tensor]:
        """The same of an attribute of the layer, of all classes that have one of this name."""
        own = vars(self.module)
        if name in own:
            value = own[name]
            if isinstance(value, _CONTAINERS):  # which are put back
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
        home = (function.__globals__.get("__name__") or "").partition(".")[0]
        if id(function) in self._seen or home in _PACKAGES:
            return
        self._seen.add(id(function))
        names = _names(function.__code__)
        self._changes |= names.changes
        for name in names.assigned:
            yield f"a message that assigns '{name}' outside of its layer"
        for name in names.imported:
            if name.partition(".")[0] not in _PACKAGES:
                yield f"a message that reads '{name}'"
        for name in names.globals:
            if name in function.__globals__:
                yield from self.value(function.__globals__[name], name)
            elif hasattr(builtins, name):
                yield from self.value(getattr(builtins, name), name)
        for name in names.attributes:
            if name in _IDENTITY:
                yield f"a message that reads '{name}'"
            yield from self.attribute(name)
        free = function.__code__.co_freevars
        for name, cell in zip(free, function.__closure__ or (), strict=True):
            if name != "__class__" and cell != CellType():  # it may be empty
                yield from self.value(cell.cell_contents, name)
        yield from self._all(function.__defaults__ or (), "a default")


def _is_of_packages(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _PACKAGES


def _is_harmless(value: Any) -> bool:
    """Whether a value neither changes nor has functions that change anything."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _PACKAGES
    if isinstance(value, type) and issubclass(value, BaseException):
        return True
    name = getattr(value, "__name__", "")
    if getattr(builtins, name, None) is value:
        return name in _PURE
    if isinstance(value, BuiltinFunctionType) and not _is_of_packages(value):
        return value.__self__ is not None and _is_harmless(value.__self__)
    if isinstance(value, torch.nn.Module):
        return _is_of_packages(type(value)) and not list(value.buffers())
    if isinstance(value, (type, BuiltinFunctionType)):
        return _is_of_packages(value)
    return _is_of_packages(type(value)) and not isinstance(value, torch.Generator)
