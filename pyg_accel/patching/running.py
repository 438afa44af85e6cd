"""The state of running calls in this thread."""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from pyg_accel.formula import Computation

__all__ = ["Unrecognised", "running"]


class Unrecognised(Exception):
    """A message that no formula expresses.

    Attributes:
        permanent: whether the layer will always raise it, so that a retry is useless.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.permanent = permanent
        if running.traces and running.traces[-1].failure is None:
            running.traces[-1].failure = self


class _Running(threading.local):
    """The state of running calls.

    Attributes:
        transformed: programs of the running optimized model, in place of programs of its layers;
            empty inside of such a layer.
        static: arguments of that model that are the same tensors in every call.
        exchange: fetches rows of other processes for the running layer; None in one process.
        traces: traced calls, innermost last. Not the stack of function modes, as a mode is off
            while it handles a function.
        products: computed in a call with a sparse matrix; None outside.
        notes: on calls inside of a recorded one.
        stock: whether PyG's own path runs, without acceleration of inner functions.
    """

    transformed: Mapping[Module, Any] = MappingProxyType({})
    static: tuple[Any, ...] = ()
    exchange: Any = None
    notes: Any = None
    products: list[Computation] | None = None
    stock = False

    def __init__(self) -> None:
        self.traces: list[Any] = []  # of Trace, which imports this module


running = _Running()
