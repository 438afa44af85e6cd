"""Replaces torch-sparse in PyG's GraphSAINT, ShaDow and DimeNet.

See :mod:`torch_sparse` (https://github.com/rusty1s/pytorch_sparse) for names and arguments.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.csr import entries_of_rows
from pyg_accel.pyg_lib.neighbors import ONE, Draw, Edges, draw
from pyg_accel.pyg_lib.partition import metis
from pyg_accel.pyg_lib.sampler import random_walk, subgraph

__all__ = ["NAMESPACE", "SparseTensor"]


class SparseTensor:
    """Edges sorted by row and column, with a value each.

    Args:
        row: [E]; or ``rowptr`` is passed.
        rowptr: [N + 1] of edges that are sorted.
        col: [E].
        value: [E] of any dtype.
        sparse_sizes: numbers of rows and columns.
        is_sorted: edges are sorted.
        trust_data: not used.
    """

    def __init__(
        self, row: Tensor | None = None, rowptr: Tensor | None = None, col: Tensor | None = None,
        value: Tensor | None = None, sparse_sizes: tuple[int, int] | None = None,
        is_sorted: bool = False, trust_data: bool = False,
    ) -> None:  # fmt: skip
        """Sort the edges, unless they are."""
        assert col is not None and sparse_sizes is not None
        if row is None:
            assert rowptr is not None
            row = torch.repeat_interleave(rowptr.diff())
        elif not is_sorted:
            order = (row * sparse_sizes[1] + col).argsort(stable=True)
            row, col = row[order], col[order]
            value = None if value is None else value[order]
        self._edges, self._value, self._sizes = (row, col), value, sparse_sizes
        count = torch.bincount(row, minlength=sparse_sizes[0])
        self._rowptr = torch.cat([count.new_zeros(1), count.cumsum(0)])

    def sparse_size(self, dim: int) -> int:
        """Return the number of rows or columns."""
        return self._sizes[dim]

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows, columns and values."""
        return (*self._edges, self._value)

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return pointers of rows, columns and values."""
        return self._rowptr, self._edges[1], self._value

    def t(self) -> "SparseTensor":
        """Return the transpose."""
        row, col = self._edges
        return SparseTensor(col, None, row, self._value, self._sizes[::-1])

    def __getitem__(self, rows: Tensor) -> "SparseTensor":
        """Return some rows, in the order of ``rows``."""
        row, edge = entries_of_rows(self._rowptr, rows)
        value = None if self._value is None else self._value[edge]
        size = rows.numel(), self._sizes[1]
        return SparseTensor(row, None, self._edges[1][edge], value, size, is_sorted=True)

    def set_value(self, value: Tensor | None) -> "SparseTensor":
        """Return the edges with other values."""
        return SparseTensor(*self._edges[:1], None, self._edges[1], value, self._sizes, True)

    def sum(self, dim: int) -> Tensor:
        """Return the number of edges of each row, for edges without values."""
        assert dim == 1 and self._value is None
        return self._rowptr.diff()

    @property
    def storage(self) -> SimpleNamespace:
        """Functions that return rows, values, and numbers of edges of rows and columns."""
        row, col = self._edges
        return SimpleNamespace(
            row=lambda: row, col=lambda: col, value=lambda: self._value, rowcount=self._rowptr.diff,
            colcount=lambda: torch.bincount(col, minlength=self._sizes[1]),
        )  # fmt: skip

    def random_walk(self, start: Tensor, walk_length: int) -> Tensor:
        """Return the nodes of walks, [S, walk_length + 1]."""
        return random_walk(self._rowptr, self._edges[1], start, walk_length)

    def saint_subgraph(self, node_idx: Tensor) -> tuple["SparseTensor", Tensor]:
        """Return the edges between some nodes, which are renumbered, and the ids of the edges."""
        rowptr, col, edge = subgraph(self._rowptr, self._edges[1], node_idx)
        assert edge is not None
        value, size = None if self._value is None else self._value[edge], node_idx.numel()
        return SparseTensor(None, rowptr, col, value, (size, size), is_sorted=True), edge


def _ego_samples(
    rowptr: Tensor, col: Tensor, idx: Tensor, depth: int, num_neighbors: int, replace: bool
) -> tuple[Tensor, ...]:
    """Sample the neighbourhood of each node, and return all edges inside of it.

    Returns:
        The CSR matrix of all neighbourhoods, the ids of its nodes (ascending in each) and edges,
        where each neighbourhood begins, and the positions of the nodes of ``idx``.
    """
    size = rowptr.numel() - 1
    graph = Edges.of_one_type(rowptr, col, size, [num_neighbors] * depth)
    how = Draw(rowptr.device, replace, induced=True, disjoint=True)
    out: Any = draw(graph, how, {ONE: idx})
    node, batch, edge = out.node[ONE], out.batch[ONE], out.edge[ONE]
    order = (batch * size + node).argsort()
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel()))
    row, source = place[out.col[ONE]], place[out.row[ONE]]
    by_edge = edge.argsort(stable=True)
    by_row = by_edge[row[by_edge].argsort(stable=True)]
    starts = torch.searchsorted(row[by_row], torch.arange(order.numel() + 1))
    ptr = torch.searchsorted(batch[order], torch.arange(idx.numel() + 1))
    return starts, source[by_row], node[order], edge[by_row], ptr, place[: idx.numel()]


def _ptr2ind(ptr: Tensor, size: int) -> Tensor:
    return torch.repeat_interleave(ptr.diff(), output_size=size)


def _partition(
    rowptr: Tensor, col: Tensor, value: Tensor | None, num_parts: int, recursive: bool
) -> Tensor:
    return metis(rowptr, col, num_parts, edge_weight=value, recursive=recursive)


# PyG's tests call `partition` to find out whether it is available.
NAMESPACE = SimpleNamespace(
    ego_k_hop_sample_adj=_ego_samples, ptr2ind=_ptr2ind, partition=_partition
)
