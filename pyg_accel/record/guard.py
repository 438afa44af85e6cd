"""Everything besides arguments that a recorded call depends on, compared by identity.

A program replaces the code of a layer as long as all that this code reads is unchanged: the
attributes of the layer and its children, the functions that run, and the names that these read from
globals and closures. Values are compared by identity, containers and objects by their items. Calls
that read anything else, such as an object with ``__slots__``, are not recorded.
"""

import builtins
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from gc import get_referents
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook

from pyg_accel.record.code import assigned_outside, codes_of, is_library, is_library_file, module_of

__all__ = ["Guard", "NotComparable"]

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, slice, range, Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, type(Ellipsis), type,
)  # fmt: skip
_IMMUTABLE = ("typing", "types", "inspect", "re")  # modules of Python whose objects do not change
_CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, frozenset, deque)
_BUILTINS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
_Getter = Callable[[Any], tuple[Any, ...]]
_OF_MODULES = frozenset(vars(Module())) - {"training", "_parameters", "_buffers", "_modules"}
_CALLED = frozenset(("forward", "__call__"))  # methods of modules that torch calls
_DEPTH = 6  # of nested containers


class NotComparable(Exception):
    """A call reads something that cannot be compared."""


class Guard:
    """Everything that the code of a layer reads; see the module.

    Args:
        layer: the layer.
        entries: functions that a call runs first, such as the layer's ``forward``.

    Attributes:
        codes: code objects whose reads are compared.
        tensors: the tensors among the compared values, by identity.
        floats: names of floats; "" for one that any code may read.

    Raises:
        NotComparable: naming what cannot be compared.
    """

    def __init__(self, layer: Module, entries: Iterable[Callable[..., Any]]) -> None:
        self.codes: set[types.CodeType] = set()
        self.tensors: dict[int, Tensor] = {}
        self.floats: set[str] = set()
        self._containers: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        self._dicts: dict[int, tuple[Mapping[Any, Any], int, _Getter, list[Any]]] = {}
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any], bool]] = {}
        self._sizes: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._modules: dict[int, Module] = {}
        self._classes: dict[type, Mapping[str, Any]] = {}
        self._libraries: set[int] = set()  # modules by identity
        self._pending: list[types.FunctionType] = []
        self._read = {*_CALLED}  # names
        self._absent: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        for module in layer.modules():
            self._add_module(module)
        for function in entries:
            self._add_value("", function)
        self._follow()
        self._settled: tuple[Any, ...] = ()

    def settle(self, ran: Collection[types.CodeType]) -> None:
        """Drop the functions that did not run; called once, after the call was recorded.

        Raises:
            NotComparable: if something has changed since, or if unknown code ran.
        """
        for code in ran:
            if code not in self.codes and not is_library_file(code.co_filename):
                raise NotComparable(f"'{code.co_name}' is not reached by a name or an attribute")
        functions = [f for f in self._functions.values() if f.__code__ in ran]
        for function in functions:
            if not is_library_file(function.__code__.co_filename):
                for own in (function.__kwdefaults__, vars(function)):
                    if own:  # may be changed in place, unlike positional defaults
                        self._add_dict(own, own)
        read = {n for f in functions for c in codes_of(f.__code__) for n in c.co_names}
        read |= _CALLED
        groups = []
        for mapping, names, always in self._names.values():
            values = {
                n: v for n, v in names.items() if (always or n in read) and _counts(n, v, ran)
            }
            if values:
                groups.append((_getter(tuple(values)), mapping, tuple(values.values())))
        containers = self._containers.values()
        cells = self._cells.values()
        self._settled = (
            tuple(entry for entry in self._dicts.values() if entry[1]),
            tuple(c for c, items in containers if not items)
            + tuple(d for d, count, _, _ in self._dicts.values() if not count),
            tuple((c, len(items), items) for c, items in containers if items),
            tuple(groups),
            tuple(self._sizes.values()),
            tuple(entry for entry in self._absent.values() if entry[1]),
            functions,
            *_parts_of(functions),
            [c for c, _ in cells],
            [value for _, value in cells],
        )
        if not self.holds():
            raise NotComparable("it changes what it reads: an attribute or a container")

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        (dicts, empty, filled, groups, sizes, absent, functions, count_of_parts, get_parts, parts,
         cells, contents) = self._settled  # fmt: skip
        if any(empty) or _has_any_global_hook():
            return False
        for container, count, items in filled:
            if len(container) != count or not all(map(is_, container, items)):
                return False
        for mapping, count in sizes:
            if len(mapping) != count:
                return False
        for space, hidden in absent:
            if not space.keys().isdisjoint(hidden):
                return False
        try:
            for mapping, count, get, values in dicts:
                if len(mapping) != count or not all(map(is_, get(mapping), values)):
                    return False
            for get, mapping, values in groups:
                if not all(map(is_, get(mapping), values)):
                    return False
            if not all(map(is_, map(_contents_of, cells), contents)):
                return False
        except (KeyError, ValueError):  # a name or the content of a cell was deleted
            return False
        now = get_referents(*functions)
        return len(now) == count_of_parts and all(map(is_, get_parts(now), parts))

    def compares(self, container: Any) -> bool:
        """Return whether a container is one of the compared values."""
        return id(container) in self._containers or id(container) in self._dicts

    def reads_of(self, tensor: Tensor) -> bool:
        """Return whether code may read a Python attribute of a tensor."""
        return not self._read.isdisjoint(vars(tensor))

    # -- collecting --------------------------------------------------------------------------------

    def _add_module(self, module: Module) -> None:
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        cls = type(module)
        if cls.__getattr__ is not Module.__getattr__ and not is_library(module_of(cls)):
            raise NotComparable(f"{cls.__name__} has a '__getattr__' of its own")
        attributes = vars(module)
        copied = attributes.copy()  # another thread may run the layer and set its own
        for name, value in copied.items():
            self._add_value(f"{cls.__name__}.{name}", value)
        # Empty dictionaries of hooks are not compared by identity: _add_value() has added them.
        hooks = {n for n, v in copied.items() if n.endswith(("_hooks", "_always_called")) and not v}
        compared = {n: v for n, v in copied.items() if n not in _OF_MODULES | hooks}
        self._add_dict(attributes, compared)
        self._add_classes(cls)

    def _add_classes(self, cls: type) -> None:
        for base in cls.__mro__:
            if base not in (Module, object) and base not in self._classes:
                self._classes[base] = vars(base)
                self._sizes[id(base)] = (vars(base), len(vars(base)))

    def _add_dict(self, mapping: dict[Any, Any], items: dict[Any, Any]) -> None:
        """Compare some items of a dictionary, and its length."""
        self._dicts[id(mapping)] = (mapping, len(mapping), _getter(tuple(items)), [*items.values()])

    def _follow(self) -> None:
        """Add all code that is reachable by names and attributes."""
        followed: set[tuple[type, str]] = set()
        grows = True
        while grows:
            while self._pending:
                self._add_code(self._pending.pop())
            grows = False
            for base in [*self._classes]:
                for name in self._read & self._classes[base].keys():
                    if (base, name) not in followed:
                        followed.add((base, name))
                        self._add_member(base, name)
                        grows = True

    def _add_member(self, base: type, name: str) -> None:
        """Add an attribute of a class of modules."""
        value = self._note(self._classes[base], name)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self._add_value(name, part)
        elif isinstance(value, types.FunctionType) or not is_library(module_of(base)):
            self._add_value(f"{base.__name__}.{name}", value)

    def _note(self, mapping: Mapping[str, Any], name: str, *, always: bool = False) -> Any:
        """Note a name that code reads, or, with ``always``, may read."""
        value = mapping[name]
        self._names.setdefault(id(mapping), (mapping, {}, always))[1][name] = value
        return value

    def _add_value(self, name: str, value: Any, depth: int = _DEPTH) -> None:
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, float):
            self.floats.update(name.split("."))
        elif isinstance(value, _CONSTANTS + _BUILTINS):
            return
        elif type(value) in _CONTAINERS:
            self._add_container(name, value, depth)
        elif isinstance(value, Module):
            self._add_module(value)
        elif isinstance(value, types.FunctionType):
            self._pending.append(value)
        elif isinstance(value, types.MethodType):
            self._add_value(name, value.__self__, depth)
            self._add_value(name, value.__func__, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._add_value(name, part, depth)
        elif isinstance(value, types.ModuleType) or _is_immutable(type(value)):
            return
        elif tuple in type(value).__mro__:
            self._add_container(name, value, depth)
        else:
            self._add_object(name, value, depth)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        """Add the attributes of an object of a user's class, and the class."""
        cls = type(value)
        getattribute: Any = cls.__getattribute__
        plain = getattribute is object.__getattribute__ and not hasattr(cls, "__getattr__")
        if not depth or not plain or not hasattr(value, "__dict__") or _has_slots(cls):
            raise NotComparable(f"it reads '{name}', an object of {cls.__name__}")
        if id(vars(value)) in self._dicts:
            return
        self._add_dict(vars(value), vars(value))
        self._add_classes(cls)
        for part, item in vars(value).copy().items():
            self._add_value(f"{name}.{part}", item, depth - 1)

    def _add_container(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._containers or id(value) in self._dicts:
            return
        if not depth:
            raise NotComparable(f"it reads '{name}', a container of containers")
        if isinstance(value, dict):
            items = tuple(value.values())
            self._add_dict(value, value)
        else:
            items = tuple(value)
            if not isinstance(value, (tuple, frozenset)):
                self._containers[id(value)] = (value, items)
        for item in items:
            self._add_value(name, item, depth - 1)

    def _add_code(self, function: types.FunctionType) -> None:
        if id(function) in self._functions:
            return
        code = function.__code__
        self._functions[id(function)] = function
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add_value(f"{code.co_name}.default", value)
        if isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
            self._pending.append(wrapped)
        if is_library_file(code.co_filename) and not _is_layer_code(function):
            return
        codes = [*codes_of(code)]
        self.codes.update(codes)
        for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True):
            self._cells[id(cell)] = (cell, cell.cell_contents)
            self._add_value(name, cell.cell_contents)
        for name in assigned_outside(code):
            raise NotComparable(f"'{code.co_name}' assigns to '{name}' outside of it")
        names = {name for c in codes for name in c.co_names}
        self._read |= names
        space = function.__globals__
        for name in names & space.keys():
            self._add_global(name, self._note(space, name), names)
        hidden = (names - space.keys()) & vars(builtins).keys()
        self._absent.setdefault(id(space), (space, set()))[1].update(hidden)
        for name in hidden:
            self._note(vars(builtins), name)

    def _add_global(self, name: str, value: Any, names: set[str]) -> None:
        """Add a global, and the attributes that code reads if it is a user's module or class."""
        if not isinstance(value, (type, types.ModuleType)):
            self._add_value(name, value)
        elif _is_of_library(value):
            self._add_library(value, names)
        else:
            if isinstance(value, type) and issubclass(value, (Module, tuple, BaseException)):
                return
            attributes = vars(value)
            for part in names & attributes.keys():
                self._add_value(f"{name}.{part}", self._note(attributes, part, always=True))

    def _add_library(self, value: Any, names: set[str]) -> None:
        """Add the attributes that code reads of a library's module: users may replace them."""
        if not isinstance(value, types.ModuleType) or id(value) in self._libraries:
            return
        self._libraries.add(id(value))
        attributes = vars(value)
        for name in names & attributes.keys():
            part = self._note(attributes, name)
            if isinstance(part, types.ModuleType):
                self._add_library(part, names)
            elif isinstance(part, types.FunctionType) and not is_library(module_of(part)):
                self._add_value(name, part)


_contents_of = attrgetter("cell_contents")


def _getter(keys: tuple[Any, ...]) -> _Getter:
    """Return a function that returns the values at these keys of a dictionary or a list."""
    return itemgetter(*keys, *keys[:1]) if keys else lambda mapping: ()


def _parts_of(functions: list[types.FunctionType]) -> tuple[int, _Getter, tuple[Any, ...]]:
    """Return how many objects functions refer to, what picks code and defaults, and these.

    Their attributes are not read: each time Python would call the audit hooks of the process, and
    filelock, which torch imports, has one.
    """
    found = get_referents(*functions)
    compared = attrgetter("__code__", "__defaults__", "__kwdefaults__")
    wanted = {id(part) for f in functions for part in compared(f) if part is not None}
    places = tuple([place for place, part in enumerate(found) if id(part) in wanted])
    get = _getter(places)
    return len(found), get, get(found)


def _counts(name: str, value: Any, ran: Collection[types.CodeType]) -> bool:
    """Whether a name is compared: methods that did not run, and library modules, are not."""
    if isinstance(value, types.ModuleType):
        return not is_library(value.__name__)
    if (
        isinstance(value, types.FunctionType)
        and is_library(module_of(value))
        and name not in _CALLED
    ):
        return value.__code__ in ran or hasattr(value, "_pyg_accel")
    return True


def _is_immutable(cls: type) -> bool:
    """Whether objects of a class of a library are compared by identity only."""
    return is_library(module_of(cls)) or module_of(cls) in _IMMUTABLE


def _has_slots(cls: type) -> bool:
    return any("__slots__" in vars(base) and vars(base)["__slots__"] for base in cls.__mro__)


def _is_of_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else module_of(value)
    top = name.split(".", 1)[0]
    return is_library(name) or top in sys.stdlib_module_names or top in ("numpy", "scipy")


def _is_layer_code(function: types.FunctionType) -> bool:
    """Whether a function of PyG is code of a layer, whose globals users may replace."""
    return str(function.__globals__.get("__name__")).startswith("torch_geometric.nn.conv.")
