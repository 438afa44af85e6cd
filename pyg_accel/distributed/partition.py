"""Which rank owns which node: an order of the nodes, and where it is cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.distributed.partitioners import PARTITIONERS, parts_of
from pyg_accel.errors import NotDistributable
from pyg_accel.graph import Graph
from pyg_accel.reordering.orders import order_of

__all__ = ["Partition", "cut", "from_parts", "partition"]

ROW = 8  # what a row costs, in edges: its share of products and norms


class Partition(NamedTuple):
    """The nodes of one type over ranks.

    Attributes:
        order: [N], the node at every place; each rank owns a range of places.
        cuts: [P + 1], where the ranges begin.
    """

    order: Tensor
    cuts: Tensor

    def of(self, rank: int) -> Tensor:
        """Return the nodes that a rank owns, in its order."""
        return self.order[int(self.cuts[rank]) : int(self.cuts[rank + 1])]

    def places(self) -> Tensor:
        """Return the place of every node, [N]."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return places


def partition(edges: Tensor, num_nodes: int, ranks: int, method: str) -> Partition:
    """Cut a graph into parts of about equal work.

    Args:
        edges: [2, E]; the rank that owns the target of an edge owns the edge.
        num_nodes: N.
        ranks: how many parts.
        method: an order of :func:`pyg_accel.reorder`, ``"given"`` for that of the node ids, or a
            program, whose parts are ordered by communities inside.
    """
    degree = torch.bincount(edges[1], minlength=num_nodes)
    if method == "given":
        order = torch.arange(num_nodes, device=edges.device)
    else:
        graph = Graph.from_edge_index(edges.contiguous(), (num_nodes, num_nodes))
        order = order_of(graph, "community" if method in PARTITIONERS else method)
    if method in PARTITIONERS:
        parts = parts_of(edges, degree + ROW, ranks, method).to(order.device)
        found = from_parts(parts[order], num_nodes, ranks)
        return Partition(order.cpu()[found.order], found.cuts)
    return Partition(order, cut(degree[order], ranks))


def cut(degrees: Tensor, ranks: int) -> Tensor:
    """Return where to cut an order so that edges and rows are balanced, [P + 1].

    Args:
        degrees: [N], edges that the node at every place owns.
        ranks: P.
    """
    work = (degrees + ROW).cumsum(0)
    whole = work[-1:] if work.numel() else work.new_zeros(1)
    shares = torch.arange(1, ranks, device=degrees.device) * whole // ranks
    inner = torch.searchsorted(work, shares, right=False)
    first, last = inner.new_zeros(1), inner.new_full((1,), degrees.numel())
    return torch.cat([first, inner, last])


def from_parts(parts: Tensor, num_nodes: int, ranks: int) -> Partition:
    """Return the partition of a vector with the rank of every node.

    Raises:
        NotDistributable: if it is no such vector.
    """
    whole = parts.dtype in (torch.int32, torch.int64) and parts.shape == (num_nodes,)
    if not whole or (num_nodes and not (int(parts.min()) >= 0 and int(parts.max()) < ranks)):
        raise NotDistributable(
            f"expected 'partition' to name one of {ranks} ranks for each of {num_nodes} nodes"
        )
    parts = parts.cpu()
    sizes = torch.bincount(parts.long(), minlength=ranks)
    order = torch.argsort(parts.long(), stable=True)
    return Partition(order, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
