"""``patch()`` and its undoing: which hooks go where, and what is switched on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import fast_backend_reasons
from pyg_accel.patching import (
    hetero,
    layers,
    loading,
    ordered,
    overrides,
    programs,
    propagate,
    readouts,
    reasons,
    relations,
)
from pyg_accel.patching.reductions import aggregate

__all__ = ["OverrideHandle", "PatchHandle", "patch", "patched", "unpatch"]

_HOOKS: dict[str, Callable[..., Any]] = {
    "call": propagate.call,
    "bypassed": propagate.bypassed,
    "aggregate": aggregate,
    "layer": layers.layer,
    "memoise": layers.memoise,
    "softmax": propagate.softmax,
    "spmm": propagate.spmm,
    "remember": propagate._pyg_accel_read,
    "relations": relations.forward,
    "hetero": hetero.forward,
    "scatter": readouts.scatter,
    "segment": readouts.segment,
    "to_dense_batch": ordered.to_dense_batch,
    "quantile": ordered.quantile,
    "collate": loading.collate,
    "getitems": loading.getitems,
}
# Threads may enter and leave patched() at once: what is counted must agree with what is installed.
_lock = threading.RLock()
_handles: "list[PatchHandle]" = []
_hook_handles: "list[OverrideHandle]" = []


def _install() -> None:
    """Install the hooks, with those that stand in front of them, in place of what is there."""
    overrides.uninstall()
    hooks = dict(_HOOKS)
    for handle in _hook_handles:
        hooks |= handle.hooks
    overrides.install(hooks)


class OverrideHandle:
    """Overrides that stand in front of those of ``patch()`` and call them.

    They are there whether or not anything is patched; what they call asks that itself. Handles of
    the same hooks share them: those of a model that runs meanwhile stay installed.

    Args:
        hooks: by the names that those of ``patch()`` have.
    """

    def __init__(self, hooks: dict[str, Callable[..., Any]]) -> None:
        self.hooks = hooks
        with _lock:
            shared = self._are_shared()
            _hook_handles.append(self)
            if not shared:
                _install()

    def _are_shared(self) -> bool:
        return any(handle.hooks is self.hooks for handle in _hook_handles)

    def remove(self) -> None:
        """Take the hooks away; a second time does nothing."""
        with _lock:
            if self not in _hook_handles:
                return
            _hook_handles.remove(self)
            if self._are_shared():
                return
            if _handles or _hook_handles:
                _install()
            else:
                overrides.uninstall()


class PatchHandle:
    """What :func:`patch` returns: ``remove()`` undoes that call; also a context manager."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        """Switch on; use :func:`patch`."""
        self._modules = (
            None if model is None else [m for m in model.modules() if isinstance(m, MessagePassing)]
        )
        self._removed = False
        fast_backend_reasons("cpu")  # loads the backends now: the first call is slow enough
        with _lock:
            if not overrides.installed():
                _install()
            reasons.switch(self._modules, 1)
            _handles.append(self)

    def remove(self) -> None:
        """Undo the call that returned this handle; a second time does nothing."""
        with _lock:
            if self._removed:
                return
            self._removed = True
            _handles.remove(self)
            reasons.switch(self._modules, -1)
            programs.forget_unpatched()
            if not _handles:
                if not _hook_handles:
                    overrides.uninstall()
                propagate.forget()

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch(model: torch.nn.Module | None = None) -> PatchHandle:
    """Accelerate message passing from now on.

    Works before or after models are built, on plain ``edge_index``; no other change is needed.
    Results agree with PyG's up to the order of floating-point additions; the gradient of a maximum
    goes to one of several equal neighbours.

    Args:
        model: only the layers of this model; by default every model of the process.

    Returns:
        A handle; ``remove()`` it, or use it as a context manager.

    Raises:
        ValueError: if ``model`` is not a module, or holds no message passing layer.
    """
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
        if not any(isinstance(m, MessagePassing) for m in model.modules()):
            raise ValueError(f"{type(model).__name__} has no message passing layer to accelerate")
    return PatchHandle(model)


def unpatch() -> None:
    """Undo every :func:`patch`: all classes of PyG are as they were."""
    for handle in list(_handles):
        handle.remove()


@contextmanager
def patched(model: torch.nn.Module | None = None) -> Iterator[PatchHandle]:
    """Accelerate inside a ``with`` block; see :func:`patch`."""
    with patch(model) as handle:
        yield handle
