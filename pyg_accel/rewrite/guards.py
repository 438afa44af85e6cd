"""What a layer is at the moment of a call, and its code with another ``propagate``."""

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch_geometric.nn import MessagePassing

from pyg_accel.patching.overrides import hook_reasons
from pyg_accel.patching.reasons import has_hooks, modules_in, transform_reasons
from pyg_accel.rewrite.algebra import NotLifted

__all__ = [
    "METHODS",
    "PLAIN",
    "RENDERED",
    "asks_types",
    "is_rendered",
    "reasons_now",
    "state_of",
    "with_propagate",
]

# What a class, or an instance, that has one of its own may compute otherwise.
METHODS = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate")
RENDERED = ("propagate", "edge_updater")  # PyG writes these anew for every class

_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
PLAIN = frozenset((bool, int, float, str))


def is_rendered(method: Any, cls: type) -> bool:
    """Return whether a ``propagate`` or ``edge_updater`` is PyG's, rather than a user's."""
    home = getattr(method, "__module__", None) or ""
    if home == MessagePassing.__module__:
        return True
    return any(
        home.startswith(f"{base.__module__}_{base.__name__}_")
        for base in cls.__mro__
        if issubclass(base, MessagePassing)
    )


def reasons_now(conv: MessagePassing) -> list[str]:
    """Return why the layer itself has to be called at the moment: hooks observe it."""
    reasons = transform_reasons() if not torch.compiler.is_compiling() else []
    reasons += hook_reasons(conv)
    if torch_module._has_any_global_hook():
        reasons.append("a hook on all modules")
    for module in modules_in(conv):
        if has_hooks(module) or "forward" in vars(module) or "parametrizations" in module._modules:
            reasons += _watchers(module, "" if module is conv else " on a module inside")
    own = vars(conv)
    changed = [name for name in (*METHODS, *RENDERED) if name in own]
    if changed := [n for n in changed if n in METHODS or not is_rendered(own[n], type(conv))]:
        reasons.append(f"{', '.join(changed)} set on the instance")
    return list(dict.fromkeys(reasons))


def state_of(conv: MessagePassing) -> Hashable:
    """Return the options and the modules of a layer, which rules read once."""
    options = [
        item for item in vars(conv).items() if type(item[1]) in PLAIN and item[0] != "training"
    ]
    return tuple(options), tuple(map(id, modules_in(conv)))


def _watchers(module: torch.nn.Module, where: str) -> list[str]:
    own = vars(module)
    reasons = [f"a {kind}{where}" for table, kind in _TABLES.items() if own[table]]
    if "parametrizations" in own["_modules"]:
        reasons.append(f"a parametrization{where}")
    if where and "forward" in own:
        reasons.append("a forward of its own on a module inside")
    return reasons


class _WithPropagate:
    """A base of classes of layers whose ``propagate`` is that of a run."""

    __slots__ = ("_pyg_accel_propagate",)
    _pyg_accel_propagate: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Tell no class of the user's that there is another one."""

    @property  # before what the instance has
    def propagate(self) -> Callable[..., Any]:
        """That of the run."""
        return self._pyg_accel_propagate


@lru_cache(maxsize=256)
def _subclass_of(cls: Any) -> Any:
    metaclass: Any = type(cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return metaclass(cls.__name__, (_WithPropagate, cls), names)


def with_propagate(
    conv: MessagePassing, propagate: Callable[..., Any], *, alone: bool = False
) -> Any:
    """Return a layer with all attributes of ``conv``, the very same ones, for one call.

    Its ``propagate`` is another. Nothing is set on ``conv``, which other threads may be calling.
    One that is ``alone`` has a table of attributes of its own: what its code assigns is not kept.

    Raises:
        NotLifted: if there can be no such class.
    """
    try:
        kind: Any = type(conv)
        cls = _subclass_of(kind)
    except TypeError as error:  # slots, or a metaclass of its own
        raise NotLifted(f"no subclass of {type(conv).__name__} can be made: {error}") from None
    made = cls.__new__(cls)
    object.__setattr__(made, "__dict__", dict(vars(conv)) if alone else vars(conv))
    object.__setattr__(made, "_pyg_accel_propagate", propagate)
    return made


@lru_cache(maxsize=256)
def asks_types(cls: type) -> bool:
    """Whether a module's code may tell a tensor without data by its exact type."""
    todo: list[Any] = [cls.forward, getattr(cls, "message", None)]  # type: ignore[attr-defined]
    seen: set[CodeType] = set()
    while todo:
        function = todo.pop()
        todo += [f for f in (getattr(function, "__wrapped__", None),) if f is not None]
        code = getattr(function, "__code__", None)
        home = (getattr(function, "__module__", None) or "").partition(".")[0]
        if not isinstance(code, CodeType) or code in seen or home in ("torch", "torch_geometric"):
            continue
        seen.add(code)
        names = set(_names(code))
        if names & {"type", "__class__"}:
            return True
        todo += [getattr(cls, name, None) for name in names]
        todo += [function.__globals__.get(name) for name in names]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
