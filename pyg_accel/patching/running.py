"""What runs in this thread: the calls that are traced, and those that are PyG's own."""

import threading
from typing import Any

__all__ = ["Unrecognised", "running"]


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


class _Running(threading.local):
    """What runs in this thread.

    Attributes:
        traces: the calls being traced, innermost last. The stack of function modes does not tell: a
            mode is off while it handles a function.
        stock: a layer's call is PyG's own for its size, and functions inside run as they were.
    """

    stock = False

    def __init__(self) -> None:
        self.traces: list[Any] = []  # of Trace, which is built on this module


running = _Running()
