"""A call of each primitive to time: the same call as in rewritten models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, matmul
from torch.nn.functional import linear

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
from pyg_accel.rewrite.cost.base import DENSE, Primitive

__all__ = ["operand_bytes", "workload"]


def workload(p: Primitive, device: torch.device, graph: Graph | None = None) -> Callable[[], Any]:
    """Return a call of a primitive with random float32 operands.

    Args:
        p: the primitive.
        device: where to run it.
        graph: the matrix of a sparse primitive; with a permutation if it is ``permuted``.

    Raises:
        ValueError: for a primitive that cannot be run individually, or a sparse one without its
            graph.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    order, width = p.permuted, (p.heads, p.cols // p.heads)
    ready: dict[str, Callable[[], Callable[[], Any]]] = {
        "gemm": lambda: partial(linear, normal(p.rows, p.inner), normal(p.cols, p.inner)),
        "gemm_tn": lambda: partial(matmul, normal(p.inner, p.rows).t(), normal(p.inner, p.cols)),
        "scale_rows": lambda: partial(torch.mul, normal(p.rows, p.cols), normal(p.rows, 1)),
        "elementwise": lambda: partial(torch.relu, normal(p.rows, p.cols)),
        "maxk": lambda: partial(maxk, normal(p.rows, p.cols), p.inner),
    }
    if graph is not None:
        rows, cols, edges = graph.num_rows, graph.num_cols, graph.num_edges
        taken = (1, width[1]) if p.shared else width
        ready |= {
            "spmm": lambda: partial(spmm, graph, normal(cols, p.cols)),
            "spmm_weighted": lambda: partial(
                gspmm, graph, "mul(u0,e1)", [normal(cols, *taken), normal(edges, p.heads, 1)],
                edge_order=order,
            ),
            "sddmm": lambda: partial(
                sddmm, graph, normal(rows, *width), normal(cols, *width), edge_order=order
            ),
            "scale_edges": lambda: partial(
                gspmm, graph, "mul(v0,u1)", [normal(rows, p.heads), normal(cols, p.heads)],
                reduce="none", edge_order=order,
            ),
            "edge_softmax": lambda: partial(
                edge_softmax, graph, normal(edges, p.heads), edge_order=order
            ),
            "cbsr_spmm": lambda: partial(cbsr_spmm, graph, maxk(normal(cols, p.cols), p.inner)),
            "sspmm": lambda: partial(  # the gradient that the transpose of the graph has
                call, "sspmm", *Arrays.join(graph.transposed()._replace(eid=None), graph.csr()),
                normal(cols, p.cols), maxk(normal(rows, p.cols), p.inner).indices, None,
            ),
            "sampled_spmm": lambda: partial(
                sampled_spmm, graph, normal(cols, p.cols), width=p.inner
            ),
        }  # fmt: skip
    if p.name not in ready:
        raise ValueError(f"no benchmark of the primitive '{p.name}'")
    return ready[p.name]()


def operand_bytes(p: Primitive) -> int:
    """Return the bytes of the operands and the result."""
    if p.name in DENSE:
        return 4 * (p.rows * p.inner + p.inner * p.cols + 2 * p.rows * p.cols)
    assert p.graph is not None
    nodes = (p.graph.num_rows + p.graph.num_cols) * p.cols
    return 4 * (nodes + 2 * p.graph.num_entries * p.heads)
