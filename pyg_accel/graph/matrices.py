"""Arguments of PyG for graphs; edges and values of sparse matrices of torch and torch_sparse."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.csr import for_autograd, ptr2index
from pyg_accel.graph.derived import derived
from pyg_accel.graph.graph import Graph
from pyg_accel.graph.memo import is_sparse_tensor
from pyg_accel.runtime.cache import arrays_of

__all__ = [
    "edges_of_matrix",
    "graph_of_matrix",
    "is_edge_index",
    "is_sparse_matrix",
    "num_edges",
    "tensor_reasons",
    "values_of",
]

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse_matrix(value: Any) -> bool:
    """Return whether PyG accepts this as a sparse adjacency matrix."""
    return value.layout in _LAYOUTS if isinstance(value, Tensor) else is_sparse_tensor(value)


def is_edge_index(value: Any) -> bool:
    """Return whether this is a plain edge_index: integers [2, E], not of a subclass."""
    return (
        type(value) is Tensor
        and value.dtype in (torch.int32, torch.int64)
        and value.layout is torch.strided
        and value.dim() == 2
        and value.size(0) == 2
    )


def num_edges(graph: Any) -> int:
    """Return the number of edges of an edge_index or a sparse matrix."""
    if not is_sparse_matrix(graph):
        return graph.size(1)  # type: ignore[no-any-return]
    return graph._nnz() if isinstance(graph, Tensor) else graph.nnz()


def tensor_reasons(adj: Tensor, dtype: torch.dtype | None = None) -> list[str]:
    """Return the reasons why calls with a torch matrix take PyG's own path."""
    reasons = []
    if adj.requires_grad:
        reasons.append("a sparse matrix that requires gradients")
    if adj.layout == torch.sparse_coo and not adj.is_coalesced():
        reasons.append("a COO matrix that is not coalesced")
    if dtype not in (None, adj.dtype):
        reasons.append("a sparse matrix of another dtype")
    return reasons


def values_of(adj: Any) -> Tensor | None:
    """Return the values of a matrix; None if all are 1 and not stored."""
    values: Tensor | None = adj.values() if isinstance(adj, Tensor) else adj.storage.value()
    return values


def graph_of_matrix(adj: Any) -> Graph:
    """Return the graph of a matrix; its edges are in the order of the values.

    Raises:
        IndexError, ValueError: for invalid indices.
    """

    @for_autograd
    def make() -> Graph:
        if isinstance(adj, Tensor) and adj.layout != torch.sparse_csr:
            return Graph.from_edge_index(_edges_of_tensor(adj), (adj.size(1), adj.size(0)))
        rows, col = indices
        if not isinstance(adj, Tensor) and adj.storage._row is not None:
            rows = torch._convert_indices_from_coo_to_csr(rows, adj.size(0))
        narrow = max(rows.numel(), adj.size(1), col.numel()) < 2**31 - 1
        # A copy: the stored graph must not refer to the memory of its owners.
        dtype = torch.int32 if narrow else torch.int64
        arrays = [t.to(dtype, copy=True) for t in (rows, col)]
        return Graph.from_csr(*arrays, num_cols=adj.size(1))

    indices = _indices(adj)
    layout = adj.layout if isinstance(adj, Tensor) else adj.storage._row is None
    return derived(indices, ("graph of a matrix", layout, adj.size(0), adj.size(1)), make)


def edges_of_matrix(adj: Any) -> Tensor:
    """Return [2, E], source and target of every entry of a matrix."""
    if isinstance(adj, Tensor):
        key = "edges of a matrix", adj.layout
        return derived(_indices(adj), key, lambda: for_autograd(_edges_of_tensor)(adj))
    row, col, _ = adj.coo()
    return derived((row, col), "edges", lambda: for_autograd(torch.stack)([col, row]))


def _indices(adj: Any) -> tuple[Tensor, ...]:
    """Return the arrays of a matrix except its values: layers share them between matrices."""
    if not isinstance(adj, Tensor):
        storage = adj.storage
        return (storage.rowptr() if storage._row is None else storage._row), storage.col()
    return arrays_of(adj)[:-1]


def _edges_of_tensor(adj: Tensor) -> Tensor:
    if adj.layout == torch.sparse_coo:
        return adj.indices().flip(0)
    compressed, plain = _indices(adj)
    expanded = ptr2index(compressed, plain.numel(), plain.dtype)
    return torch.stack([plain, expanded] if adj.layout == torch.sparse_csr else [expanded, plain])
