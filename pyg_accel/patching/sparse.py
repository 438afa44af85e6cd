"""Layers that are given a sparse matrix instead of an edge_index.

PyG then multiplies with ``torch.sparse.mm``, for ``torch.sparse`` layouts and on a CPU for
``torch_sparse.SparseTensor`` too. Inside an accelerated call that product is ours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.patching.lazy import GRAPHS

__all__ = ["SparseTrace", "is_sparse_matrix"]

_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
            "amin": "min"}  # fmt: skip


def is_sparse_matrix(value: Any) -> bool:
    """Return whether PyG takes this for a sparse adjacency matrix."""
    if isinstance(value, Tensor):
        return value.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
    return type(value).__name__ == "SparseTensor" and hasattr(value, "storage")


class SparseTrace(TorchFunctionMode):
    """Catches the products of sparse CSR matrices with features.

    Attributes:
        adj: the matrix that the layer was given; the graph is kept for as long as it lives.
        formulas: what has been run, for the report.
    """

    def __init__(self, adj: Any) -> None:
        super().__init__()
        self.device = adj.device() if callable(adj.device) else adj.device
        self.formulas: list[str] = []
        self._owner = adj if isinstance(adj, Tensor) else adj.storage.col()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.sparse.mm
            and not kwargs
            and args[0].layout == torch.sparse_csr
            and not args[0].requires_grad
            and args[1].layout == torch.strided
            and args[1].dim() == 2
            and args[0].dtype == args[1].dtype
        ):
            reduce = _REDUCES.get(args[2] if len(args) > 2 else "sum")
            if reduce is not None:
                return self._multiply(args[0], args[1], reduce)
        return func(*args, **kwargs)

    def _multiply(self, adj: Tensor, x: Tensor, reduce: str) -> Tensor:
        self.formulas.append(f"{reduce}_j mul(e0,u1)")
        out: Tensor = ops.spmm(self._graph(adj), x, adj.values(), reduce=reduce)
        return out

    def _graph(self, adj: Tensor) -> Graph:
        key = ("csr", tuple(adj.shape))
        graph = GRAPHS.find(self._owner, key)
        if graph is None:
            # torch has checked the arrays when the matrix was made.
            graph = Graph(adj.crow_indices(), adj.col_indices(), None, adj.size(1), sorted=False)
            GRAPHS.keep(self._owner, key, graph)
        return graph
