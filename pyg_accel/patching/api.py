"""``patch()`` and ``unpatch()``: the hooks, and the switch."""

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
    overrides,
    propagate,
    reasons,
    relations,
    sparse,
)
from pyg_accel.patching.extremes import scatter
from pyg_accel.patching.reductions import aggregate
from pyg_accel.pyg_lib import seam
from pyg_accel.settings import settings

__all__ = ["OverrideHandle", "PatchHandle", "installed", "patch", "patched", "unpatch"]

_HOOKS: dict[str, Callable[..., Any]] = {
    "call": propagate.call,
    "bypassed": propagate.bypassed,
    "aggregate": aggregate,
    "layer": layers.layer,
    "memoise": layers.memoise,
    "scatter": scatter,
    "softmax": propagate.softmax,
    "spmm": sparse.spmm,
    "dynamo_entry": propagate._pyg_accel_read,
    "relations": relations.forward,
    "hetero": hetero.forward,
    "sampler": loading.construct,
    "both_directions": loading.construct_both,
    "sample": loading.sample,
    "to_csc": loading.to_csc,
    "load": loading.load,
    "collate": loading.collate,
}
# Threads may enter and leave patched() at once: the counts must agree with the installed hooks.
_lock = threading.RLock()
_handles: "list[OverrideHandle]" = []
installed: dict[str, Any] = {}  # hooks by name, those of distributed models included


def _install() -> None:
    """Install the hooks of all handles; uninstall them without a handle."""
    hooks = dict(_HOOKS) if _handles else {}
    for handle in _handles:
        hooks |= handle.hooks
    if hooks != installed:
        overrides.uninstall()
        if hooks:
            overrides.install(hooks)
        installed.clear()
        installed.update(hooks)


class OverrideHandle:
    """Overrides that wrap the hooks of ``patch()``.

    They are installed whether or not anything is patched: the wrapped hooks check that. Handles of
    the same hooks share them, so that they stay installed for models that still run.

    Args:
        hooks: by the names of the hooks of ``patch()``.
    """

    def __init__(self, hooks: dict[str, Callable[..., Any]]) -> None:
        settings.changed()  # raises for invalid variables
        fast_backend_reasons("cpu")  # loads the backends outside of recorded calls
        self.hooks = hooks
        with _lock:
            _handles.append(self)
            _install()
            self._switch(1)

    def remove(self) -> None:
        """Remove the hooks; a second call does nothing."""
        with _lock:
            if self in _handles:
                _handles.remove(self)
                self._switch(-1)
                _install()

    def _switch(self, by: int) -> None:
        """Count a handle that begins (1) or ends (-1)."""


class PatchHandle(OverrideHandle):
    """The result of :func:`patch`: ``remove()`` undoes the call; also a context manager."""

    def __init__(self, model: torch.nn.Module | None, loader: torch.device | None) -> None:
        """Switch on; use :func:`patch`."""
        self._loader = loader
        self._modules = (
            None if model is None else [m for m in model.modules() if isinstance(m, MessagePassing)]
        )
        super().__init__({})

    def _switch(self, by: int) -> None:
        reasons.switch(self._modules, by)
        if self._modules is None:
            seam.give() if by > 0 else seam.take_back()
        if self._loader is not None:
            loading.switch(self._loader, by)

    def __enter__(self) -> "PatchHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch(
    model: torch.nn.Module | None = None, *, loader: torch.device | str | None = None
) -> PatchHandle:
    """Accelerate message passing from now on.

    Works before or after models are built, on plain ``edge_index``; no other change is needed.
    Results agree with PyG's up to the order of floating-point additions; the gradient of a maximum
    goes to one of several equal neighbours.

    Args:
        model: only the layers of this model; by default every model of the process, and loaders.
        loader: device on which neighbour loaders that are built from now on sample and gather
            features, such as ``"cuda"``: it gets a copy of their data. What has no room there, or
            is pinned, stays on the host, where kernels read it. By default the device on which
            their ``edge_index`` is.

    Returns:
        A handle; ``remove()`` it, or use it as a context manager.

    Raises:
        ValueError: if ``model`` is not a module, or holds no message passing layer; if ``loader``
            is no such device, or comes with a model.
        ExtensionNotBuilt: if ``loader`` is a GPU, and there is none, or no CUDA library.
    """
    if loader is not None and model is not None:
        raise ValueError("expected 'loader' without a 'model', with which loaders are PyG's")
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
        if not any(isinstance(m, MessagePassing) for m in model.modules()):
            raise ValueError(f"{type(model).__name__} has no message passing layer to accelerate")
    return PatchHandle(model, None if loader is None else loading.device_from(loader))


def unpatch() -> None:
    """Undo every :func:`patch`: all classes of PyG are as they were."""
    for handle in [handle for handle in _handles if isinstance(handle, PatchHandle)]:
        handle.remove()
    propagate.forget()


@contextmanager
def patched(
    model: torch.nn.Module | None = None, *, loader: torch.device | str | None = None
) -> Iterator[PatchHandle]:
    """Accelerate inside a ``with`` block; see :func:`patch`."""
    with patch(model, loader=loader) as handle:
        yield handle
