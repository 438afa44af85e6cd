"""The graph behind what PyG takes for an adjacency, remembered together with those of patch()."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_accel.graph import Graph
from pyg_accel.matrices import graph_of_matrix, is_sparse_matrix, values_of
from pyg_accel.ops.csr import CompiledGraph, graph_of

__all__ = ["adjacency"]


def adjacency(
    edge_index: Any, num_source: int, num_target: int, flow: str
) -> tuple[Graph, Tensor | None]:
    """Return the graph of an adjacency and the values of a matrix, in the order of its edges.

    Args:
        edge_index: an edge_index [2, E], an EdgeIndex, a sparse matrix of torch or a SparseTensor.
        num_source: number of nodes that messages come from.
        num_target: number of nodes that messages go to; a matrix or EdgeIndex knows its own.
        flow: ``"source_to_target"`` or ``"target_to_source"``.

    Raises:
        ValueError: for an adjacency that PyG would not take, or one of another size.
        IndexError: for node ids outside of the sizes.
    """
    if is_sparse_matrix(edge_index):
        return _of_matrix(edge_index, num_source, flow)
    rows, cols, plain = num_target, num_source, edge_index
    if isinstance(edge_index, EdgeIndex):
        plain = edge_index.as_tensor()
        size = (edge_index.num_rows, edge_index.num_cols)
        given = size if flow == "source_to_target" else size[::-1]
        cols, rows = (num if own is None else own for own, num in zip(given, (cols, rows),
                                                                      strict=True))  # fmt: skip
    target = 1 if flow == "source_to_target" else 0
    if torch.compiler.is_compiling():
        return CompiledGraph(plain, rows, cols, target), None
    return graph_of(plain, rows, cols, target), None


def _of_matrix(adj: Any, num_source: int, flow: str) -> tuple[Graph, Tensor | None]:
    if flow != "source_to_target":
        raise ValueError(
            f"flow '{flow}' goes with an edge_index; for a sparse matrix, transpose that"
        )
    if adj.size(1) != num_source:
        raise ValueError(
            f"expected a matrix with {num_source} columns, one per source node (got {adj.size(1)})"
        )
    if isinstance(adj, Tensor) and adj.layout == torch.sparse_coo and not adj.is_coalesced():
        adj = adj.coalesce()
    return graph_of_matrix(adj), values_of(adj)
