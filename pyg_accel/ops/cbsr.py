"""Sparse times CBSR, and what its gradient needs.

Three operators, each the gradient of the others, so that any of them can be differentiated any
number of times. With A the graph with its weights, V a CBSR matrix with columns c and Y dense:

- ``cbsr_spmm``: A V, dense (the paper's SpGEMM);
- ``sspmm``: A^T Y at the columns c alone (the paper's SSpMM);
- ``cbsr_dot``: for every edge (i, j) the product of rows Y_i and V_j.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import Backend, OpSpec, choose
from pyg_accel.backends.base import atomics_allowed
from pyg_accel.cbsr import CBSR, index_dtype
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.operator import call, define

__all__ = ["cbsr_spmm"]

REDUCES = ("sum", "mean")


def cbsr_spmm(
    graph: Graph,
    cbsr: CBSR,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    edge_order: bool = False,
) -> Tensor:
    """Aggregate the features of source nodes: ``out[i] = reduce_j weight_ij * cbsr.dense()[j]``.

    The SpGEMM of the MaxK-GNN paper (section 4.1); its gradient is the SSpMM (section 4.2).
    Differentiable for the stored values and the weights.

    Args:
        graph: the graph.
        cbsr: features of the source nodes, a row each.
        weight: [E], one an edge.
        reduce: ``"sum"`` or ``"mean"``.
        edge_order: weights are in the order of the edge list; by default in that of the CSR.

    Returns:
        [num_rows, F], zero for targets without edges.

    Raises:
        ValueError: for arguments that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    _check(graph, cbsr, weight, reduce)
    values, indices = cbsr.values, cbsr.indices.contiguous()
    if weight is not None:
        dtype = torch.promote_types(values.dtype, weight.dtype)
        values, weight = values.to(dtype), weight.to(dtype).contiguous()
    csr = graph.csr(edge_order=edge_order)
    transposed: tuple[Tensor | None, ...] = (None, None, None)
    if torch.is_grad_enabled() and values.requires_grad:
        transposed = graph.transposed(edge_order=edge_order)[:3]
    arrays = (*csr[:3], *transposed, csr.num_cols, csr.sorted)
    out: Tensor = call(
        "cbsr_spmm", *arrays, values.contiguous(), indices, cbsr.width, weight, reduce
    )
    return out


def check_cbsr(cbsr: object) -> None:
    """Raise ValueError for what is no CBSR matrix."""
    if not isinstance(cbsr, CBSR):
        raise ValueError(f"expected 'cbsr' to be a CBSR matrix (got {type(cbsr).__name__})")
    values, indices, width = cbsr
    if values.dim() != 2 or values.shape != indices.shape or not values.is_floating_point():
        raise ValueError(
            f"expected values [N, k] in floating point and indices of that shape (got "
            f"{list(values.shape)} {values.dtype} and {list(indices.shape)})"
        )
    if indices.dtype != index_dtype(width):
        raise ValueError(f"expected indices in {index_dtype(width)} (got {indices.dtype})")


def _check(graph: Graph, cbsr: CBSR, weight: Tensor | None, reduce: str) -> None:
    check_cbsr(cbsr)
    values, indices, width = cbsr
    if values.size(0) != graph.num_cols:
        raise ValueError(f"expected 'cbsr' to have {graph.num_cols} rows (got {values.size(0)})")
    if not 1 <= cbsr.k <= width:
        raise ValueError(f"expected between 1 and {width} entries a row (got {cbsr.k})")
    for name, t in (("cbsr", values), ("cbsr", indices), ("weight", weight)):
        if t is not None and t.device != graph.device:
            raise ValueError(f"expected '{name}' on {graph.device} (got {t.device})")
    if weight is not None and (
        weight.shape != (graph.num_edges,) or not weight.is_floating_point()
    ):
        raise ValueError(
            f"expected 'weight' to be floating-point [{graph.num_edges}] (got {list(weight.shape)})"
        )
    if reduce not in REDUCES:
        raise ValueError(f"expected 'reduce' of {', '.join(REDUCES)} (got {reduce!r})")


def _chosen(op: str, csr: CSR, values: Tensor, width: int, k: int) -> Backend:
    spec = OpSpec(op, csr.col.device.type, values.dtype, csr.rowptr.dtype, csr.num_rows,
                  csr.num_cols, csr.col.numel(), 1, width, k=k,
                  atomics=op == "sspmm" and atomics_allowed())  # fmt: skip
    return choose(spec).backend


def _graphs(arrays: tuple[Any, ...]) -> tuple[CSR, CSR | None]:
    """The graph and its transpose from the first arguments of every operator."""
    rowptr, col, eid, rowptr_t, col_t, eid_t, num_cols, in_order = arrays
    csr = CSR(rowptr, col, eid, num_cols, in_order)
    if rowptr_t is None:
        return csr, None
    return csr, CSR(rowptr_t, col_t, eid_t, csr.num_rows, True)


def _cbsr_spmm(*args: Any) -> Tensor:
    (csr, _), (values, indices, width, weight, reduce) = _graphs(args[:8]), args[8:]
    backend = _chosen("cbsr_spmm", csr, values, width, values.size(1))
    return backend.cbsr_spmm(csr, values, indices, width, weight, reduce)


def _sspmm(*args: Any) -> Tensor:
    (csr, transposed), (x, indices, weight) = _graphs(args[:8]), args[8:]
    if transposed is None:
        raise ValueError("expected the arrays of the transposed graph")
    backend = _chosen("sspmm", csr, x, x.size(1), indices.size(1))
    return backend.sspmm(csr, transposed, x, indices, weight)


def _cbsr_dot(*args: Any) -> Tensor:
    (csr, _), (values, indices, x) = _graphs(args[:8]), args[8:]
    backend = _chosen("cbsr_dot", csr, values, x.size(1), values.size(1))
    return backend.cbsr_dot(csr, values, indices, x)


def _cbsr_spmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.num_cols, ctx.sorted = inputs[:8]
    values, indices, _, weight, ctx.reduce = inputs[8:]
    ctx.save_for_backward(*arrays, values, indices, weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.num_cols, ctx.sorted = inputs[:8]
    ctx.save_for_backward(*arrays, *inputs[8:])


def _saved(ctx: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments that say which graph, and the tensors after them."""
    saved = ctx.saved_tensors
    return (*saved[:6], ctx.num_cols, ctx.sorted), saved[6:]


def _cbsr_spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    graph, (values, indices, weight) = _saved(ctx)
    if ctx.reduce == "mean":
        degree = graph[0].diff().clamp(min=1)
        grad = grad / degree.to(grad.dtype).unsqueeze(1)
    grad = grad.contiguous()
    grad_values = grad_weight = None
    if ctx.needs_input_grad[-5]:
        grad_values = call("sspmm", *graph, grad, indices, weight)
    if ctx.needs_input_grad[-2]:
        grad_weight = call("cbsr_dot", *graph, values, indices, grad)
    return (*[None] * 8, grad_values, None, None, grad_weight, None)


def _sspmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    graph, (x, indices, weight) = _saved(ctx)
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[-3]:
        grad_x = call("cbsr_spmm", *graph, grad, indices, x.size(1), weight, "sum")
    if ctx.needs_input_grad[-1]:
        grad_weight = call("cbsr_dot", *graph, grad, indices, x)
    return (*[None] * 8, grad_x, None, grad_weight)


def _cbsr_dot_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    graph, (values, indices, x) = _saved(ctx)
    grad = grad.contiguous()
    grad_values = grad_x = None
    if ctx.needs_input_grad[-3]:
        grad_values = call("sspmm", *graph, x, indices, grad)
    if ctx.needs_input_grad[-1]:
        grad_x = call("cbsr_spmm", *graph, values, indices, x.size(1), grad, "sum")
    return (*[None] * 8, grad_values, None, grad_x)


_GRAPH = (
    "Tensor rowptr, Tensor col, Tensor? eid, Tensor? rowptr_t, Tensor? col_t, Tensor? eid_t, "
    "SymInt num_cols, bool sorted"
)
define(
    f"cbsr_spmm({_GRAPH}, Tensor values, Tensor indices, SymInt width, Tensor? weight, str reduce) "
    "-> Tensor",
    _cbsr_spmm,
    lambda *a: a[8].new_empty(a[0].size(0) - 1, a[10]),
    _cbsr_spmm_backward,
    _cbsr_spmm_setup,
)
define(
    f"sspmm({_GRAPH}, Tensor x, Tensor indices, Tensor? weight) -> Tensor",
    _sspmm,
    lambda *a: a[8].new_empty(a[9].shape),
    _sspmm_backward,
    _setup,
)
define(
    f"cbsr_dot({_GRAPH}, Tensor values, Tensor indices, Tensor x) -> Tensor",
    _cbsr_dot,
    lambda *a: a[8].new_empty(a[1].size(0)),
    _cbsr_dot_backward,
    _setup,
)
