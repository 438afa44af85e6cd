"""The interface to distributed models, where other processes own some of the nodes of a layer.

:mod:`pyg_accel.distributed` implements it for layers that multiply features with edges themselves:
MaxK layers and rewritten ones. A product with a matrix of edges reads rows of other processes,
which are exchanged right before it: in rewritten layers, the tree decides whether X or X W is sent,
and all processes have to run the same tree.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["DISTRIBUTED", "LOOKUPS", "Halos", "Lookup"]


class Halos(Protocol):
    """The rows of other processes that edges read.

    Attributes:
        halo: the same object for calls with the same edges.
        rows: number of source nodes, including those of other processes.
        targets: number of target nodes of this process.
    """

    @property
    def halo(self) -> Any: ...  # noqa: D102

    @property
    def rows(self) -> int: ...  # noqa: D102

    @property
    def targets(self) -> int: ...  # noqa: D102

    def whole(self, data: Any) -> Any:
        """Return features of this process, followed by those of other processes."""

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same object in every call."""

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which the code of a layer runs as in a distributed model."""

    def agree(self, reason: str, text: str) -> str:
        """Return the first reason of any process, or one if they pass different texts."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, for each time, the longest that any process predicts."""


class Lookup(NamedTuple):
    """Functions that return halos; None while no distributed model runs.

    Attributes:
        of_edges: takes an edge_index.
        of_call: takes the arguments of a layer. It may return text: the reason why the layer has to
            exchange rows itself.
    """

    of_edges: Callable[[Any], Halos | None]
    of_call: Callable[[Iterable[Any]], Halos | str | None]


# Models whose layers read rows of other processes.
DISTRIBUTED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
# One for each distributed model; they are equal.
LOOKUPS: list[Lookup] = []
