"""Halos for layers that multiply features with edges themselves: MaxK and rewritten layers.

A product with a matrix of edges reads rows of other ranks, which are exchanged right before it. In
rewritten layers the tree decides whether X or X W is sent, so all ranks have to run the same tree.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.distributed.halo import Halo
from pyg_accel.distributed.tracking import (
    RUNNING,
    Following,
    exchanged,
    halo_of,
    refuse,
    running,
    stays,
)

__all__ = ["ProductHalos"]


@dataclass(frozen=True)
class ProductHalos:
    """The halo of one edge_index: the rows of other ranks that its edges read.

    Attributes:
        halo: the halo.
        rows: number of source nodes, including those of other ranks.
        targets: number of target nodes of this rank.
    """

    halo: Halo

    rows = property(lambda self: self.halo.rows)
    targets = property(lambda self: self.halo.targets)

    @classmethod
    def of_edges(cls, edge_index: Any) -> "ProductHalos | None":
        """Return the halos of edges of this rank; None outside of distributed models.

        Raises:
            NotDistributable: for other edges in a distributed model.
        """
        halo = halo_of(edge_index)
        if halo is None and RUNNING.wire is not None:
            refuse("a MaxK layer", edge_index)
        return None if halo is None else cls(halo)

    @classmethod
    def of_call(cls, values: Iterable[Any]) -> "ProductHalos | str | None":
        """Return the halo of the edges among the arguments of a layer.

        Only for edges that distribute() returned: their halo identifies a call on all ranks, while
        its sizes differ.

        Returns:
            None outside of distributed models; text if there is no such halo.
        """
        if RUNNING.wire is None:
            return None
        tensors = [value for value in values if type(value) is Tensor and stays(value)]
        halos = [halo for halo in map(halo_of, tensors) if halo is not None]
        if len(halos) == 1:
            return cls(halos[0])
        return (
            "on several ranks the edges of a rewritten layer are those that distribute() returned"
        )

    def whole(self, data: Any) -> Any:
        """Return features with those of halo nodes."""
        return exchanged(self.halo, "x", data)

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same object in every call."""
        return stays(tensor)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the code of a layer in the block as in a distributed model."""
        with running(layer={}), Following():
            yield

    def agree(self, reason: str, text: str) -> str:
        """Return the first reason of any rank, or one if ranks pass different texts."""
        every = self.halo.wire.values((reason, text))
        different = len({text for _, text in every}) > 1
        last = "ranks read different products in it" if different else ""
        return next((reason for reason, _ in every if reason), last)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, for each time, the longest of any rank."""
        wire = self.halo.wire
        times = torch.tensor(seconds, dtype=torch.float64, device=wire.device)
        longest: list[float] = wire.largest(times, "set-up").tolist()
        return longest
