"""Layers that are given a sparse matrix instead of an edge_index.

A layer with a ``message_and_aggregate`` multiplies with the matrix, by PyG's ``spmm`` or
``torch.sparse.mm``; that product is ours. Any other layer gets the edges and values of the matrix,
as PyG itself would take them out of it, and is traced like one that was given an edge_index.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.patching.lazy import Unrecognised, Watch
from pyg_accel.patching.memo import Memo, is_sparse_tensor

__all__ = ["SparseTrace", "as_edge_index", "is_sparse_matrix", "num_entries"]

_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
            "amin": "min"}  # fmt: skip
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse_matrix(value: Any) -> bool:
    """Return whether PyG takes this for a sparse adjacency matrix."""
    return value.layout in _LAYOUTS if isinstance(value, Tensor) else is_sparse_tensor(value)


def num_entries(adj: Any) -> int:
    """Return how many edges a matrix stands for."""
    entries: int = adj._nnz() if isinstance(adj, Tensor) else adj.nnz()
    return entries


class SparseTrace(Watch):
    """One accelerated call of a layer that multiplies: takes the products over."""

    def __init__(self, memo: Memo) -> None:
        super().__init__()
        self._memo = memo

    def see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a torch function."""
        out = self.multiply(*args) if func is torch.sparse.mm and not kwargs else None
        return func(*args, **kwargs) if out is None else out

    def multiply(self, adj: Any, x: Tensor, reduce: str = "sum") -> Tensor | None:
        """Return the product of a matrix with features; None if that is left to PyG."""
        reduce = _REDUCES.get(reduce, "")
        if not reduce or not is_sparse_matrix(adj) or x.layout != torch.strided or x.dim() != 2:
            return None
        if num_entries(adj) == 0 or (isinstance(adj, Tensor) and _tensor_reasons(adj, x.dtype)):
            return None
        with torch._C.DisableTorchFunction():
            graph, values = _graph(self._memo, adj), _values(adj)
            if values is not None:
                if values.dim() != 1:
                    return None
                values = values.to(x.dtype)  # as torch_sparse does
            out: Tensor = ops.spmm(graph, x, values, reduce=reduce, edge_order=True)
        self.formulas.append(f"{reduce}_j " + ("u0" if values is None else "mul(u0,e1)"))
        return out


def _tensor_reasons(adj: Tensor, dtype: torch.dtype | None = None) -> list[str]:
    """Why a torch matrix is left to PyG."""
    reasons = []
    if adj.requires_grad:
        reasons.append("a sparse matrix that requires gradients")
    if adj.layout == torch.sparse_coo and not adj.is_coalesced():
        reasons.append("a COO matrix that is not coalesced")
    if dtype not in (None, adj.dtype):
        reasons.append("a sparse matrix of another dtype")
    return reasons


def _values(adj: Any) -> Tensor | None:
    values: Tensor | None = adj.values() if isinstance(adj, Tensor) else adj.storage.value()
    return values


def _graph(memo: Memo, adj: Any) -> Graph:
    """Return the graph of a matrix, whose edge order is that of the matrix's values."""
    try:
        graph: Graph
        if isinstance(adj, Tensor) and adj.layout != torch.sparse_csr:
            graph = memo(_graph_of_edges, adj)
        elif isinstance(adj, Tensor):
            graph = memo(_graph_of_csr, adj)
        elif adj.storage._row is not None:  # by its arrays: layers make new matrices of the same
            graph = memo(_graph_of_rows, adj.storage._row, adj.storage.col(), *adj.sparse_sizes())
        else:
            graph = memo(_graph_of_arrays, adj.storage.rowptr(), adj.storage.col(), adj.size(1))
    except (IndexError, ValueError) as error:
        raise Unrecognised(str(error), sticky=False) from error
    return graph


def _graph_of_edges(adj: Tensor) -> Graph:
    return Graph.from_edge_index(_edges_of_tensor(adj), (adj.size(1), adj.size(0)))


def _graph_of_csr(adj: Tensor) -> Graph:
    return _graph_of_arrays(adj.crow_indices(), adj.col_indices(), adj.size(1))


def _graph_of_arrays(rowptr: Tensor, col: Tensor, num_cols: int) -> Graph:
    narrow = max(rowptr.numel(), num_cols, col.numel()) < 2**31 - 1
    # Aliases where nothing is converted: what is remembered must not hold what it is found by.
    arrays = [t.to(torch.int32) if narrow else t for t in (rowptr.detach(), col.detach())]
    return Graph.from_csr(*arrays, num_cols=num_cols)


def _graph_of_rows(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> Graph:
    return _graph_of_arrays(torch._convert_indices_from_coo_to_csr(row, num_rows), col, num_cols)


def _edges_of_tensor(adj: Tensor) -> Tensor:
    if adj.layout == torch.sparse_coo:
        return adj.indices().flip(0)
    compressed = adj.crow_indices() if adj.layout == torch.sparse_csr else adj.ccol_indices()
    other = adj.col_indices() if adj.layout == torch.sparse_csr else adj.row_indices()
    ids = torch.arange(compressed.numel() - 1, dtype=other.dtype, device=other.device)
    own = ids.repeat_interleave(compressed.diff(), output_size=other.numel())
    return torch.stack([other, own] if adj.layout == torch.sparse_csr else [own, other])


def _edges_of_arrays(row: Tensor, col: Tensor) -> Tensor:
    return torch.stack([col, row])


def as_edge_index(
    memo: Memo, original: Callable[..., Any], module: MessagePassing, adj: Any, kwargs: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the edge_index and arguments by which a call does what it does for a matrix.

    As in PyG's template, values become the argument that the message asks for, if it was None.

    Raises:
        Unrecognised: if PyG would not take the matrix, or hands it on to the message.
    """
    inspector = module.inspector
    names = (
        inspector.get_param_names("edge_update")
        if original.__name__ == "edge_updater"
        else inspector.get_flat_param_names(["message", "aggregate", "update"])
    )
    reasons = [f"a message that asks for '{n}'" for n in ("edge_index", "adj_t") if n in names]
    if isinstance(adj, Tensor):
        reasons += _tensor_reasons(adj) + ["a CSC matrix"] * (adj.layout == torch.sparse_csc)
    if module.flow != "source_to_target":
        reasons.append("a sparse matrix in the other flow")
    given = dict(kwargs)
    name = next((n for n in ("edge_weight", "edge_attr", "edge_type") if n in names), None)
    if name is not None and name not in given:
        reasons.append(f"a message that asks for '{name}' and is not given one")
    if reasons:
        raise Unrecognised("; ".join(reasons), sticky=False)
    if name is not None and given[name] is None:
        values = _values(adj)
        given[name] = None if name == "edge_attr" and values is not None and values.dim() == 1 \
            else values  # fmt: skip
    given["size"] = (adj.size(1), adj.size(0))
    if isinstance(adj, Tensor):
        return memo(_edges_of_tensor, adj), given
    row, col, _ = adj.coo()
    return memo(_edges_of_arrays, row, col), given
