"""Sparse times CBSR, and its gradients.

Three operators, each the gradient of the others, so that any of them can be differentiated any
number of times. With A the graph with its weights, V a CBSR matrix with columns c and Y dense:

- ``cbsr_spmm``: A V, dense (the paper's SpGEMM);
- ``sspmm``: A^T Y at the columns c alone (the paper's SSpMM);
- ``cbsr_dot``: for every edge (i, j) the product of rows Y_i and V_j.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.base import atomics_allowed
from pyg_accel.graph import CSR, Graph, check_graph
from pyg_accel.graph.cbsr import CBSR, check_cbsr, check_columns
from pyg_accel.ops.arrays import ARRAYS, Arrays, csr_and_arguments
from pyg_accel.ops.operator import call, define
from pyg_accel.runtime.checks import shown

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
        weight: [E], one per edge.
        reduce: ``"sum"`` or ``"mean"``.
        edge_order: weights are in the order of the edge list; by default in CSR order.

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
    needs = torch.is_grad_enabled() and values.requires_grad
    arrays = Arrays.of(graph, edge_order=edge_order, transposed=needs)
    out: Tensor = call(
        "cbsr_spmm", *arrays, values.contiguous(), indices, cbsr.width, weight, reduce
    )
    return out


def _check(graph: Graph, cbsr: CBSR, weight: Tensor | None, reduce: str) -> None:
    check_graph(graph)
    check_cbsr(cbsr)
    values, indices, width = cbsr
    if values.size(0) != graph.num_cols:
        raise ValueError(f"expected 'cbsr' to have {graph.num_cols} rows (got {values.size(0)})")
    if width == 0:
        raise ValueError("expected 'cbsr' to have at least one column")
    if weight is not None and not isinstance(weight, Tensor):
        raise ValueError(f"expected 'weight' to be a tensor [{graph.num_edges}] (got "
                         f"{shown(weight)})")  # fmt: skip
    for name, t in (("cbsr", values), ("cbsr", indices), ("weight", weight)):
        if t is not None and t.device != graph.device:
            raise ValueError(f"expected '{name}' on {graph.device} (got {t.device})")
    if weight is not None and (
        weight.shape != (graph.num_edges,) or not weight.is_floating_point()
    ):
        raise ValueError(
            f"expected 'weight' to be floating-point [{graph.num_edges}] (got {shown(weight)})"
        )
    if reduce not in REDUCES:
        raise ValueError(f"expected 'reduce' of {', '.join(REDUCES)} (got {reduce!r})")


def _kernel(op: str, csr: CSR, values: Tensor, width: int, k: int) -> Callable[..., Tensor]:
    atomics = op == "sspmm" and atomics_allowed()
    return choose(OpSpec.on(op, csr, values, 1, width, k=k, atomics=atomics)).kernel.run


def _cbsr_spmm(*args: Any) -> Tensor:
    csr, (values, indices, width, weight, reduce) = csr_and_arguments(args)
    check_columns(indices, width)
    run = _kernel("cbsr_spmm", csr, values, width, values.size(1))
    return run(csr, values, indices, width, weight, reduce)


def _sspmm(*args: Any) -> Tensor:
    arrays, (x, indices, weight) = Arrays.split(args)
    run = _kernel("sspmm", arrays.csr, x, x.size(1), indices.size(1))
    return run(arrays.csr, arrays.transposed, x, indices, weight)


def _cbsr_dot(*args: Any) -> Tensor:
    csr, (values, indices, x) = csr_and_arguments(args)
    run = _kernel("cbsr_dot", csr, values, x.size(1), values.size(1))
    return run(csr, values, indices, x)


def _cbsr_spmm_fake(*args: Any) -> Any:
    csr, (values, _, width, _, _) = csr_and_arguments(args)
    return values.new_empty(csr.num_rows, width)


def _of_sum(grad: Tensor, arrays: list[Any], reduce: str) -> Tensor:
    """The gradient of the features of a sum."""
    if reduce == "mean":
        degree = arrays[0].diff().clamp(min=1)
        grad = grad / degree.to(grad.dtype).unsqueeze(1)
    return grad.contiguous()


define(
    f"cbsr_spmm({ARRAYS}, Tensor values, Tensor indices, SymInt width, Tensor? weight, str reduce) "
    "-> Tensor",
    _cbsr_spmm,
    _cbsr_spmm_fake,
    {
        "values": lambda grad, arrays, indices, weight, reduce: call(
            "sspmm", *arrays, _of_sum(grad, arrays, reduce), indices, weight
        ),
        "weight": lambda grad, arrays, values, indices, reduce: call(
            "cbsr_dot", *arrays, values, indices, _of_sum(grad, arrays, reduce)
        ),
    },
)
define(
    f"sspmm({ARRAYS}, Tensor x, Tensor indices, Tensor? weight) -> Tensor",
    _sspmm,
    lambda *args: args[-3].new_empty(args[-2].shape),
    {
        "x": lambda grad, arrays, x_columns, indices, weight: call(
            "cbsr_spmm", *arrays, grad.contiguous(), indices, x_columns, weight, "sum"
        ),
        "weight": lambda grad, arrays, x, indices: call(
            "cbsr_dot", *arrays, grad.contiguous(), indices, x
        ),
    },
)
define(
    f"cbsr_dot({ARRAYS}, Tensor values, Tensor indices, Tensor x) -> Tensor",
    _cbsr_dot,
    lambda *args: args[-3].new_empty(args[1].size(0)),
    {
        "values": lambda grad, arrays, indices, x: call(
            "sspmm", *arrays, x, indices, grad.contiguous()
        ),
        "x": lambda grad, arrays, values, indices, x_columns: call(
            "cbsr_spmm", *arrays, values, indices, x_columns, grad.contiguous(), "sum"
        ),
    },
)
