"""Replaces ``__call__`` of layers while an optimised model runs: the one override of this folder.

``__call__`` of layers is replaced for as long as there are optimised models. A layer that is called
by anything else is called as ever.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

__all__ = ["RUNNING", "install", "uninstall"]

_CALL = "__call__"

Runners = Mapping[torch.nn.Module, Callable[..., Any]]


class Running(threading.local):
    """What an optimised model runs in this thread.

    Attributes:
        layers: what is called in place of layers; empty inside of such a call, None outside of
            optimised models.
        static: tensors that are the same in every call.
    """

    layers: Runners | None = None
    static: tuple[Any, ...] = ()


RUNNING = Running()

_lock = threading.Lock()
_models = 0
# What made the last call of a layer, if that was an optimised model: a checkpoint repeats the call
# in the backward pass, where no model runs, and has to get the same.
_last: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def install() -> None:
    """Count an optimised model; the first one replaces ``__call__``."""
    global _models
    with _lock:
        _models += 1
        if _models == 1:
            setattr(MessagePassing, _CALL, _call)


def uninstall() -> None:
    """Undo one :func:`install`."""
    global _models
    with _lock:
        _models -= 1
        if not _models and vars(MessagePassing).get(_CALL) is _call:
            delattr(MessagePassing, _CALL)


def _call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``__call__`` of a layer."""
    layers = RUNNING.layers
    runner = layers.get(self) if layers else None
    if not torch.compiler.is_compiling():
        if layers is None and torch._C._current_graph_task_id() != -1:  # in a backward pass
            last = _last.get(self)
            runner = None if last is None else last()
        elif runner is not None:
            _last[self] = weakref.ref(runner)
        elif _last:
            _last.pop(self, None)
    if runner is None:
        return torch.nn.Module.__call__(self, *args, **kwargs)
    RUNNING.layers = {}
    try:
        return runner(*args, **kwargs)
    finally:
        RUNNING.layers = layers
