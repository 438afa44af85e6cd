"""Replaces ``MessagePassing.__call__`` for as long as there are optimised models.

Only inside of a call of an optimised model does the replacement change what a layer does.
"""

import linecache
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch_geometric.nn import MessagePassing

__all__ = ["RUNNING", "callers_noted", "install", "uninstall"]

_CALL = "__call__"

Runners = Mapping[torch.nn.Module, Callable[..., Any]]


class Running(threading.local):
    """The optimised model that runs in this thread.

    Attributes:
        layers: what to call in place of its layers; empty inside of such a call, None outside of
            optimised models.
        static: its arguments that are the same tensors in every call.
        callers: the lines of code that call each layer, if they are noted.
    """

    layers: Runners | None = None
    static: tuple[Any, ...] = ()
    callers: defaultdict[torch.nn.Module, dict[str, None]] | None = None


RUNNING = Running()

_lock = threading.Lock()
_models = 0
# What ran the last call of a layer in an optimised model. Activation checkpointing repeats the call
# in the backward pass, outside of the model, and has to get the same result.
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


@contextmanager
def callers_noted() -> Iterator[Mapping[torch.nn.Module, Mapping[str, None]]]:
    """Note the lines of code that call the layers of optimised models in the block."""
    callers: defaultdict[torch.nn.Module, dict[str, None]] = defaultdict(dict)
    RUNNING.callers = callers
    try:
        yield callers
    finally:
        RUNNING.callers = None


def _line_of(frame: FrameType) -> str:
    """Return the line of code that a frame runs, and where that is."""
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{linecache.getline(path, number).strip()}  # {Path(path).name}, line {number}"


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
            if RUNNING.callers is not None:
                RUNNING.callers[self][_line_of(sys._getframe(1))] = None
        elif _last:
            _last.pop(self, None)
    if runner is None:
        return torch.nn.Module.__call__(self, *args, **kwargs)
    RUNNING.layers = {}
    try:
        return runner(*args, **kwargs)
    finally:
        RUNNING.layers = layers
