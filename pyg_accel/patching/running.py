"""What runs in this thread: the calls that are traced, and those that are PyG's own."""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from pyg_accel.formula import Computation

__all__ = ["Unrecognised", "running"]


class Unrecognised(Exception):
    """The message does something that no formula says.

    Attributes:
        permanent: the same layer will do it again, so there is no need to try.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.permanent = permanent
        if running.traces and running.traces[-1].failure is None:
            running.traces[-1].failure = self


class _Running(threading.local):
    """What runs in this thread.

    Attributes:
        transformed: the programs of layers of the optimized model that runs, which stand in for
            the layers' own; none inside of such a layer.
        static: arguments of that model that are the same tensors in every call.
        exchange: fetches rows of other processes for the layer that runs; None in one process.
        traces: the calls being traced, innermost last. The stack of function modes does not tell: a
            mode is off while it handles a function.
        products: those in a layer's call with a sparse matrix; None outside.
        notes: notes of the calls inside of the one that is being recorded.
        stock: a layer's call is PyG's own for its size, and functions inside run as they were.
    """

    transformed: Mapping[Module, Any] = MappingProxyType({})
    static: tuple[Any, ...] = ()
    exchange: Any = None
    notes: Any = None
    products: list[Computation] | None = None
    stock = False

    def __init__(self) -> None:
        self.traces: list[Any] = []  # of Trace, which is built on this module


running = _Running()
