"""Each primitive as a call that can be timed: the very one that rewritten models make."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pyg_accel.graph import Graph
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.cbsr import cbsr_spmm
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.ops.maxk import maxk
from pyg_accel.ops.operator import call
from pyg_accel.ops.sampled import sampled_spmm
from pyg_accel.ops.sddmm import sddmm
from pyg_accel.ops.softmax import edge_softmax
from pyg_accel.ops.spmm import spmm
from pyg_accel.rewrite.cost.base import Primitive

__all__ = ["DENSE", "SPARSE", "operand_bytes", "workload"]

DENSE = ("gemm", "gemm_tn", "scale_rows", "elementwise", "maxk")
SPARSE = ("spmm", "spmm_weighted", "sddmm", "scale_edges", "edge_softmax", "cbsr_spmm", "sspmm",
          "sampled_spmm")  # fmt: skip

Call = Callable[[], Tensor]


def workload(primitive: Primitive, device: torch.device, graph: Graph | None = None) -> Call:
    """Make random float32 operands for a primitive and return its call.

    Args:
        primitive: what to run.
        device: where.
        graph: the matrix, for a sparse primitive; with ``permuted`` it has a permutation.

    Raises:
        ValueError: for a primitive that is not in :data:`DENSE` or :data:`SPARSE`.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    p = primitive
    if p.name == "gemm":
        x, w = normal(p.rows, p.inner), normal(p.cols, p.inner)
        return lambda: functional.linear(x, w)
    if p.name == "gemm_tn":
        x, y = normal(p.inner, p.rows), normal(p.inner, p.cols)
        return lambda: x.t() @ y
    if p.name == "scale_rows":
        x, scale = normal(p.rows, p.cols), normal(p.rows, 1)
        return lambda: x * scale
    if p.name == "elementwise":
        x = normal(p.rows, p.cols)
        return lambda: x.relu()
    if p.name == "maxk":
        x = normal(p.rows, p.cols)
        return lambda: maxk(x, p.inner).values
    if p.name not in SPARSE or graph is None:
        raise ValueError(f"nothing is known of how to run '{p.name}' here")
    return _sparse(p, graph, normal)


def _sparse(p: Primitive, graph: Graph, normal: Callable[..., Tensor]) -> Call:
    entries, order = graph.num_edges, p.permuted
    width = (p.heads, p.cols // p.heads) if p.heads > 1 else (p.cols,)
    edge = (entries, p.heads) if p.heads > 1 else (entries,)
    if p.name == "spmm":
        x = normal(graph.num_cols, *width)
        return lambda: spmm(graph, x)
    if p.name == "spmm_weighted":
        shape = (1, width[-1]) if p.shared else width
        x, w = normal(graph.num_cols, *shape), normal(*edge)
        return lambda: spmm(graph, x, w, edge_order=order)
    if p.name == "sddmm":
        x, y = normal(graph.num_rows, *width), normal(graph.num_cols, *width)
        return lambda: sddmm(graph, x, y, edge_order=order)
    if p.name == "scale_edges":
        left, right = normal(graph.num_rows, p.heads), normal(graph.num_cols, p.heads)
        return lambda: gspmm(graph, "mul(v0,u1)", [left, right], reduce="none", edge_order=order)
    if p.name == "cbsr_spmm":
        kept = maxk(normal(graph.num_cols, p.cols), p.inner)
        return lambda: cbsr_spmm(graph, kept)
    if p.name == "sspmm":  # the gradient that the graph's transpose has
        grad = normal(graph.num_cols, p.cols)
        indices = maxk(normal(graph.num_rows, p.cols), p.inner).indices
        arrays = Arrays.join(graph.transposed()._replace(eid=None), graph.csr())
        return lambda: call("sspmm", *arrays, grad, indices, None)
    if p.name == "sampled_spmm":
        x = normal(graph.num_cols, p.cols)
        return lambda: sampled_spmm(graph, x, width=p.inner)
    scores = normal(*edge)
    return lambda: edge_softmax(graph, scores, edge_order=order)


def operand_bytes(p: Primitive) -> int:
    """Bytes of the operands and the result."""
    if p.name in DENSE:
        return 4 * (p.rows * p.inner + p.inner * p.cols + 2 * p.rows * p.cols)
    assert p.graph is not None
    nodes = (p.graph.num_rows + p.graph.num_cols) * p.cols
    return 4 * (nodes + 2 * p.graph.num_entries * p.heads)
