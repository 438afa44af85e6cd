"""Launches reductions of one formula over the rows of a graph."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_accel.backends.base import Launch, winners_are_columns
from pyg_accel.backends.edges import Output
from pyg_accel.backends.triton.padding import cut, fill, rows_to_pad
from pyg_accel.backends.triton.plan import accumulate_dtype, extent_of
from pyg_accel.backends.triton.rows import RowPass
from pyg_accel.backends.triton.sequence import Sequence
from pyg_accel.formula import Formula, Operand, Sum, has_sum, map_children
from pyg_accel.graph import CSR

__all__ = ["bind", "run"]


def run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Run a single call; sums over the width inside of a formula are computed first."""
    if has_sum(formula):
        operands = list(operands)
        if isinstance(formula, Sum) and reduces == ["none"]:
            formula = _without_sums(csr, formula.arg, operands, {})
            if _width(formula, operands) != 1:
                dtype = next(t.dtype for t in operands if t.is_floating_point())
                return [_dot(csr, formula, operands, dtype)]
        else:
            formula = _without_sums(csr, formula, operands, {})
    return bind(csr, formula, operands, reduces, want_arg=want_arg)(csr)(operands)


def bind(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> Callable[[CSR], Launch]:
    """Return a function that launches similar calls."""
    if has_sum(formula):
        return lambda csr: Launch(
            lambda operands: run(csr, formula, operands, reduces, want_arg=want_arg), listed=True
        )
    summed = "none" not in reduces
    if summed and (wide := rows_to_pad([formula], operands, csr.col.numel(), csr.num_rows)):
        return _bind_padded(csr, formula, operands, reduces, wide, want_arg=want_arg)
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    extremes = sum(r in ("max", "min") for r in reduces) if want_arg else 0
    by_column = want_arg and winners_are_columns(formula, reduces)
    heads, width = extent_of(formula, tuple(t.shape for t in operands))
    outputs = [Output(formula, "v", (heads, width), reduce) if reduce != "none"
               else Output(formula, "e", (heads, width)) for reduce in reduces]  # fmt: skip
    winners = ("col" if by_column else "at") if extremes else ""
    go, count = RowPass(csr, outputs, operands, winners=winners), len(operands)

    def on(csr: CSR) -> Launch:
        sequence = Sequence(count, csr.rowptr.device)
        rows = {"v": csr.num_rows, "e": csr.col.numel()}
        outs = [sequence.result((rows[o.side], heads, width), dtype) for o in outputs]
        args = [sequence.result((rows["v"], heads, width), csr.col.dtype) for _ in range(extremes)]
        if rows["v"] and heads * width:
            go.append_to(sequence, csr, sequence.operands, outs, args)
        return Launch(sequence, listed=True)

    return on


def _bind_padded(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], wide: list[int], *,
    want_arg: bool,
) -> Callable[[CSR], Launch]:  # fmt: skip
    """Return a function that makes the call on padded features, and drops the padding."""
    width = operands[wide[0]].size(2)
    bound = bind(csr, formula, fill(operands, wide), reduces, want_arg=want_arg)

    def on(csr: CSR) -> Launch:
        go = bound(csr)
        return Launch(lambda t: [cut(out, width) for out in go(fill(t, wide))], listed=True)

    return on


def _without_sums(
    csr: CSR, formula: Formula, operands: list[Tensor], replaced: dict[Formula, Formula]
) -> Formula:
    """Compute the sums over the width inside a formula, E x H each; append them to the operands."""
    if formula in replaced:
        return replaced[formula]
    changed = map_children(formula, lambda part: _without_sums(csr, part, operands, replaced))
    if not isinstance(changed, Sum):
        return changed
    if _width(changed.arg, operands) == 1:
        return changed.arg
    dtype = accumulate_dtype(tuple(t.dtype for t in operands))
    operands.append(_dot(csr, changed.arg, operands, dtype))
    replaced[formula] = Operand("e", len(operands) - 1)
    return replaced[formula]


def _width(formula: Formula, operands: list[Tensor]) -> int:
    return extent_of(formula, tuple(t.shape for t in operands))[1]


def _dot(csr: CSR, formula: Formula, operands: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Messages summed over the width, [E, H, 1]."""
    heads, width = extent_of(formula, tuple(t.shape for t in operands))
    shape, device = (csr.col.numel(), heads, 1), csr.rowptr.device
    if width == 0 or 0 in shape or csr.num_rows == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    go = RowPass(csr, [Output(formula, "e", (heads, 1))], operands)
    sequence = Sequence(len(operands) + 1, device)
    *slots, total = sequence.operands
    if not go.recipe.adds:
        out = torch.empty(shape, dtype=dtype, device=device)
        go.append_to(sequence, csr, slots, [total])
        sequence([*operands, out])
        return out
    # One part of the width after the other: its features stay in cache while all edges read them.
    wide = accumulate_dtype(tuple(t.dtype for t in operands))
    out = torch.zeros(shape, dtype=wide, device=device)
    for part in range(go.recipe.slices):
        go.append_to(sequence, csr, slots, [total], part=part)
    sequence([*operands, out])
    return out.to(dtype)
