"""Launches generated kernels: what a plan says, on the tensors of a call."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from pyg_accel.backends.base import Launch, winners_are_columns
from pyg_accel.backends.triton import gather
from pyg_accel.backends.triton.kernel_set import Tasks
from pyg_accel.backends.triton.padding import cut, fill, rows_to_pad
from pyg_accel.backends.triton.plan import (
    Plan,
    accumulate_dtype,
    extent_of,
    graph_facts,
    make_plan,
    seen,
)
from pyg_accel.backends.triton.recipe import states_of
from pyg_accel.backends.triton.sequence import Sequence, Slot
from pyg_accel.formula import Formula, Operand, Sum, has_sum, map_children
from pyg_accel.graph import CSR

__all__ = ["run"]


def run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Run a call by itself; sums over the width that are inside a formula are computed first."""
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
    """Return what launches calls like this one."""
    if has_sum(formula):
        return lambda csr: Launch(
            lambda given: run(csr, formula, given, reduces, want_arg=want_arg), listed=True
        )
    summed = "none" not in reduces
    if summed and (wide := rows_to_pad([formula], operands, csr.col.numel(), csr.num_rows)):
        return _bind_padded(csr, formula, operands, reduces, wide, want_arg=want_arg)
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    extremes = sum(r in ("max", "min") for r in reduces) if want_arg else 0
    by_column = want_arg and winners_are_columns(formula, reduces)
    winners = ("col" if by_column else "at") if extremes else ""
    plan = make_plan(
        formula, tuple(map(seen, operands)), tuple(reduces), winners, graph_facts(csr), False
    )
    heads, width = plan.extent
    by_edge = [reduce == "none" for reduce in reduces]
    go, count = _Pass(plan, operands), len(operands)

    def on(csr: CSR) -> Launch:
        sequence = Sequence(count, csr.rowptr.device)
        rows, entries = csr.num_rows, csr.col.numel()
        outs = [sequence.result((entries if each else rows, heads, width), dtype)
                for each in by_edge]  # fmt: skip
        args = [sequence.result((rows, heads, width), csr.col.dtype) for _ in range(extremes)]
        if rows and heads * width:
            go.append_to(sequence, csr, sequence.operands, outs, args)
        return Launch(sequence, listed=True)

    return on


def _bind_padded(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], wide: list[int], *,
    want_arg: bool,
) -> Callable[[CSR], Launch]:  # fmt: skip
    """Return what makes the call on padded features, and returns its own columns."""
    width = operands[wide[0]].size(2)
    bound = bind(csr, formula, fill(operands, wide), reduces, want_arg=want_arg)

    def on(csr: CSR) -> Launch:
        go = bound(csr)
        return Launch(lambda t: [cut(out, width) for out in go(fill(t, wide))], listed=True)

    return on


def _without_sums(
    csr: CSR, formula: Formula, operands: list[Tensor], found: dict[Formula, Formula]
) -> Formula:
    """Compute the sums over the width inside a formula, E x H each; append them to the operands."""
    if formula in found:
        return found[formula]
    changed = map_children(formula, lambda part: _without_sums(csr, part, operands, found))
    if not isinstance(changed, Sum):
        return changed
    if _width(changed.arg, operands) == 1:
        return changed.arg
    dtype = accumulate_dtype(tuple(t.dtype for t in operands))
    operands.append(_dot(csr, changed.arg, operands, dtype))
    found[formula] = Operand("e", len(operands) - 1)
    return found[formula]


def _width(formula: Formula, operands: list[Tensor]) -> int:
    return extent_of(formula, tuple(t.shape for t in operands))[1]


def _dot(csr: CSR, formula: Formula, operands: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Messages summed over the width, [E, H, 1]."""
    heads, width = extent_of(formula, tuple(t.shape for t in operands))
    shape, device = (csr.col.numel(), heads, 1), csr.rowptr.device
    if width == 0 or 0 in shape or csr.num_rows == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    plan = make_plan(formula, tuple(map(seen, operands)), ("none",), "", graph_facts(csr), True)
    go, sequence = _Pass(plan, operands), Sequence(len(operands) + 1, device)
    *slots, total = sequence.operands
    if not plan.kernels.recipe.adds:
        out = torch.empty(shape, dtype=dtype, device=device)
        go.append_to(sequence, csr, slots, [total], [])
        sequence([*operands, out])
        return out
    # One part of the width after the other: its features stay in cache while all edges read them.
    wide = accumulate_dtype(tuple(t.dtype for t in operands))
    out = torch.zeros(shape, dtype=wide, device=device)
    for part in range(-(-width // plan.kernels.recipe.tile.columns)):
        go.append_to(sequence, csr, slots, [total], [], part)
    sequence([*operands, out])
    return out.to(dtype)


class _Pass:
    """The launches of a plan: of its rows, and of the pieces of those that are too long.

    Args:
        plan: of the pass.
        operands: like those of every call, in dtypes, strides and trailing sizes.
    """

    def __init__(self, plan: Plan, operands: SequenceOf[Tensor]) -> None:
        self._plan = plan
        recipe = plan.kernels.recipe
        read = [operands[i] for i in plan.used]
        self._read = [(t.dtype, t.size(1), t.stride(0)) for t in read]
        self._gathers = [gather.gather_of(t.size(1)) if first else None
                         for t, first in zip(read, plan.gathered, strict=False)]  # fmt: skip
        self._units = [max(unit, 1) for unit in recipe.aligned]
        self._tasks = Tasks(plan.kernels, plan.slices)
        types = {True: getattr(torch, recipe.position), False: getattr(torch, recipe.accumulate)}
        states = states_of(recipe.reduces, recipe.winners)
        size = plan.columns * recipe.columns
        self._raw = [(size, types[state.endswith("_at")]) for state in states]

    def append_to(
        self,
        sequence: Sequence,
        csr: CSR,
        operands: SequenceOf[Slot],
        outs: list[Slot],
        winners: list[Slot],
        part: int = 0,
    ) -> None:
        """Append them.

        Args:
            sequence: to append to.
            csr: the graph.
            operands: of the formula.
            outs: where the results go.
            winners: where those of maxima and minima go.
            part: of the width, in sums that take several passes.
        """
        plan, recipe = self._plan, self._plan.kernels.recipe
        read = []
        gathers = self._gathers or [None] * len(plan.used)
        for i, kernel, unit, (dtype, heads, stride) in zip(
            plan.used, gathers, self._units, self._read, strict=True
        ):
            slot = operands[i]
            if kernel is not None:
                assert csr.eid is not None, "entries are numbered where something is gathered"
                slot = sequence.scratch((csr.eid.numel(), heads, 1), dtype)
                gather.append_to(sequence, kernel, operands[i], stride, csr.eid, slot, heads)
                stride = heads
            read.append((slot, stride // unit))
        stored = [*outs, *winners]
        self._tasks.append_to(
            sequence, csr, read, stored, (plan.columns, plan.width, part),
            direct=[out for out, r in zip(outs, recipe.reduces, strict=True) if r == "none"],
            raw=self._raw, before=(csr.rowptr, csr.col, csr.eid if recipe.numbered else None),
            after=(*stored, plan.columns),
        )  # fmt: skip
