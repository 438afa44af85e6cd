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


def _run(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    spec = OpSpec.on("edge_softmax", csr, scores, scores.size(1), 1)
    out: Tensor = choose(spec).kernel.run(csr, scores, grad)
    return out


def _forward(
    rowptr: Tensor, col: Tensor, eid: Tensor | None, num_cols: int, scores: Tensor
) -> Tensor:
    return _run(CSR(rowptr, col, eid, num_cols, False), scores, None)


def _backward(
    rowptr: Tensor, col: Tensor, eid: Tensor | None, num_cols: int, out: Tensor, grad: Tensor
) -> Tensor:
    return _run(CSR(rowptr, col, eid, num_cols, False), out, grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.num_cols, _ = inputs
    ctx.save_for_backward(*arrays, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *arrays, out = ctx.saved_tensors
    found = call("edge_softmax_backward", *arrays, ctx.num_cols, out, grad.contiguous())
    return None, None, None, None, found


def _setup_context_twice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.num_cols, out, grad = inputs
    ctx.save_for_backward(*arrays, out, grad)


def _differentiate_twice(ctx: Any, seed: Tensor) -> tuple[Any, ...]:
    """Backward of ``b = out * (grad - total)``, ``total`` the row sum of ``out * grad``."""
    rowptr, col, eid, out, grad = ctx.saved_tensors
    arrays = Arrays.join(CSR(rowptr, col, eid, ctx.num_cols, False))

    def row_sum(values: Tensor) -> Tensor:
        """The sum over each row, given back to its edges."""
        (sums,) = call("gspmm", *arrays, [values.unsqueeze(-1)], "e0", ["sum"], False)
        (back,) = call("gspmm", *arrays, [sums], "v0", ["none"], False)
        result: Tensor = back.squeeze(-1)
        return result

    weighted = row_sum(seed * out)
    grad_grad = out * (seed - weighted)
    grad_out = seed * (grad - row_sum(out * grad)) - grad * weighted
    return None, None, None, None, grad_out, grad_grad


define(
    f"edge_softmax({ROW_ARRAYS}, Tensor scores) -> Tensor",
    _forward,
    lambda rowptr, col, eid, n, scores: torch.empty_like(scores),
    _differentiate,
    _setup_context,
)
define(
    f"edge_softmax_backward({ROW_ARRAYS}, Tensor out, Tensor grad) -> Tensor",
    _backward,
    lambda rowptr, col, eid, n, out, grad: torch.empty_like(out),
    _differentiate_twice,
    _setup_context_twice,
)
