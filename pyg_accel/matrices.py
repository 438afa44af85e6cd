"""Sparse adjacency matrices, torch's and torch_sparse's: their graphs, edges and values."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph import Graph, ptr2index
from pyg_accel.memo import Memo, is_sparse_tensor

__all__ = [
    "edges_of_arrays",
    "edges_of_tensor",
    "graph_of_matrix",
    "is_sparse_matrix",
    "num_edges",
    "tensor_reasons",
    "values_of",
]

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse_matrix(value: Any) -> bool:
    """Return whether PyG takes this for a sparse adjacency matrix."""
    return value.layout in _LAYOUTS if isinstance(value, Tensor) else is_sparse_tensor(value)


def num_edges(graph: Any) -> int:
    """Return how many edges an edge_index has, or a matrix stands for."""
    if not is_sparse_matrix(graph):
        return graph.size(1)  # type: ignore[no-any-return]
    return graph._nnz() if isinstance(graph, Tensor) else graph.nnz()


def tensor_reasons(adj: Tensor, dtype: torch.dtype | None = None) -> list[str]:
    """Return why a torch matrix is left to PyG."""
    reasons = []
    if adj.requires_grad:
        reasons.append("a sparse matrix that requires gradients")
    if adj.layout == torch.sparse_coo and not adj.is_coalesced():
        reasons.append("a COO matrix that is not coalesced")
    if dtype not in (None, adj.dtype):
        reasons.append("a sparse matrix of another dtype")
    return reasons


def values_of(adj: Any) -> Tensor | None:
    """Return the values of a matrix; None if it has none, which stands for ones."""
    values: Tensor | None = adj.values() if isinstance(adj, Tensor) else adj.storage.value()
    return values


def graph_of_matrix(memo: Memo, adj: Any) -> Graph:
    """Return the graph of a matrix, whose edge order is that of the matrix's values.

    Raises:
        IndexError, ValueError: if its indices are not those of a matrix.
    """
    if isinstance(adj, Tensor) and adj.layout != torch.sparse_csr:
        graph: Graph = memo(_graph_of_edges, adj)
    elif isinstance(adj, Tensor):
        graph = memo(_graph_of_csr, adj)
    elif adj.storage._row is not None:  # by its arrays: layers make new matrices of the same
        graph = memo(_graph_of_rows, adj.storage._row, adj.storage.col(), *adj.sparse_sizes())
    else:
        graph = memo(_graph_of_arrays, adj.storage.rowptr(), adj.storage.col(), adj.size(1))
    return graph


def _graph_of_edges(adj: Tensor) -> Graph:
    return Graph.from_edge_index(edges_of_tensor(adj), (adj.size(1), adj.size(0)))


def _graph_of_csr(adj: Tensor) -> Graph:
    return _graph_of_arrays(adj.crow_indices(), adj.col_indices(), adj.size(1))


def _graph_of_arrays(rowptr: Tensor, col: Tensor, num_cols: int) -> Graph:
    narrow = max(rowptr.numel(), num_cols, col.numel()) < 2**31 - 1
    # Aliases where nothing is converted: what is remembered must not hold what it is found by.
    arrays = [t.to(torch.int32) if narrow else t for t in (rowptr.detach(), col.detach())]
    return Graph.from_csr(*arrays, num_cols=num_cols)


def _graph_of_rows(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Graph:
    return _graph_of_arrays(torch._convert_indices_from_coo_to_csr(row, num_rows), col, num_cols)


def edges_of_tensor(adj: Tensor) -> Tensor:
    """Return [2, E], source and target of every entry of a torch matrix."""
    if adj.layout == torch.sparse_coo:
        return adj.indices().flip(0)
    compressed = adj.crow_indices() if adj.layout == torch.sparse_csr else adj.ccol_indices()
    other = adj.col_indices() if adj.layout == torch.sparse_csr else adj.row_indices()
    own = ptr2index(compressed, other.numel(), other.dtype)
    return torch.stack([other, own] if adj.layout == torch.sparse_csr else [own, other])


def edges_of_arrays(row: Tensor, col: Tensor) -> Tensor:
    """Return [2, E], source and target of entries given by row and column."""
    return torch.stack([col, row])
