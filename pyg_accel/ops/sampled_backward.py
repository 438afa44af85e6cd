"""The gradients of sampled aggregation, by the sample written out.

Three operators that are linear in each tensor and one another's gradients, so that they can be
differentiated any number of times; A is the matrix of the sampled edges, weights and factors in it:

* ``sampled_spmm``: A x, by kernels that choose the edges as they go;
* ``sampled_spmm_t``: A^T g, the gradient of the features;
* ``sampled_sddmm``: the dot of g and x at the sampled edges, 0 at others, the gradient of weights.

The last two write the sample out (:func:`pyg_accel.backends.sampling.take`), the same one for the
same seed, and run :func:`pyg_accel.ops.gspmm` on it: no float is added atomically. On a GPU it gets
room for as many edges as there can be, so that nothing has to wait for the device to count them and
a CUDA graph can hold the backward pass too.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.sampling import Sample, Sampling, edge_factors, take
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.arrays import ROW_ARRAYS, Arrays
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define

__all__ = ["HOW", "fit", "split"]

HOW = "SymInt width, str strategy, str rescale, Tensor? seed"


def split(args: tuple[Any, ...]) -> tuple[CSR, list[Any]]:
    """Return the graph, and the arguments of an operator that come after it."""
    rowptr, col, eid, num_cols, *others = args
    return CSR(rowptr, col, eid, num_cols, False), others


def fit(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradients [E, H] in the shape of the weights [E, 1 | H]."""
    return grad.sum(1, keepdim=True) if weight.size(1) == 1 and grad.size(1) != 1 else grad


def _transposed(*args: Any) -> Tensor:
    csr, (grad, weight, *how, seed) = split(args)
    sampling = Sampling(*how)
    sample = take(csr, sampling, seed, padded=_padded(csr))
    wide = torch.promote_types(grad.dtype, torch.float32)
    values = _values(csr, sample.entry, weight, edge_factors(csr, sample, sampling), wide)
    back = _transpose(sample, csr.num_cols)
    if values is None:
        operands, text, back = [grad.to(wide)], "u0", back._replace(eid=None)
    else:
        operands, text = [grad.to(wide), values.unsqueeze(-1)], "mul(u0,e1)"
    operands = [contiguous_rows(t) for t in operands]
    (out,) = call("gspmm", *Arrays.join(back), operands, text, ["sum"], False)
    result: Tensor = out.to(grad.dtype)
    return result


def _padded(csr: CSR) -> bool:
    return csr.col.is_cuda


def _transpose(sample: Sample, num_cols: int) -> CSR:
    """The transpose of a sample; its padding is one more row of one more column, which is cut."""
    rowptr, col = sample.rowptr, sample.col
    end = torch.full_like(rowptr[:1], col.numel())
    col = col.where(~sample.beyond(), num_cols)
    arrays = torch.cat([rowptr, end]), col, None, num_cols + 1
    back = Graph.trusted(*arrays, sorted=False).transposed()
    rows = rowptr.numel() - 1
    return CSR(back.rowptr[:-1].contiguous(), back.col, back.eid, rows, back.sorted)


def _dots(*args: Any) -> Tensor:
    csr, (grad, x, *how, seed) = split(args)
    sampling = Sampling(*how)
    sample = take(csr, sampling, seed, padded=_padded(csr))
    wide = torch.promote_types(grad.dtype, torch.float32)
    operands = [contiguous_rows(t.to(wide)) for t in (x, grad)]
    arrays = Arrays.join(CSR(sample.rowptr, sample.col, None, csr.num_cols, False))
    (dots,) = call("gspmm", *arrays, operands, "sum(mul(u0,v1))", ["none"], False)
    dots = dots.squeeze(-1)
    factors = edge_factors(csr, sample, sampling)
    if factors is not None:
        dots = dots * factors.to(wide).unsqueeze(-1)
    place = sample.entry if csr.eid is None else csr.eid[sample.entry].long()
    place = place.where(~sample.beyond(), csr.col.numel())  # padding: a row that is cut
    out: Tensor = grad.new_zeros(csr.col.numel() + 1, grad.size(1))
    return out.index_copy_(0, place, dots.to(grad.dtype))[:-1]


def _values(
    csr: CSR, entry: Tensor, weight: Tensor | None, factors: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """[S, 1 | H], what every edge of a sample is multiplied by; None for 1."""
    values = None
    if weight is not None:
        values = weight[entry if csr.eid is None else csr.eid[entry].long()].to(dtype)
    if factors is not None:
        own = factors.to(dtype).unsqueeze(-1)
        values = own if values is None else values * own
    return values


define(
    f"sampled_spmm_t({ROW_ARRAYS}, Tensor grad, Tensor? weight, {HOW}) -> Tensor",
    _transposed,
    lambda *args: args[4].new_empty(args[3], args[4].size(1), args[4].size(2)),
    gradients={
        "grad": lambda seed, arrays, weight, how: call(
            "sampled_spmm", *arrays, contiguous_rows(seed), None, weight, *how
        ),
        "weight": lambda seed, arrays, grad, weight, how: fit(
            call("sampled_sddmm", *arrays, grad, contiguous_rows(seed), *how), weight
        ),
    },
)
define(
    f"sampled_sddmm({ROW_ARRAYS}, Tensor grad, Tensor x, {HOW}) -> Tensor",
    _dots,
    lambda *args: args[4].new_empty(args[1].size(0), args[4].size(1)),
    gradients={
        "grad": lambda seed, arrays, x, how: call("sampled_spmm", *arrays, x, None, seed, *how),
        "x": lambda seed, arrays, grad, how: call("sampled_spmm_t", *arrays, grad, seed, *how),
    },
)
