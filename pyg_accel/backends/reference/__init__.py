"""The reference backend: plain torch, for any dtype and device, with a row per message.

It is slow and uses E x F memory. Other backends are tested against it in float64, and its functions
define the operators: kernels of all backends have the same arguments and results.

Shapes: ``H`` heads, ``F`` features per head; operands are ``[rows, 1 | H, 1 | F]`` and contiguous
within a row, index operands (winners of a maximum) have the dtype of ``csr.col``.
"""

import torch
from torch import Tensor

from pyg_accel.backends.base import Backend, table, winners_are_columns
from pyg_accel.backends.dtypes import widened
from pyg_accel.backends.reference.attention import attention, attention_backward
from pyg_accel.backends.reference.cbsr import cbsr_dot, cbsr_spmm, maxk, sspmm
from pyg_accel.backends.reference.edges import edge_passes
from pyg_accel.backends.reference.messages import evaluate, places_of
from pyg_accel.backends.sampling import Sampling, edge_factors, take
from pyg_accel.costs import segment_seconds
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR, ptr2index

__all__ = [
    "REFERENCE", "attention", "attention_backward", "cbsr_dot", "cbsr_spmm", "edge_passes",
    "edge_softmax", "gspmm", "gspmm_several", "maxk", "sampled_spmm", "scatter_arg",
    "segment_matmul", "segment_outer", "sspmm",
]  # fmt: skip


def gspmm(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Compute the message of every edge and reduce it over each row.

    Args:
        csr: the graph.
        formula: the message.
        operands: by operand index.
        reduces: of ``sum mean max min prod sqsum`` ([num_rows, H, F]; empty rows give 0, or 1 for
            ``prod``) and ``none`` (messages, [E, H, F] in the order of ``csr.eid``).
        want_arg: also return winners.

    Returns:
        One tensor per reduction; then with ``want_arg``, for each max and min, the winning edge of
        every element as ``csr.eid`` numbers them (-1 in empty rows), or the winning column where
        :func:`~pyg_accel.backends.base.winners_are_columns` says so.
    """
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    if dtype.itemsize == 2:  # 16-bit features are computed in fp32 and rounded once
        wide = [widened(t) if t.is_floating_point() else t for t in operands]
        outs = gspmm(csr, formula, wide, reduces, want_arg=want_arg)
        return [t.to(dtype) if t.is_floating_point() else t for t in outs]
    place = places_of(csr)
    row, col, eid = place["v"], place["u"], place["e"]
    message = evaluate(formula, operands, place)
    heads = max((t.size(1) for t in operands), default=1)
    message = message.expand(-1, heads if message.size(1) == 1 else -1, -1)
    outs = [_reduce(message, row, eid, csr.num_rows, reduce) for reduce in reduces]
    if want_arg:
        winner = col if winners_are_columns(formula, reduces) else eid
        for reduce, out in zip(reduces, list(outs), strict=True):
            if reduce in ("max", "min"):
                outs.append(_winners(message, out, row, winner).to(csr.col.dtype))
    return outs


def gspmm_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> list[Tensor]:
    """Run several formulas over the same operands in one pass.

    Args:
        csr: the graph.
        formulas: without ``sel``.
        reduces: of each: ``sum``, or ``none`` for one of a single number per edge and head.
        operands: of all, by operand index.

    Returns:
        [num_rows, H, F | 1] per sum; [E, H, 1] in the order of ``csr.eid`` for ``none``. H is the
        largest number of heads of an operand.
    """
    pairs = zip(formulas, reduces, strict=True)
    return [out for f, r in pairs for out in gspmm(csr, f, operands, [r], want_arg=False)]


def scatter_arg(grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
    """Add ``grad[r, f]`` to row ``arg[r, f]`` of a zero [num_cols, F]; skip negative ones."""
    out = grad.new_zeros(num_cols + 1, grad.size(1))
    index = torch.where(arg < 0, num_cols, arg.long())  # an extra row for empty rows, cut off
    return out.scatter_add_(0, index, grad)[:-1]


def edge_softmax(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    """Softmax of [E, H] scores over each row; with ``grad``, its backward (scores = result)."""
    row = ptr2index(csr.rowptr, csr.col.numel())
    if csr.eid is not None:  # the target of every edge, in the order of the scores
        row = torch.empty_like(row).index_copy_(0, csr.eid.long(), row)
    index = row.view(-1, 1).expand_as(scores)
    zeros = scores.new_zeros(csr.num_rows, scores.size(1))
    if grad is not None:
        total = zeros.scatter_add(0, index, scores * grad).gather(0, index)
        return scores * (grad - total)
    most = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    result = (scores - most.gather(0, index)).exp()
    return result / zeros.scatter_add(0, index, result).gather(0, index)


def sampled_spmm(
    csr: CSR, x: Tensor, scale: Tensor | None, weight: Tensor | None, sampling: Sampling
) -> Tensor:
    """Sum at most ``sampling.width`` entries of each row; here in float64, rounded once.

    Args:
        csr: the graph.
        x: [num_cols, H, F]; with a scale, of int8.
        scale: float32 factors of ``x``, [num_cols, 1] or [1, H * F].
        weight: [E, 1 | H], contiguous, by ``csr.eid``.
        sampling: which entries to take, and their factors.

    Returns:
        [num_rows, H, F] of the dtype of ``scale``, or of ``x``.
    """
    dtype = x.dtype if scale is None else scale.dtype
    wide = x.double()
    if scale is not None:
        wide = (wide.flatten(1) * scale).view(x.shape)
    sample = take(csr, sampling)
    message = wide[sample.col.long()]
    if weight is not None:
        eid = sample.entry if csr.eid is None else csr.eid[sample.entry].long()
        message = message * weight[eid].unsqueeze(-1)
    factors = edge_factors(csr, sample, sampling)
    if factors is not None:
        message = message * factors.view(-1, 1, 1)
    out = message.new_zeros(csr.num_rows, *x.shape[1:])
    return out.index_add_(0, sample.row, message).to(dtype)


def segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows ptr[r] to ptr[r + 1] of x [N, K] by weight[r], [K, M]; ptr is on the CPU."""
    out, sizes = x.new_empty(x.size(0), weight.size(2)), ptr.diff().tolist()
    for rows, matrix, result in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def segment_outer(x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
    """Return ``x[segment].T @ y[segment]`` of every segment, [R, K, M]; ptr is on the CPU."""
    sizes = ptr.diff().tolist()
    parts = zip(x.split(sizes), y.split(sizes), strict=True)
    products = [left.t() @ right for left, right in parts]
    return torch.stack(products) if products else x.new_zeros(0, x.size(1), y.size(1))


def _reduce(message: Tensor, row: Tensor, eid: Tensor, num_rows: int, reduce: str) -> Tensor:
    if reduce == "none":
        return torch.empty_like(message).index_copy_(0, eid, message)
    if reduce == "sqsum":
        message = message * message
    name = {"sqsum": "sum", "max": "amax", "min": "amin"}.get(reduce, reduce)
    start = message.new_ones if reduce == "prod" else message.new_zeros
    out = start(num_rows, *message.shape[1:])
    index = row.view(-1, 1, 1).expand_as(message)
    return out.scatter_reduce_(0, index, message, name, include_self=reduce == "prod")


def _winners(message: Tensor, out: Tensor, row: Tensor, winner: Tensor) -> Tensor:
    """Return the first entry of each row that is its maximum or minimum."""
    best = out.index_select(0, row)
    wins = (message == best) | (message.isnan() & best.isnan())
    entries = message.size(0)
    slot = torch.arange(entries, device=row.device).view(-1, 1, 1).expand_as(message)
    slot = torch.where(wins, slot, entries)
    first = slot.new_full(out.shape, entries)
    index = row.view(-1, 1, 1).expand_as(slot)
    first.scatter_reduce_(0, index, slot, "amin")
    padded = torch.cat([winner, winner.new_full((1,), -1)])
    return padded[first]


_OPERATORS = (
    gspmm, gspmm_several, edge_passes, scatter_arg, edge_softmax, attention, attention_backward,
    sampled_spmm, maxk, cbsr_spmm, sspmm, cbsr_dot,
)  # fmt: skip
REFERENCE = Backend(
    "reference",
    table({run.__name__: run for run in _OPERATORS})
    | table({run.__name__: run for run in (segment_matmul, segment_outer)},
            lambda spec: segment_seconds(spec, "reference")),
)  # fmt: skip
