"""Follows the values that code reads: from a layer by attributes, items and names to final values.

A walk visits an object if code that ran names it, and notes what a guard compares: the items of
dictionaries and containers, names of classes and modules, contents of closures, classes of objects.
It raises :class:`NotComparable` where reads cannot be followed.
"""

import builtins
import importlib.util
import sys
import types
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, strided
from torch.nn import Module, Parameter, ParameterDict, ParameterList

from pyg_accel.record.code import Kind, is_library, is_library_file, kind_of, module_of, names_of
from pyg_accel.record.finals import BUILTIN_FUNCTIONS, BUILTIN_TYPES, final, is_pure
from pyg_accel.record.notes import Notes
from pyg_accel.runtime.hooks import HOOKS
from pyg_accel.runtime.module_state import PROGRAMS

__all__ = ["ORIGINAL", "NotComparable", "Walk"]

ORIGINAL = "__original_fn"  # attribute of a function that a hook stands in for
_ALL = ("_parameters", "_buffers", "_modules")  # of modules: torch's code reads every item
_CALLED = ("forward", "__call__", "_call_impl")  # by torch
# Types as annotations write them, but for Annotated, which holds any object.
_ALIASES = (
    types.GenericAlias, types.UnionType,
    type(typing.Optional[int]), type(typing.List[int]),  # noqa: UP006, UP045
)  # fmt: skip
_SEQUENCES, _TABLES = (list, set, deque), (dict, OrderedDict, defaultdict)
_ADDED = {PROGRAMS, "__slotnames__"}  # to classes, by this package and by the module copy
_CONSTANTS = (int, float, str, bytes)  # types of members of an Enum


class NotComparable(Exception):
    """A call reads something that cannot be compared.

    Attributes:
        may_change: a later call of the same kind may not.
    """

    def __init__(self, reason: str, *, may_change: bool = False) -> None:
        super().__init__(reason)
        self.may_change = may_change


class Walk(Notes):
    """A walk over the values that code reads from some roots.

    Args:
        names: of attributes that code reads.
        ran: code objects that ran; None while code runs, when any may.
        outer: collects the classes, modules and globals that all layers of a class share, which
            are not followed then.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        ran: Collection[types.CodeType] | None = None,
        of_modules: Iterable[str] = (),
        optional: Collection[str] = (),
        outer: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self.names, self.optional, self._ran = set(names), set(optional), ran
        self.of_modules = {*of_modules, *self.names}
        self._entered: set[types.CodeType] = set()
        self._outer = outer
        self._bases: set[type] = set()
        self._references: list[Any] = []  # so that no identity is used twice
        self._open: list[tuple[Mapping[str, Any], Callable[[str], None], bool]] = []

    # -- while code runs ---------------------------------------------------------------------------

    def enter(self, code: types.CodeType) -> None:
        """Follow the names in code from now on."""
        if code in self._entered:
            return
        self._entered.add(code)
        names = names_of(code)
        if names.unseen:
            raise NotComparable(names.unseen)
        self.name(names.attributes)
        self.optional |= names.optional
        for function in self.functions.get(code, []):
            self._enter_function(function)

    def name(self, names: Iterable[str], *, of_modules: bool = False) -> None:
        """Follow more names of attributes, of all objects or of modules only."""
        new = set(names) - self.of_modules
        self.of_modules |= new
        if not of_modules:
            self.names.update(names)
        for space, follow, is_module in [*self._open]:
            for name in (new if is_module else set() if of_modules else names) & space.keys():
                follow(name)

    # -- values ------------------------------------------------------------------------------------

    def follow(self, name: str, value: Any) -> None:
        """Follow a value that code reads by a name."""
        if (constant := final(value)) is not None:
            self.key.append(constant)
            if constant[0] is float:
                self.floats.update(name.split("."))
            return
        number = self._places.get(id(value))
        if number is not None:
            self.key.append(number)
            return
        self._places[id(value)] = len(self._places)
        self._references.append(value)
        cls: Any = type(value)
        if issubclass(cls, Tensor):
            self._tensor(name, value)
        elif issubclass(cls, Module):
            self._module(name, value)
        elif cls in _TABLES or cls in _SEQUENCES or cls in (tuple, frozenset):
            self._container(name, value)
        elif cls is types.FunctionType:
            self._function(value)
        elif cls is types.MethodType:
            self.key.append("method")
            self.follow(name, value.__self__)
            self.follow(name, value.__func__)
        elif cls in _ALIASES:
            self.key.append(cls)
            self.follow(name, getattr(value, "__origin__", None))
            self.follow(name, value.__args__)
        elif cls is partial:
            self.key.append("partial")
            for part in (value.func, value.args, value.keywords):
                self.follow(name, part)
            self._attributes(name, value)
        elif issubclass(cls, Enum) and _is_plain(cls, *_CONSTANTS):
            self.key.append((cls, id(value)))
            self._attributes(name, value)
            self._share(cls)
        elif cls is property:
            for part in (value.fget, value.fset):
                self.follow(name, part)
        elif cls in (staticmethod, classmethod):
            self.follow(name, value.__func__)
            self._attributes(name, value)
        elif issubclass(cls, BUILTIN_FUNCTIONS):
            self._builtin(name, value)
        elif issubclass(cls, type) or cls is types.ModuleType:
            self.key.append(value)
            self._share(value)
        elif issubclass(cls, tuple) and (cls.__basicsize__, cls.__dictoffset__) == (
            tuple.__basicsize__, 0
        ):  # fmt: skip
            self.key.append(cls)
            for item in tuple(value):
                self.follow(name, item)
            self._share(cls)
        else:
            self._object(name, value)

    def share(self, value: Any) -> None:
        """Follow an object in ``outer`` of another walk: a class, a module, or globals of code."""
        if isinstance(value, tuple):
            self._globals(*value)
        elif isinstance(value, types.ModuleType):
            self._missing(vars(value), self.optional - vars(value).keys())
            self._namespace(value, vars(value), set())
        else:
            self._class(value)

    def _share(self, value: Any) -> None:
        if self._outer is None:
            self.share(value)
        else:
            self._outer.append(value)

    def _tensor(self, name: str, value: Tensor) -> None:
        if type(value) not in (Tensor, Parameter):
            raise NotComparable(f"it reads '{name}', a tensor of {type(value).__name__}")
        if self._ran is not None:  # else a recording would see what is read of the tensor
            strides = value.stride() if value.layout is strided else ()
            self.key.append((type(value), value.dtype, value.device, value.requires_grad,
                             value.shape, strides, value.is_conj(), value.is_neg()))  # fmt: skip
        self.tensors.append(value)
        self._attributes(name, value)

    def _module(self, name: str, value: Module) -> None:
        cls = type(value)
        if cls.__getattr__ is not Module.__getattr__:
            raise NotComparable(f"{cls.__name__} has a '__getattr__' of its own")
        self.key.append(cls)
        attributes = vars(value)
        for table in HOOKS:  # of a module that is not called, or a recording ends there
            hooks = attributes[table]
            self.key.append(len(hooks))
            self.tables[id(hooks)] = hooks, dict(hooks)
        self._attributes(cls.__name__, value, every=issubclass(cls, (ParameterList, ParameterDict)))
        for table in _ALL:
            self._items(cls.__name__, attributes[table])
        self._share(cls)

    def _object(self, name: str, value: Any) -> None:
        """Follow an object whose state is all in its attributes."""
        cls: Any = type(value)
        reads = cls.__getattribute__, getattr(cls, "__getattr__", None)
        if reads != (object.__getattribute__, None) or not _is_plain(cls):
            raise NotComparable(f"it reads '{name}', an object of {cls.__name__}")
        self.key.append(cls)
        self._attributes(name, value, every=issubclass(cls, types.SimpleNamespace))
        self._share(cls)

    def _attributes(self, name: str, value: Any, *, every: bool = False) -> None:
        """Compare all attributes of an object, and follow those that code names."""
        attributes = vars(value)
        self.objects.append(value)
        self.orders[id(attributes)] = attributes, [*attributes]
        noted = self.spaces.setdefault(id(attributes), (attributes, {}))[1]
        is_module = isinstance(value, Module)

        def follow(part: str) -> None:
            noted[part] = item = attributes[part]
            if part not in _ALL and part not in HOOKS:
                self.key.append(part)
                self.follow(f"{name}.{part}", item)

        names = {*self.of_modules, *_ALL, *HOOKS} if is_module else self.names
        for part in [*attributes]:
            if every or part in names:
                follow(part)
        self._open.append((attributes, follow, is_module))

    def _container(self, name: str, value: Any) -> None:
        self.key.append(type(value))
        if isinstance(value, dict):
            return self._items(name, value)
        items = list(value)
        self.key.append(len(items))
        if not isinstance(value, (tuple, frozenset)):
            self.lists[id(value)] = value, items
        for item in items:
            self.follow(name, item)

    def _items(self, name: str, table: Any) -> None:
        """Follow the keys and the items of a dictionary, in order."""
        self.tables[id(table)] = table, dict(table)
        if not all(type(key) is str for key in table):  # others may be equal, and not the same
            self.lists[id(table)] = table, [*table]
        self._references.append(table)
        self.key.append(len(table))
        if type(table) is defaultdict:
            self.follow(name, table.default_factory)
        for part, item in self.tables[id(table)][1].items():
            self.follow(name, part)
            self.follow(f"{name}.{part}" if isinstance(part, str) else name, item)

    # -- code --------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.key.append(code)
        self.functions.setdefault(code, []).append(function)
        original = vars(function).get(ORIGINAL)
        if original is not None:
            self.follow(code.co_name, original)
        if kind_of(code.co_filename) is Kind.PURE:  # a decorator of torch has the user's function
            for cell in function.__closure__ or ():
                if isinstance(content := cell.cell_contents, types.FunctionType):
                    self._cell(code.co_name, cell, content)
            if not vars(function):
                return
        else:
            self._name_of(function)
        if code in (self._entered if self._ran is None else self._ran):
            self._enter_function(function)
        if original is None:
            self._attributes(code.co_name, function)

    def _enter_function(self, function: types.FunctionType) -> None:
        """Follow the values that a function reads when it runs."""
        code, name = function.__code__, function.__name__
        self.followed.append(function)
        self.follow(f"{name}.default", function.__defaults__)
        if function.__kwdefaults__:
            self._container(name, function.__kwdefaults__)
        for cell, variable in zip(function.__closure__ or (), code.co_freevars, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                raise NotComparable(f"'{variable}' has no value") from None
            self._cell(variable, cell, content)
        self.key.append(id(function.__globals__))
        self._references.append(function.__globals__)
        self._share((code, function.__globals__))  # not the function: it may refer to the layer

    def _name_of(self, value: Any) -> None:
        if "__name__" in self.names:
            self.named.append(value)
            self.key.append(value.__name__)

    def _cell(self, name: str, cell: types.CellType, content: Any) -> None:
        self.cells[id(cell)] = cell, content
        self.follow(name, content)

    def _builtin(self, name: str, value: Any) -> None:
        self.key.append((types.BuiltinFunctionType, id(value)))
        if getattr(value, "__module__", None) == "math":
            self.floats.update(name.split("."))
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, (type, types.ModuleType)):
            self.follow(name, owner)
        if not isinstance(value, types.BuiltinFunctionType):
            return
        renamed = value in (getattr, hasattr) and value.__name__ != name
        if renamed or not is_pure(value):
            raise NotComparable(f"it reads '{name}', the function {value.__name__} of C")

    # -- names -------------------------------------------------------------------------------------

    def _globals(self, code: types.CodeType, space: dict[str, Any]) -> None:
        """Follow the globals and the imports that code names."""
        names = names_of(code)
        for name in sorted(names.globals):
            if name in space:
                self._note(name, space, space, name)
                continue
            self._missing(space, {name})
            if name in vars(builtins):
                self._note(name, builtins, vars(builtins), name)
            else:
                self._missing(vars(builtins), {name})
        for name, level in sorted(names.imports):
            package = str(space.get("__package__"))
            full = importlib.util.resolve_name("." * level + name, package) if level else name
            for part in sorted({full, full.split(".", 1)[0]}):
                if part not in sys.modules:
                    raise NotComparable(f"it imports {part}", may_change=True)
                self._note(part, sys, sys.modules, part)

    def _missing(self, space: Mapping[str, Any], names: set[str]) -> None:
        self.absent.setdefault(id(space), (space, set()))[1].update(names)

    def _class(self, cls: Any) -> None:
        """Follow the attributes of a class that code names."""
        self.key += cls.__mro__
        for base in cls.__mro__:
            if base in BUILTIN_TYPES or base in self._bases or issubclass(base, BaseException):
                continue
            self._bases.add(base)
            space = vars(base)
            if isinstance(space.get("__new__"), types.BuiltinFunctionType):
                raise NotComparable(f"it reads the class {base.__name__}, which is written in C")
            self.classes.append(base)
            if is_library(module_of(base)):  # nobody renames them and their attributes
                self.sized.append(space)
                self.key.append(len(space.keys() - _ADDED))
            else:
                self._name_of(base)
                self.orders[id(base)] = space, [*space]
            # Python calls methods with such names without naming them.
            kinds = (types.FunctionType, classmethod, staticmethod)
            # Of a copy: another thread may set an attribute meanwhile.
            implied = {n for n, v in space.copy().items() if n[:2] == "__" and isinstance(v, kinds)}
            self._namespace(base, space, implied)
            if type(base) is not type:
                self._class(type(base))

    def _namespace(self, owner: Any, space: Mapping[str, Any], implied: set[str]) -> None:
        def follow(name: str) -> None:
            if not (of_library and self._is_idle(name, space[name])):
                self._note(f"{owner.__name__}.{name}", owner, space, name)
            elif name in names and name != "__module__":  # a user may replace it
                self.spaces.setdefault(id(owner), (space, {}))[1][name] = space[name]

        is_module = isinstance(owner, type) and issubclass(owner, Module)
        of_library = isinstance(owner, type) and is_library(module_of(owner))
        names = self.of_modules if is_module else self.names
        for name in [*space]:
            if name in names or name in implied:
                follow(name)
        self._open.append((space, follow, is_module))

    def _is_idle(self, name: str, value: Any) -> bool:
        """Whether an attribute of a library's class is a method that did not run, or its name."""
        if self._ran is None or name in _CALLED:
            return False
        if isinstance(value, property):
            parts = [part for part in (value.fget, value.fset) if part is not None]
            return all(self._is_idle(name, part) for part in parts)
        if isinstance(value, (staticmethod, classmethod)):
            return self._is_idle(name, value.__func__)
        if type(value) is types.FunctionType:
            code = value.__code__
            return code not in self._ran and is_library_file(code.co_filename)
        return name in ("__module__", "__name__", "__qualname__")

    def _note(self, label: str, owner: Any, space: Mapping[str, Any], name: str) -> None:
        """Note the value that a name has, and follow it."""
        self._references.append(owner)
        noted = self.spaces.setdefault(id(owner), (space, {}))[1]
        if name not in noted:
            noted[name] = value = space[name]
            self.key.append(name)
            self.follow(label, value)


def _is_plain(cls: Any, *constants: type) -> bool:
    """Whether objects of a class have no state beside their attributes and a constant."""
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    body = max(base.__basicsize__ for base in (object, *constants) if issubclass(cls, base))
    room = 16  # for references to a dictionary and from weak references
    return cls.__dictoffset__ != 0 and not slots and cls.__basicsize__ <= body + room
