"""What a layer has to know of other processes, where they own some of the nodes it reads.

:mod:`pyg_accel.distributed` answers. Products with matrices of edges then read rows of this process
and rows of others, so the others' are exchanged right before the product: which features travel,
X or X W, is a matter of the tree. All processes have to run the same one.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["DISTRIBUTED", "HALO_LOOKUPS", "Halos", "halos_of"]


class Halos(Protocol):
    """The rows of other processes that the edges of a call read.

    Attributes:
        own: source nodes of this process.
        rows: source nodes in all.
        targets: target nodes of this process.
    """

    @property
    def own(self) -> int: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def targets(self) -> int: ...  # noqa: D102

    def whole(self, data: Any) -> Any:
        """Return features [own, ...], also as CBSR, with the rows of other processes behind."""

    def stays(self, data: Tensor) -> bool:
        """Return whether features are the same in every call."""

    def reason(self, conv: Any) -> str:
        """Return why the products of a layer cannot be reordered here, or nothing."""

    def agree(self, reason: str) -> str:
        """Return the reason of the first process that has one, on all of them."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest of the times that all processes expect."""


# Return what is known of an edge_index; one, while a model is distributed.
HALO_LOOKUPS: list[Callable[[Tensor], Halos | None]] = []
# Models whose layers read rows of other processes.
DISTRIBUTED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def halos_of(edge_index: Tensor) -> Halos | None:
    """Return the rows of other processes that edges read; None if there are no such processes."""
    return next((found for look in HALO_LOOKUPS if (found := look(edge_index)) is not None), None)
