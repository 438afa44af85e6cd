"""The interface to distributed models, where other processes own some of a layer's nodes.

:mod:`pyg_accel.distributed` implements it. A product with a matrix of edges reads rows of other
processes, which are exchanged right before it: the tree decides whether X or X W is sent. All
processes have to run the same tree.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["DISTRIBUTED", "EXCHANGES", "Halos"]


class Halos(Protocol):
    """The rows of other processes that the edges of a call read.

    Attributes:
        halo: the same object for calls with the same edges.
    """

    @property
    def halo(self) -> Any: ...  # noqa: D102

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same object in every call."""

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which the code of a layer runs as in a distributed model."""

    def agree(self, reason: str, text: str) -> str:
        """Return the first reason of any process, or one if they pass different texts."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, for each time, the longest that any process predicts."""


# Models whose layers read rows of other processes.
DISTRIBUTED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
# A function for each distributed model; they do the same. It returns the halos for the arguments of
# a layer, the reason why the layer exchanges rows itself, or None if no distributed model runs.
EXCHANGES: list[Callable[[Iterable[Any]], Halos | str | None]] = []
