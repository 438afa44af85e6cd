"""Softmax over the edges of every target node."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.graph import CSR, Graph, check_graph
from pyg_accel.ops.arrays import ROW_ARRAYS, Arrays
from pyg_accel.ops.operator import call, define

__all__ = ["edge_softmax"]


def edge_softmax(graph: Graph, scores: Tensor, *, edge_order: bool = False) -> Tensor:
    """Normalise scores over the edges that share a target node.

    Args:
        graph: the graph.
        scores: [E] or [E, H].
        edge_order: scores are in the order of the edge list; by default in that of the CSR.

    Returns:
        The same shape; the values of a target's edges add up to 1, head by head.

    Raises:
        ValueError: for shapes or dtypes that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    check_graph(graph)
    if not isinstance(scores, Tensor) or scores.dim() not in (1, 2):
        raise ValueError("expected 'scores' to be a tensor [E] or [E, H]")
    if scores.size(0) != graph.num_edges or not scores.is_floating_point():
        raise ValueError(f"expected 'scores' to be floating-point with {graph.num_edges} rows")
    if scores.device != graph.device:
        raise ValueError(f"expected 'scores' on {graph.device} (got {scores.device})")
    arrays = graph.csr(edge_order=edge_order)[:4]
    wide = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    out: Tensor = call("edge_softmax", *arrays, wide)
    return out.view_as(scores)


def _run(csr: CSR, scores: Tensor, grad: Tensor | None) -> Any:
    spec = OpSpec.on("edge_softmax", csr, scores, scores.size(1), 1)
    return choose(spec).kernel.run(csr, scores, grad)


def _row_sum(arrays: list[Any], values: Tensor) -> Tensor:
    """The sum over each row, given back to its edges."""
    graph = Arrays.join(CSR._make([*arrays, False]))
    (sums,) = call("gspmm", *graph, [values.unsqueeze(-1)], "e0", ["sum"], False)
    (back,) = call("gspmm", *graph, [sums], "v0", ["none"], False)
    result: Tensor = back.squeeze(-1)
    return result


define(
    f"edge_softmax({ROW_ARRAYS}, Tensor scores) -> Tensor",
    lambda rowptr, col, eid, n, scores: _run(CSR(rowptr, col, eid, n, False), scores, None),
    lambda rowptr, col, eid, n, scores: torch.empty_like(scores),
    gradients={
        "scores": lambda grad, arrays, output: call(
            "edge_softmax_backward", *arrays, output, grad.contiguous()
        )
    },
)
# The backward pass is ``out * (grad - total)``, ``total`` the row sum of ``out * grad``.
define(
    f"edge_softmax_backward({ROW_ARRAYS}, Tensor out, Tensor grad) -> Tensor",
    lambda rowptr, col, eid, n, out, grad: _run(CSR(rowptr, col, eid, n, False), out, grad),
    lambda rowptr, col, eid, n, out, grad: torch.empty_like(out),
    gradients={
        "out": lambda seed, arrays, out, grad: (
            seed * (grad - _row_sum(arrays, out * grad)) - grad * _row_sum(arrays, seed * out)
        ),
        "grad": lambda seed, arrays, out: out * (seed - _row_sum(arrays, seed * out)),
    },
)
