"""Softmax over the edges of every target node."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.graph import CSR, Graph
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
    if not isinstance(scores, Tensor) or scores.dim() not in (1, 2):
        raise ValueError("expected 'scores' to be a tensor [E] or [E, H]")
    if scores.size(0) != graph.num_edges or not scores.is_floating_point():
        raise ValueError(f"expected 'scores' to be floating-point with {graph.num_edges} rows")
    csr = graph.csr(edge_order=edge_order)
    wide = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    out: Tensor = call("edge_softmax", *csr[:3], csr.num_cols, wide)
    return out.view_as(scores)


def _run(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    spec = OpSpec("edge_softmax", scores.device.type, scores.dtype, csr.rowptr.dtype, csr.num_rows,
                  csr.num_cols, csr.col.numel(), scores.size(1), 1)  # fmt: skip
    return choose(spec).backend.edge_softmax(csr, scores, grad)


def _forward(
    rowptr: Tensor, col: Tensor, eid: Tensor | None, num_cols: int, scores: Tensor
) -> Tensor:
    return _run(CSR(rowptr, col, eid, num_cols, False), scores, None)


def _backward(
    rowptr: Tensor, col: Tensor, eid: Tensor | None, num_cols: int, out: Tensor, grad: Tensor
) -> Tensor:
    return _run(CSR(rowptr, col, eid, num_cols, False), out, grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, eid, ctx.num_cols, _ = inputs
    ctx.save_for_backward(rowptr, col, eid, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rowptr, col, eid, out = ctx.saved_tensors
    inputs = (rowptr, col, eid, ctx.num_cols, out, grad.contiguous())
    return None, None, None, None, call("edge_softmax_backward", *inputs)


def _setup_context_twice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rowptr, col, eid, ctx.num_cols, out, grad = inputs
    ctx.save_for_backward(rowptr, col, eid, out, grad)


def _differentiate_twice(ctx: Any, seed: Tensor) -> tuple[Any, ...]:
    """Backward of ``b = out * (grad - total)``, ``total`` the row sum of ``out * grad``."""
    rowptr, col, eid, out, grad = ctx.saved_tensors

    def row_sum(values: Tensor) -> Tensor:
        """The sum over each row, given back to its edges."""
        arrays = (rowptr, col, eid, None, None, None, ctx.num_cols, False)
        (sums,) = call("gspmm", *arrays, [values.unsqueeze(-1)], "e0", ["sum"], False)
        (back,) = call("gspmm", *arrays, [sums], "v0", ["none"], False)
        result: Tensor = back.squeeze(-1)
        return result

    weighted = row_sum(seed * out)
    grad_grad = out * (seed - weighted)
    grad_out = seed * (grad - row_sum(out * grad)) - grad * weighted
    return None, None, None, None, grad_out, grad_grad


_ARGS = "Tensor rowptr, Tensor col, Tensor? eid, SymInt num_cols"
define(
    f"edge_softmax({_ARGS}, Tensor scores) -> Tensor",
    _forward,
    lambda rowptr, col, eid, n, scores: torch.empty_like(scores),
    _differentiate,
    _setup_context,
)
define(
    f"edge_softmax_backward({_ARGS}, Tensor out, Tensor grad) -> Tensor",
    _backward,
    lambda rowptr, col, eid, n, out, grad: torch.empty_like(out),
    _differentiate_twice,
    _setup_context_twice,
)
