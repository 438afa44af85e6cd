"""What runs in this thread: the calls that are traced, and those that are PyG's own."""

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from torch.nn import Module

__all__ = ["Transform", "Unrecognised", "running"]


class Unrecognised(Exception):
    """The message does something that no formula says.

    Attributes:
        permanent: the same layer will do it again, so there is no need to try.
        work: what the call does (:class:`.size.Work`) if it is only too small.
    """

    def __init__(self, reason: str, *, permanent: bool = True, work: Any = None) -> None:
        super().__init__(reason)
        self.permanent, self.work = permanent, work
        if running.traces and running.traces[-1].failure is None:
            running.traces[-1].failure = self


class Transform(Protocol):
    """Changes the recorded programs of one layer: they do the same in another way."""

    def programs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the changed programs that a call may fit; None if the layer itself runs."""

    def revised(self, known: Any, program: Any, leaves: tuple[Any, ...]) -> Any:
        """Return the program of a call, changed in another way if the call asks for that."""

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that fits none of them."""


class _Running(threading.local):
    """What runs in this thread.

    Attributes:
        transforms: of layers of the optimized model that runs; none inside of such a layer.
        static: arguments of that model that are the same tensors in every call.
        traces: the calls being traced, innermost last. The stack of function modes does not tell: a
            mode is off while it handles a function.
        stock: a layer's call is PyG's own for its size, and functions inside run as they were.
    """

    transforms: Mapping[Module, Transform] = MappingProxyType({})
    static: tuple[Any, ...] = ()
    stock = False

    def __init__(self) -> None:
        self.traces: list[Any] = []  # of Trace, which is built on this module


running = _Running()
