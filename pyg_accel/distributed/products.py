"""Halos inside the products of a model that ``optimize()`` has rewritten.

The exchange is part of a product there: it moves the features that a matrix of edges is multiplied
with, the narrower of X and X W where that costs less. All ranks decide together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn

from pyg_accel import layers
from pyg_accel.cbsr import CBSR, trust
from pyg_accel.distributed.halo import Halo, exchange
from pyg_accel.distributed.known import RUNNING, halo_of, refuse, stays, with_halo
from pyg_accel.rewrite.algebra import NotLifted

__all__ = ["ProductHalos", "look", "look_for_maxk"]

# Layers whose rules read a matrix row by row: a rank has whole rows.
_TAUGHT = (
    nn.APPNP, nn.ARMAConv, nn.GCNConv, nn.GINConv, nn.GraphConv, nn.LGConv, nn.RGCNConv,
    nn.SAGEConv, nn.SGConv, nn.SSGConv, nn.TAGConv,
    layers.MaxKGCNConv, layers.MaxKGINConv, layers.MaxKSAGEConv,
)  # fmt: skip


def look(edge_index: Any) -> "ProductHalos | None":
    """Return the halos of edges of this rank; None outside of distributed models.

    Raises:
        NotLifted: for other edges in a distributed model; the layer then raises the error.
    """
    halo = halo_of(edge_index)
    if halo is None and RUNNING.wire is not None:
        raise NotLifted("edges that distribute() did not return")
    return None if halo is None else ProductHalos(halo)


def look_for_maxk(edge_index: Any) -> "ProductHalos | None":
    """Return the same for the call of a MaxK layer, which raises the error itself."""
    if RUNNING.wire is not None and halo_of(edge_index) is None:
        refuse("a MaxK layer", edge_index)
    return look(edge_index)


@dataclass(frozen=True)
class ProductHalos:
    """The halo of one edge_index as :mod:`pyg_accel.rewrite` asks for it.

    Attributes:
        halo: the plan.
    """

    halo: Halo

    own = property(lambda self: self.halo.own)
    rows = property(lambda self: self.halo.rows)
    targets = property(lambda self: self.halo.targets)

    def whole(self, data: Any) -> Any:
        """Return features with those of halo nodes; of CBSR only kept values travel."""
        if not isinstance(data, CBSR):
            return with_halo(self.halo, {"x": data})["x"]
        columns = data.indices.view(torch.uint8)
        values, columns = (exchange(self.halo, t) for t in (data.values, columns))
        return CBSR(values, trust(columns.view(data.indices.dtype), data.width), data.width)

    def stays(self, data: Tensor) -> bool:
        """Return whether features are those that ``distribute()`` returned."""
        return stays(data)

    def reason(self, conv: Any) -> str:
        """Return why a layer exchanges its features before its products; empty if it need not."""
        if type(conv) not in _TAUGHT:
            return f"on several ranks {type(conv).__name__} exchanges halos before its products"
        if getattr(conv, "cached", False):
            return "cached=True on several ranks: the layer itself keeps the degrees of all ranks"
        return ""

    def agree(self, reason: str) -> str:
        """Return the first reason of any rank; every rank must ask."""
        return next(filter(None, self.halo.wire.values(reason)), "")

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest times of any rank; every rank must ask."""
        return [max(times) for times in zip(*self.halo.wire.values([*seconds]), strict=True)]
