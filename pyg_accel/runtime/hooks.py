"""Hooks and explainers of a layer: with them, calls take PyG's own path."""

from torch.nn import Module
from torch_geometric.nn import MessagePassing

__all__ = ["HOOKS", "has_hooks", "hook_reasons", "hooks_in"]

# Tables of hooks on calls and gradients, of all modules and of PyG's layers.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_LAYERS = tuple(n for n in MessagePassing.__init__.__code__.co_names if n.endswith("_hooks"))


def has_hooks(module: Module) -> bool:
    """Whether a module has hooks on its calls or gradients."""
    attributes = vars(module)
    return any(attributes[name] for name in HOOKS)


def hooks_in(module: Module, tables: tuple[str, ...] = HOOKS) -> list[str]:
    """Return the kinds of hooks of a module, in words."""
    present = [name for name in tables if vars(module)[name]]
    return [f"a {name.strip('_').removesuffix('s').replace('_', ' ')}" for name in present]


def hook_reasons(layer: MessagePassing) -> list[str]:
    """Return the reasons for PyG's own path that do not depend on the message."""
    reasons = hooks_in(layer, _OF_LAYERS)
    if layer.explain:
        reasons.append("an explainer is active")
    if layer.decomposed_layers > 1:
        reasons.append("decomposed_layers > 1")
    return reasons
