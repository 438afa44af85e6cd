"""Applies an order to a Data object: attributes of nodes and edges, and node ids."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.edge_index import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import (
    is_sparse,
    is_torch_sparse_tensor,
    to_edge_index,
    to_torch_coo_tensor,
    to_torch_csc_tensor,
    to_torch_csr_tensor,
)

from pyg_accel.graph import Graph, ptr2index

__all__ = ["edges_of", "permute_data", "permute_edges"]

D = TypeVar("D", bound=Data)
_REBUILD = {
    torch.sparse_coo: to_torch_coo_tensor,
    torch.sparse_csr: to_torch_csr_tensor,
    torch.sparse_csc: to_torch_csc_tensor,
}


def edges_of(data: Data) -> Tensor:
    """Return the edge list of a Data object, from its edge_index or its adj_t.

    Raises:
        ValueError: if it has neither.
    """
    if isinstance(data.edge_index, Tensor) and not is_torch_sparse_tensor(data.edge_index):
        return data.edge_index
    for key in ("adj_t", "edge_index"):
        if is_sparse(data.get(key)):
            targets_first: Tensor = to_edge_index(data[key])[0]
            return targets_first.flip(0)
    raise ValueError("expected 'data' to have an 'edge_index' or an 'adj_t'")


def permute_edges(graph: Graph, like: Tensor) -> Tensor:
    """Return the edge list of a graph in its CSR order: by target, then by source.

    Args:
        graph: the graph after the nodes were renumbered.
        like: the old edge list; the result has its dtype, and is an EdgeIndex if it is one.
    """
    row = ptr2index(graph.rowptr, graph.num_edges, like.dtype)
    edge_index = torch.stack([graph.col.to(like.dtype), row])
    if not isinstance(like, EdgeIndex):
        return edge_index
    size = (graph.num_cols, graph.num_rows)
    return EdgeIndex(
        edge_index, sparse_size=size, sort_order="col", is_undirected=like.is_undirected
    )


def permute_data(
    data: D, edge_index: Tensor, order: Tensor, inverse: Tensor, edge_order: Tensor
) -> D:
    """Return a copy of a Data object whose nodes and edges are in another order.

    PyG classifies attributes: ``is_node_attr`` and ``is_edge_attr`` by size; attributes whose
    ``__inc__`` is the number of nodes (``edge_label_index``, ``face``) have node ids.

    Args:
        data: not changed.
        edge_index: the new edge list; not set if ``data`` has a sparse matrix instead.
        order: [N], the old number of every new node.
        inverse: [N], the new number of every old node.
        edge_order: [E], the old position of every new edge.
    """
    result = copy.copy(data)
    size = order.numel()
    for key, value in data.to_dict().items():
        if key == "edge_index" and not is_sparse(value):
            result[key] = edge_index
            continue
        if is_sparse(value):
            if tuple(_sizes(value)) == (size, size):
                result[key] = _permute_matrix(value, inverse)
            continue
        dim = data.__cat_dim__(key, value)
        if data.is_node_attr(key):
            value = _select(value, order, dim)
        elif data.is_edge_attr(key):
            value = _select(value, edge_order, dim)
        if isinstance(value, Tensor) and _holds_node_ids(data, key, value, size):
            value = torch.where(value < 0, value, inverse.to(value.dtype)[value.clamp(min=0)])
        result[key] = value
    return result


def _holds_node_ids(data: Data, key: str, value: Tensor, size: int) -> bool:
    is_id = value.dtype in (torch.int32, torch.int64) and value.numel() > 0
    return is_id and "batch" not in key and data.__inc__(key, value) == size


def _select(value: Any, order: Tensor, dim: int) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(dim, order.to(value.device))
    if isinstance(value, np.ndarray):
        return value.take(order.cpu().numpy(), axis=dim)
    if isinstance(value, (list, tuple)):
        return type(value)(value[i] for i in order.tolist())
    return value[order]  # a TensorFrame


def _sizes(matrix: Any) -> Sequence[int]:
    sizes: Sequence[int] = matrix.sizes() if isinstance(matrix, SparseTensor) else matrix.shape[:2]
    return sizes


def _permute_matrix(matrix: Any, inverse: Tensor) -> Any:
    (row, col), value = to_edge_index(matrix)
    row, col = inverse[row], inverse[col]
    if isinstance(matrix, SparseTensor):
        values = value if matrix.has_value() else None
        return SparseTensor(row=row, col=col, value=values, sparse_sizes=matrix.sizes())
    return _REBUILD[matrix.layout](torch.stack([row, col]), value, size=tuple(matrix.shape[:2]))
