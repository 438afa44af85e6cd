"""Partitions the nodes of each type over ranks: an order of the nodes that is cut into ranges."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed.partitioners import metis_parts
from pyg_accel.errors import NotDistributable
from pyg_accel.graph import Graph
from pyg_accel.reordering.orders import order_of

__all__ = [
    "ONE", "Partition", "Types", "begins", "by_type", "cut", "edge_stores", "from_parts", "joined",
    "node_stores", "partition", "store_of",
]  # fmt: skip

ROW = 8  # the cost of a row (dense products, norms) in edges


class Partition(NamedTuple):
    """The nodes of one type over ranks.

    Attributes:
        order: [N], the node at every position; each rank owns a range of positions.
        cuts: [P + 1], the first position of each range.
    """

    order: Tensor
    cuts: Tensor

    def of(self, rank: int) -> Tensor:
        """Return the nodes that a rank owns, in its order."""
        return self.order[int(self.cuts[rank]) : int(self.cuts[rank + 1])]

    def positions(self) -> Tensor:
        """Return the position of every node, [N]."""
        positions = torch.empty_like(self.order)
        positions[self.order] = torch.arange(self.order.numel(), device=self.order.device)
        return positions


Types = dict[Any, Partition]  # by node type
ONE: Any = None  # the node type of a Data


def partition(edges: Tensor, num_nodes: int, ranks: int, method: str | Tensor) -> Partition:
    """Cut a graph into parts of about equal work.

    Args:
        edges: [2, E]; the rank that owns the target of an edge owns the edge.
        num_nodes: N.
        ranks: number of parts.
        method: an order of :func:`pyg_accel.reorder`, ``"given"`` for the order of the node ids, or
            ``"metis"``, with nodes ordered by communities inside of each part.
    """
    degree = torch.bincount(edges[1], minlength=num_nodes)
    name = method if isinstance(method, str) else ""
    if name == "given":
        order = torch.arange(num_nodes, device=edges.device)
    else:
        graph = Graph.from_edge_index(edges.contiguous(), (num_nodes, num_nodes))
        order = order_of(graph, "community" if name == "metis" else method)
    if name == "metis":
        parts = metis_parts(edges, degree + ROW, ranks).to(order.device)
        inside = from_parts(parts[order], num_nodes, ranks)
        return Partition(order.cpu()[inside.order], inside.cuts)
    return Partition(order, cut(degree[order], ranks))


def cut(degrees: Tensor, ranks: int) -> Tensor:
    """Return the cuts [P + 1] of an order that balance edges and rows.

    Args:
        degrees: [N], the number of edges into the node at every position.
        ranks: P.
    """
    work = (degrees + ROW).cumsum(0)
    whole = work[-1:] if work.numel() else work.new_zeros(1)
    shares = torch.arange(1, ranks, device=degrees.device) * whole // ranks
    inner = torch.searchsorted(work, shares, right=False)
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([degrees.numel()])])


def from_parts(parts: Tensor, num_nodes: int, ranks: int) -> Partition:
    """Return the partition of a vector with the rank of every node, [N].

    Raises:
        NotDistributable: for another shape, dtype or number of ranks.
    """
    fits = parts.dtype in (torch.int32, torch.int64) and parts.shape == (num_nodes,)
    if not fits or (num_nodes and not (int(parts.min()) >= 0 and int(parts.max()) < ranks)):
        raise NotDistributable(
            f"expected 'partition' to name one of {ranks} ranks for each of {num_nodes} nodes"
        )
    parts = parts.cpu().long()
    sizes = torch.bincount(parts, minlength=ranks)
    order = torch.argsort(parts, stable=True)
    return Partition(order, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))


def node_stores(data: Data | HeteroData) -> dict[Any, Any]:
    """Return the stores of node attributes by node type."""
    keys = data.node_types if isinstance(data, HeteroData) else [ONE]
    return dict(zip(keys, data.node_stores, strict=True))


def edge_stores(data: Data | HeteroData) -> dict[tuple[Any, Any, Any], Any]:
    """Return the stores of edge attributes by source type, relation and target type."""
    keys = data.edge_types if isinstance(data, HeteroData) else [(ONE, "to", ONE)]
    return dict(zip(keys, data.edge_stores, strict=True))


def store_of(data: Data | HeteroData, key: Any) -> Any:
    """Return the store of a node or edge type; a HeteroData creates a missing one."""
    return data[key] if isinstance(data, HeteroData) else data.stores[0]


def joined(data: Data | HeteroData) -> tuple[Tensor, dict[Any, int]]:
    """Return the edges of all types, nodes numbered type by type, and the size of each type."""
    sizes = {key: int(store.num_nodes or 0) for key, store in node_stores(data).items()}
    first = begins(sizes)
    parts = []
    for (a, _, b), store in edge_stores(data).items():
        offsets = torch.tensor([[first[a]], [first[b]]], device=store.edge_index.device)
        parts.append(store.edge_index.long() + offsets)
    return torch.cat(parts, dim=1) if parts else torch.empty(2, 0, dtype=torch.int64), sizes


def by_type(whole: Partition, sizes: Mapping[Any, int]) -> Types:
    """Split the partition of nodes that are numbered type by type into one per type."""
    ranks = torch.repeat_interleave(torch.arange(len(whole.cuts) - 1), whole.cuts.diff())
    result = {}
    for key, low in begins(sizes).items():
        of_type = (whole.order >= low) & (whole.order < low + sizes[key])
        counts = torch.bincount(ranks[of_type], minlength=len(whole.cuts) - 1)
        cuts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        result[key] = Partition(whole.order[of_type] - low, cuts)
    return result


def begins(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Return the first node of each type, for nodes that are numbered type by type."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
