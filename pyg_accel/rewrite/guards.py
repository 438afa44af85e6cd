"""What a layer is at the moment of a call: who watches it, its options, and its modules."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch_geometric.nn import MessagePassing

from pyg_accel.patching.overrides import hook_reasons
from pyg_accel.patching.reasons import has_hooks, modules_in, transform_reasons

__all__ = ["METHODS", "RENDERED", "identity_of", "is_rendered", "reasons_now", "state_of"]

# What a class, or an instance, that has one of its own may compute otherwise.
METHODS = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate")
RENDERED = ("propagate", "edge_updater")  # PyG writes these anew for every class

_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_PLAIN = frozenset((bool, int, float, str))


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
    """Return why a layer has to be called itself at the moment: somebody would notice."""
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
        item for item in vars(conv).items() if type(item[1]) in _PLAIN and item[0] != "training"
    ]
    return tuple(options), tuple(map(id, modules_in(conv)))


def identity_of(conv: MessagePassing) -> tuple[int, ...]:
    """Return what changes whenever an attribute or a module of a layer is another object."""
    return tuple([id(value) for module in modules_in(conv) for value in vars(module).values()])


def _watchers(module: torch.nn.Module, where: str) -> list[str]:
    own = vars(module)
    reasons = [f"a {kind}{where}" for table, kind in _TABLES.items() if own[table]]
    if "parametrizations" in own["_modules"]:
        reasons.append(f"a parametrization{where}")
    if where and "forward" in own:
        reasons.append("a forward of its own on a module inside")
    return reasons
