"""Copies of modules that share what they hold, for models that are not to change."""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from pyg_accel.patching import embedding

__all__ = ["Embedding", "ShadowModules", "clone", "stray"]

_OF_MODULES = frozenset(vars(torch.nn.Module()))  # tables and hooks
_LEAVES = (Tensor, str, bytes, int, float, type, ModuleType, BuiltinFunctionType)
_Find = Callable[[torch.nn.Module], torch.nn.Module]


def clone(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the same parameters and a table of children of its own."""
    copied = module.__class__.__new__(module.__class__)
    vars(copied).update(vars(module))
    vars(copied)["_modules"] = dict(module._modules)
    return copied


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` with the gradient that ``patch()`` gives it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., F] for ids [...]."""
        rows: Tensor = embedding.forward(torch.nn.Embedding.forward, self, input, always=True)
        return rows


class ShadowModules:
    """Copies of modules that share all they have with the originals, but for their modes.

    Methods, functions and lists that refer to modules refer to their copies. Copying a module again
    brings its copy up to date; :meth:`sync_back` does it the other way.

    Args:
        stand_in: returns what takes the place of a module, or None for a copy.
    """

    def __init__(
        self, stand_in: Callable[[torch.nn.Module], torch.nn.Module | None] = lambda module: None
    ) -> None:
        """Start without any."""
        self._stand_in = stand_in
        self._known: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
        self._stand_ins: set[int] = set()  # ids of the modules that they stand in for
        self._bound: dict[int, set[str]] = {}  # names of what refers to copies, by id of the copy

    @classmethod
    def of(cls, module: torch.nn.Module, copied: torch.nn.Module) -> "ShadowModules":
        """Return one that knows a copy that was made."""
        made = cls()
        copies = dict(copied.named_modules(remove_duplicate=False))
        for path, inner in module.named_modules(remove_duplicate=False):
            if path in copies:
                made._known[id(inner)] = (inner, copies[path])
        for inner, shadow in made._known.values():
            made._bind(inner, shadow)
        return made

    def __call__(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the copy of a module; its children are copies too."""
        filled: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}
        copied = self._filled(module, filled)
        for original, shadow in filled.values():  # when all copies exist
            self._bind(original, shadow)
        return copied

    def _filled(
        self, module: torch.nn.Module, filled: dict[int, tuple[torch.nn.Module, torch.nn.Module]]
    ) -> torch.nn.Module:
        if id(module) in filled:
            return filled[id(module)][1]
        copied = self._known.get(id(module), (module, None))[1]
        if copied is None:
            copied = self._stand_in(module)
            if copied is not None:
                self._stand_ins.add(id(module))
            else:
                copied = module.__class__.__new__(module.__class__)
                vars(copied).update(training=module.training, _modules={})
            self._known[id(module)] = (module, copied)
        if id(module) in self._stand_ins:
            return copied
        filled[id(module)] = (module, copied)
        own = vars(copied)
        if type(copied) is not type(module):
            copied.__class__ = module.__class__
        mode = own["training"]
        children: dict[str, torch.nn.Module | None] = own["_modules"]
        for name in own.keys() - vars(module).keys():  # never empty: others may be running it
            del own[name]
        own.update(vars(module), training=mode, _modules=children)
        shadows = {n: None if m is None else self._filled(m, filled)
                 for n, m in module._modules.items()}  # fmt: skip
        if list(children.items()) != list(shadows.items()):
            children.clear()
            children.update(shadows)
        return copied

    def sync_back(self, module: torch.nn.Module) -> bool:
        """Give a module what its copy was assigned; return whether there was anything."""
        copied = self._known[id(module)][1]
        own, changed = vars(module), False
        for name, value in vars(copied).items():
            if own.get(name) is value or name in ("training", "_modules"):
                continue
            if name not in self._bound[id(copied)] and not isinstance(value, MethodType):
                own[name], changed = value, True
        return changed

    def _bind(self, module: torch.nn.Module, copied: torch.nn.Module) -> None:
        """Let what refers to modules that were copied refer to the copies."""
        own, bound = vars(copied), set()
        for name, value in vars(module).items():
            if name not in _OF_MODULES and not name.endswith("_hooks"):
                found = _rebound(value, self._shadow_of, {})
                if found is not value:
                    own[name] = found
                    bound.add(name)
        self._bound[id(copied)] = bound

    def _shadow_of(self, module: torch.nn.Module) -> torch.nn.Module:
        return self._known.get(id(module), (module, module))[1]


def _rebound(value: Any, shadow_of: _Find, known: dict[int, Any]) -> Any:
    """Return what refers to copies where ``value`` refers to modules; itself if it does not."""
    if value is None or isinstance(value, _LEAVES):
        return value
    if isinstance(value, torch.nn.Module):
        return shadow_of(value)
    if id(value) in known:
        return known[id(value)]

    def each(values: Any) -> list[Any]:
        return [_rebound(v, shadow_of, known) for v in values]

    found = value
    if isinstance(value, MethodType):
        owner = _rebound(value.__self__, shadow_of, known)
        found = value if owner is value.__self__ else MethodType(value.__func__, owner)
    elif isinstance(value, FunctionType):
        found = _rebound_function(value, each, known)
    elif type(value) in (list, tuple, set, frozenset, deque):
        known[id(value)] = value  # if it contains itself
        new = each(value)
        found = value if all(a is b for a, b in zip(value, new, strict=True)) else type(value)(new)
    elif type(value) in (dict, OrderedDict):
        known[id(value)] = value
        new = each(value.values())
        if any(a is not b for a, b in zip(value.values(), new, strict=True)):
            found = type(value)(zip(value, new, strict=True))
    elif type(value) is partial:
        old = (value.func, *value.args, *value.keywords.values())
        func, *given = each(old)
        if any(a is not b for a, b in zip(old, (func, *given), strict=True)):
            args = given[: len(value.args)]
            found = partial(
                func, *args, **dict(zip(value.keywords, given[len(args) :], strict=True))
            )
    known[id(value)] = found
    return found


def _rebound_function(
    value: FunctionType, each: Callable[[Any], list[Any]], known: dict[int, Any]
) -> FunctionType:
    """A function whose variables refer to copies; itself if none has to."""
    cells = [c for c in value.__closure__ or () if _is_set(c)]
    defaults, named = value.__defaults__ or (), value.__kwdefaults__ or {}
    known[id(value)] = value  # if it refers to itself
    old = (*(c.cell_contents for c in cells), *defaults, *named.values())
    new = each(old)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value
    changed = {id(c): CellType(v) for c, v in zip(cells, new, strict=False)
               if v is not c.cell_contents}  # fmt: skip
    closure = tuple(changed.get(id(c), c) for c in value.__closure__ or ())
    rest = new[len(cells) :]
    found = FunctionType(value.__code__, value.__globals__, value.__name__,
                         tuple(rest[: len(defaults)]) or None, closure or None)  # fmt: skip
    found.__kwdefaults__ = dict(zip(named, rest[len(defaults) :], strict=True)) or None
    found.__dict__.update(vars(value))
    found.__qualname__, found.__module__ = value.__qualname__, value.__module__
    return found


def _is_set(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def stray(copied: Mapping[str, torch.nn.Module], originals: set[int]) -> str:
    """Return where copies still refer to a module that they are copies of, or nothing.

    An object of a class of its own may hold one: nothing says how to copy that.
    """
    for path, module in copied.items():
        for name, value in vars(module).items():
            if name in _OF_MODULES or name.endswith("_hooks"):
                continue
            if _reaches(value, originals):
                return f"{path}.{name}".removeprefix(".")
    return ""


def _reaches(value: Any, originals: set[int]) -> bool:
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _LEAVES) or value is None:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            # A copy is looked at by itself; a proxy of the weakref module passes for a module.
            if id(value) in originals or type(value) in weakref.ProxyTypes:
                return True
        elif isinstance(value, weakref.ref):
            left.append(value())
        elif isinstance(value, MethodType):
            left += [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            left += [c.cell_contents for c in value.__closure__ or () if _is_set(c)]
            left += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            left += value
        else:
            left += getattr(value, "__dict__", {}).values()
    return False
