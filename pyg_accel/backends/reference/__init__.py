"""The reference backend: plain torch, any dtype and device, messages written out in full.

It is slow and uses E x F memory. It is what the others are tested against, in float64.
"""

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Backend, winners_are_columns
from pyg_accel.backends.reference import attention, cbsr
from pyg_accel.backends.reference.messages import evaluate, places_of
from pyg_accel.backends.sampling import Sampling, edge_factors, take
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR, ptr2index

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Plain torch."""

    name = "reference"

    def unavailable_reasons(self) -> list[str]:
        """It is always there."""
        return []

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """It can do everything."""
        return []

    def cost(self, spec: OpSpec) -> float:
        """Well above any other: several passes over E x F memory."""
        return 1.0 + 1e-8 * spec.num_edges * spec.heads * spec.width

    def gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm`."""
        dtype = next(t.dtype for t in operands if t.is_floating_point())
        if dtype.itemsize == 2:  # 16-bit features are computed in fp32 and rounded once
            wide = [t.float() if t.is_floating_point() else t for t in operands]
            outs = self.gspmm(csr, formula, wide, reduces, want_arg=want_arg)
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
        self, csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm_several`."""
        results = []
        for formula, reduce in zip(formulas, reduces, strict=True):
            results += self.gspmm(csr, formula, operands, [reduce], want_arg=False)
        return results

    def scatter_arg(self, grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
        """See :meth:`Backend.scatter_arg`."""
        out = grad.new_zeros(num_cols + 1, grad.size(1))
        index = torch.where(arg < 0, num_cols, arg.long())  # winners of empty rows go overboard
        return out.scatter_add_(0, index, grad)[:-1]

    def edge_softmax(self, csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
        """See :meth:`Backend.edge_softmax`."""
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

    def attention(
        self, csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.attention`."""
        return attention.run(csr, score, value, operands)

    def attention_backward(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_backward`."""
        return attention.gradients(csr, call, "u")

    def attention_targets(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_targets`."""
        return attention.gradients(csr, call, "v")

    def sampled_spmm(
        self,
        csr: CSR,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor | None,
        sampling: Sampling,
        seed: Tensor | None,
    ) -> Tensor:
        """See :meth:`Backend.sampled_spmm`; in float64, rounded once."""
        dtype = x.dtype if scale is None else scale.dtype
        wide = x.double()
        if scale is not None:
            wide = (wide.flatten(1) * scale).view(x.shape)
        sample = take(csr, sampling, seed)
        message = wide[sample.col.long()]
        if weight is not None:
            eid = sample.entry if csr.eid is None else csr.eid[sample.entry].long()
            message = message * weight[eid].unsqueeze(-1)
        factors = edge_factors(csr, sample, sampling)
        if factors is not None:
            message = message * factors.view(-1, 1, 1)
        out = message.new_zeros(csr.num_rows, *x.shape[1:])
        return out.index_add_(0, sample.row, message).to(dtype)

    def segment_matmul(self, x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`Backend.segment_matmul`."""
        parts = zip(x.split(ptr.diff().tolist()), weight, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in parts] or [x @ weight.sum(0)])

    def segment_outer(self, x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
        """See :meth:`Backend.segment_outer`."""
        sizes = ptr.diff().tolist()
        parts = zip(x.split(sizes), y.split(sizes), strict=True)
        products = [left.t() @ right for left, right in parts]
        return torch.stack(products) if products else x.new_zeros(0, x.size(1), y.size(1))

    def maxk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Backend.maxk`."""
        return cbsr.maxk(x, k)

    def cbsr_spmm(
        self,
        csr: CSR,
        values: Tensor,
        indices: Tensor,
        width: int,
        weight: Tensor | None,
        reduce: str,
    ) -> Tensor:
        """See :meth:`Backend.cbsr_spmm`."""
        return cbsr.spmm(csr, values, indices, width, weight, reduce)

    def sspmm(
        self, csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None
    ) -> Tensor:
        """See :meth:`Backend.sspmm`."""
        return cbsr.sspmm(csr, x, indices, weight)

    def cbsr_dot(self, csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_dot`."""
        return cbsr.dot(csr, values, indices, x)

    def cbsr_mm(self, values: Tensor, indices: Tensor, width: int, dense: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_mm`."""
        return cbsr.mm(values, indices, width, dense)

    def cbsr_sddmm(self, x: Tensor, indices: Tensor, dense: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_sddmm`."""
        return cbsr.sddmm(x, indices, dense)

    def cbsr_mm_t(self, values: Tensor, indices: Tensor, width: int, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_mm_t`."""
        return cbsr.mm_t(values, indices, width, x)


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
    """The first entry of each row that holds its maximum or minimum."""
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
