"""Launches generated kernels: what a plan says, on the tensors of a call."""

from collections.abc import Callable, Sequence

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
    go = _Pass(plan, operands)

    def reduce(csr: CSR, operands: list[Tensor]) -> list[Tensor]:
        rows, entries, device = csr.num_rows, csr.col.numel(), csr.rowptr.device
        outs = [
            torch.empty((entries if each else rows, heads, width), dtype=dtype, device=device)
            for each in by_edge
        ]
        args = [csr.col.new_empty((rows, heads, width)) for _ in range(extremes)]
        if rows and heads * width:
            go(csr, operands, outs, args)
        return outs + args

    return lambda csr: Launch(reduce, (csr,), listed=True)


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
    go = _Pass(plan, operands)
    if not plan.kernels.recipe.adds:
        out = torch.empty(shape, dtype=dtype, device=device)
        go(csr, operands, [out], [])
        return out
    # One part of the width after the other: its features stay in cache while all edges read them.
    wide = accumulate_dtype(tuple(t.dtype for t in operands))
    total = torch.zeros(shape, dtype=wide, device=device)
    for part in range(-(-width // plan.kernels.recipe.tile.columns)):
        go(csr, operands, [total], [], part)
    return total.to(dtype)


class _Pass:
    """Launches a plan: its rows, and the pieces of those that are too long.

    Args:
        plan: of the pass.
        operands: like those of every call, in dtypes, strides and trailing sizes.
    """

    def __init__(self, plan: Plan, operands: Sequence[Tensor]) -> None:
        self._plan = plan
        recipe = plan.kernels.recipe
        self._units = [max(unit, 1) for unit in recipe.aligned]
        self._strides = [
            operands[i].stride(0) // unit for i, unit in zip(plan.used, self._units, strict=True)
        ]
        self._tasks = Tasks(plan.kernels, plan.slices)
        types = {True: getattr(torch, recipe.position), False: getattr(torch, recipe.accumulate)}
        states = states_of(recipe.reduces, recipe.winners)
        size = plan.columns * recipe.columns
        self._raw = [(size, types[state.endswith("_at")]) for state in states]

    def __call__(
        self,
        csr: CSR,
        operands: Sequence[Tensor],
        outs: list[Tensor],
        winners: list[Tensor],
        part: int = 0,
    ) -> None:
        """Launch it.

        Args:
            csr: the graph.
            operands: of the formula.
            outs: where the results go.
            winners: where those of maxima and minima go.
            part: of the width, in sums that take several passes.
        """
        plan, recipe = self._plan, self._plan.kernels.recipe
        read = [operands[i] for i in plan.used]
        strides = self._strides
        if plan.gathered:
            assert csr.eid is not None, "entries are numbered where something is gathered"
            read = [
                gather.run(t, csr.eid) if first else t
                for t, first in zip(read, plan.gathered, strict=True)
            ]
            strides = [t.stride(0) // unit for t, unit in zip(read, self._units, strict=True)]
        stored = [*outs, *winners]
        self._tasks(
            csr, [*zip(read, strides, strict=True)], stored, (plan.columns, plan.width, part),
            direct=[out for out, r in zip(outs, recipe.reduces, strict=True) if r == "none"],
            raw=self._raw, before=(csr.rowptr, csr.col, csr.eid if recipe.numbered else None),
            after=(*stored, plan.columns),
        )  # fmt: skip
