"""Halos inside the products of a model that ``optimize()`` has rewritten.

The exchange is part of a product there: it moves the features that a matrix of edges is multiplied
with, the narrower of X and X W if that is what costs less. All ranks decide together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)

from pyg_accel.cbsr import CBSR, trust
from pyg_accel.distributed.halo import Halo, exchange
from pyg_accel.distributed.known import RUNNING, halo_of, stays, with_halo
from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.rewrite.algebra import NotLifted

__all__ = ["ProductHalos", "compressed", "look"]

# What their rules compute of a matrix, they compute of its rows, which a rank has whole.
_TAUGHT = (
    APPNP, ARMAConv, GCNConv, GINConv, GraphConv, LGConv, RGCNConv, SAGEConv, SGConv, SSGConv,
    TAGConv, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv,
)  # fmt: skip


def look(edge_index: Tensor) -> "ProductHalos | None":
    """Return the halos of edges of this rank; None outside of distributed models.

    Raises:
        NotLifted: for other edges in a distributed model; the layer itself says what is wrong.
    """
    halo = halo_of(edge_index)
    if halo is None and RUNNING.wire is not None:
        raise NotLifted("edges that distribute() did not return")
    return None if halo is None else ProductHalos(halo)


class ProductHalos:
    """The halo of one edge_index, as :mod:`pyg_accel.rewrite` asks for it; equal to its like."""

    def __init__(self, halo: Halo) -> None:
        """Take the plan of an edge_index."""
        self._halo = halo
        self.own, self.rows, self.targets = halo.own, halo.rows, halo.targets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProductHalos) and self._halo is other._halo

    def __hash__(self) -> int:
        return id(self._halo)

    def whole(self, data: Any) -> Any:
        """Return features with those of halo nodes."""
        if isinstance(data, CBSR):
            return compressed(self._halo, data)
        return with_halo(self._halo, [data])[0]

    def stays(self, data: Tensor) -> bool:
        """Return whether features are those that ``distribute()`` returned."""
        return stays(data)

    def reason(self, conv: Any) -> str:
        """Return why a layer exchanges its features first, or nothing."""
        if type(conv) not in _TAUGHT:
            return f"on several ranks {type(conv).__name__} exchanges halos before its products"
        if getattr(conv, "cached", False):
            return "cached=True on several ranks: the layer itself keeps the degrees of all ranks"
        return ""

    def agree(self, reason: str) -> str:
        """Return the first reason of any rank; every rank must ask."""
        return next((r for r in self._halo.wire.texts(reason) if r), "")

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest times of any rank; every rank must ask."""
        wire = self._halo.wire
        times = torch.tensor(seconds, dtype=torch.float64, device=wire.device)
        found: list[float] = wire.largest(times, "set-up").tolist()
        return found


def compressed(halo: Halo, features: CBSR) -> CBSR:
    """Return features with those of halo nodes: k values and k columns of a row travel."""
    (values,) = exchange(halo, [features.values])
    (columns,) = exchange(halo, [features.indices.view(torch.uint8)])
    indices = trust(columns.view(features.indices.dtype), features.width)
    return CBSR(values, indices, features.width)
