"""Methods that find an order of the nodes of a graph."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops

from pyg_accel.graph import Graph, ptr2index
from pyg_accel.reordering.community import community_order

__all__ = ["METHODS", "order_of"]

Order = Callable[[Tensor, Tensor], Tensor]  # takes rowptr and col of an undirected graph


def degree_order(rowptr: Tensor, col: Tensor) -> Tensor:
    """Sort nodes by falling degree; the sort is stable."""
    return torch.argsort(rowptr.diff(), descending=True, stable=True)


def cuthill_mckee_order(rowptr: Tensor, col: Tensor) -> Tensor:
    """Return nodes in reverse Cuthill-McKee order, which keeps neighbours at a small distance.

    Raises:
        ImportError: without scipy, which implements it.
        ValueError: for 2**31 edges and more, which scipy does not support.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("method 'rcm' needs scipy: pip install scipy")
    if col.numel() >= 2**31:
        raise ValueError("method 'rcm' takes fewer than 2**31 edges; 'community' takes any number")
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    size = rowptr.numel() - 1
    if size == 0:
        return rowptr.new_empty(0, dtype=torch.int64)
    entries = np.ones(col.numel(), dtype=np.int8)
    arrays = (entries, col.int().cpu().numpy(), rowptr.int().cpu().numpy())
    order = reverse_cuthill_mckee(csr_array(arrays, shape=(size, size)), symmetric_mode=True)
    return torch.from_numpy(order.astype(np.int64)).to(col.device)


#: The methods of :func:`pyg_accel.reorder`.
METHODS: dict[str, Order] = {
    "community": community_order,
    "degree": degree_order,
    "rcm": cuthill_mckee_order,
}


def order_of(graph: Graph, method: str | Tensor) -> Tensor:
    """Return the node at every position, [N] int64.

    Args:
        graph: with as many rows as columns. Directions, duplicates and self-loops are ignored: two
            nodes are neighbours if an edge joins them in either direction.
        method: one of :data:`METHODS`, or an order.

    Raises:
        ValueError: if there is no such method, or the tensor is no permutation.
    """
    if isinstance(method, Tensor):
        return _checked(method, graph)
    if method not in METHODS:
        raise ValueError(f"no method '{method}'; there are {', '.join(METHODS)}, or pass an order")
    return METHODS[method](*_undirected(graph))


def _checked(order: Tensor, graph: Graph) -> Tensor:
    nodes = torch.arange(graph.num_rows, device=graph.device)
    fits = order.dtype in (torch.int32, torch.int64) and order.shape == nodes.shape
    order = order.to(graph.device, torch.int64)
    if not fits or not torch.equal(order.sort().values, nodes):
        raise ValueError(f"expected an order to be a permutation of [0, {graph.num_rows})")
    return order


def _undirected(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return rowptr and col with every edge in both directions, and no self-loops."""
    backward = graph.transposed()
    rowptr, col = graph.rowptr, graph.col
    edges = torch.stack([col, ptr2index(rowptr, col.numel(), col.dtype)])
    symmetric = torch.equal(rowptr, backward.rowptr) and torch.equal(col, backward.col)
    if not symmetric:
        edges = torch.cat([edges, edges.flip(0)], 1)
    edges, _ = remove_self_loops(edges)
    if symmetric and edges.size(1) == col.numel():
        return rowptr, col
    merged = Graph.from_edge_index(edges, (graph.num_rows,) * 2)
    return merged.rowptr, merged.col
