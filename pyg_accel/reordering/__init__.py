"""Reorders nodes so that rows with common neighbours are next to each other."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_accel.graph import Graph
from pyg_accel.reordering.orders import METHODS, order_of
from pyg_accel.reordering.permute import edges_of, permute_data, permute_edges

__all__ = ["METHODS", "Reordered", "reorder"]

G = TypeVar("G", Data, Tensor)


@dataclass(frozen=True)
class Reordered(Generic[G]):
    """A graph in another order, and the way back; ``data, inverse = result`` unpacks it.

    Attributes:
        data: the argument, with its nodes renumbered and its edges sorted by target.
        inverse: [N] int64, the new number of every old node: ``out[inverse]`` has the rows of a
            result in the old order, ``inverse[ids]`` translates node ids.
        order: [N] int64, the old number of every new node: ``data`` has ``x[order]``.
        edge_order: [E] int64, the old position of every new edge.
        method: the method that found the order.
        seconds: time to find the order, and to apply it.
    """

    data: G
    inverse: Tensor
    order: Tensor
    edge_order: Tensor
    method: str
    seconds: tuple[float, float]

    def __iter__(self) -> Iterator[G | Tensor]:
        return iter((self.data, self.inverse))

    def __str__(self) -> str:
        find, apply = self.seconds
        return (
            f"{self.method}: {self.order.numel():,} nodes, {self.edge_order.numel():,} edges, "
            f"found in {find:.2f} s, applied in {apply:.2f} s"
        )


def reorder(
    data: G, method: str | Tensor = "community", *, num_nodes: int | None = None
) -> Reordered[G]:
    """Renumber the nodes of a graph so that rows with common neighbours are close to each other.

    Kernels then find more of the features that they gather in a cache, and rows of a Tensor Core
    tile share more columns (which TC-GNN, section 4.1, exploits). Train on the result as on any
    other data: models are equivariant, and ``out[inverse]`` is in the old order.

    Args:
        data: a :class:`~torch_geometric.data.Data` or an edge_index [2, E] on any device. Directed
            graphs are ordered as if they were undirected, and stay directed.
        method: ``"community"``, communities of communities by modularity, hubs first in each (by
            the CPU library); ``"degree"``, by falling degree; ``"rcm"``, reverse Cuthill-McKee (by
            scipy, on the CPU); or an order of your own, [N] with the old number of every new node.
        num_nodes: number of nodes of an edge_index; by default its largest id + 1.

    Returns:
        The graph in its new order, and the inverse permutation.

    Raises:
        ValueError: for another type of data, batches, bipartite graphs, unknown methods, and orders
            that are no permutation.
        IndexError: for node ids outside of the graph.
        ExtensionNotBuilt: for ``"community"`` without the CPU library.
        ImportError: for ``"rcm"`` without scipy.
    """
    edge_index, size = _graph_of(data, num_nodes)
    plain = edge_index.as_subclass(Tensor)
    graph = Graph.from_edge_index(plain, (size, size))
    start = _now(plain)
    order = order_of(graph, method)
    middle = _now(plain)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(size, device=order.device)
    new = Graph.from_edge_index(inverse[plain], (size, size))
    assert new.perm is not None
    edge_order = new.perm.long()
    edges = permute_edges(new, edge_index)
    result = (
        permute_data(data, edges, order, inverse, edge_order) if isinstance(data, Data) else edges
    )
    end = _now(plain)
    return Reordered(
        data=result,
        inverse=inverse,
        order=order,
        edge_order=edge_order,
        method=method if isinstance(method, str) else "an order of the caller",
        seconds=(middle - start, end - middle),
    )


def _graph_of(data: Data | Tensor, num_nodes: int | None) -> tuple[Tensor, int]:
    if isinstance(data, Batch):
        raise ValueError("expected one graph: reorder each before they are batched")
    if isinstance(data, HeteroData):
        raise ValueError("expected one type of nodes: a HeteroData has no single order")
    if isinstance(data, Data):
        if num_nodes is not None:
            raise ValueError("'num_nodes' is for an edge_index; 'data' knows its own")
        return edges_of(data), int(data.num_nodes or 0)
    if not isinstance(data, Tensor):
        raise ValueError(f"expected a Data or an edge_index (got {type(data).__name__})")
    if data.layout != torch.strided:
        raise ValueError("expected an edge_index [2, E], not a sparse matrix")
    if num_nodes is None:
        num_nodes = int(data.max()) + 1 if data.numel() else 0
    return data, num_nodes


def _now(like: Tensor) -> float:
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
