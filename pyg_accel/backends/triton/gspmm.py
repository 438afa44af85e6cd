"""Launches generated kernels: which recipe, which tiles, how many programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import winners_are_columns
from pyg_accel.backends.triton import gather
from pyg_accel.backends.triton.codegen import combine_kernel, kernel
from pyg_accel.backends.triton.expression import index_operands
from pyg_accel.backends.triton.kernel_set import KernelSet
from pyg_accel.backends.triton.launch import (
    INTERPRETED,
    Device,
    Tile,
    choose_tile,
    combine_tile,
    device_of,
    piece_tile,
)
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.backends.triton.recipe import Recipe, states_of
from pyg_accel.backends.triton.schedule import Pieces, schedule_of
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    Sum,
    Unary,
    has_sum,
    map_operands,
    operands_of,
    shape_of,
)
from pyg_accel.graph import CSR

__all__ = ["OperandShape", "device_facts", "operand_shape", "run"]

_INT32_ENTRIES = 2**31 - 2**16  # positions past the end of a row must not overflow either


def run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """See :meth:`pyg_accel.backends.Backend.gspmm`."""
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    by_column = winners_are_columns(formula, reduces)
    operands = list(operands)
    if isinstance(formula, Sum) and reduces == ["none"]:
        inner = _without_sums(csr, formula.arg, operands, {})
        heads, width = _extent(inner, operands)
        if width != 1:
            return [_dot(csr, inner, operands, (heads, width), dtype)]
        formula = inner
    elif has_sum(formula):
        formula = _without_sums(csr, formula, operands, {})
    return _reduce(csr, formula, operands, tuple(reduces), want_arg, by_column, dtype)


def device_facts(tensor: Tensor) -> Device:
    """Return what the division of work asks of a tensor's device."""
    return device_of(tensor.device.index) if tensor.is_cuda else INTERPRETED


def _without_sums(
    csr: CSR, formula: Formula, operands: list[Tensor], seen: dict[Formula, Formula]
) -> Formula:
    """Compute the sums over the width inside a formula, E x H each; append them to the operands."""

    def change(part: Formula) -> Formula:
        return _without_sums(csr, part, operands, seen)

    match formula:
        case Sum(arg=arg) if formula not in seen:
            inner = change(arg)
            heads, width = _extent(inner, operands)
            if width == 1:
                return inner
            dtype = _accumulate_dtype(operands)
            operands.append(_dot(csr, inner, operands, (heads, width), dtype))
            seen[formula] = Operand("e", len(operands) - 1)
            return seen[formula]
        case Sum():
            return seen[formula]
        case Unary(op=op, arg=arg, value=value):
            return Unary(op, change(arg), value)
        case Binary(op=op, left=left, right=right):
            return Binary(op, change(left), change(right))
    return formula


def _extent(formula: Formula, operands: list[Tensor]) -> tuple[int, int]:
    """(heads, width) of what a formula without sums computes."""
    return _extent_of(formula, tuple((t.size(1), t.size(2)) for t in operands))


@lru_cache(maxsize=4096)
def _extent_of(formula: Formula, shapes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    sizes = dict(enumerate(shapes))
    heads, width = shape_of(formula, sizes)
    for o in operands_of(formula):  # the winners that `sel` reads
        h, f = sizes[o.index]
        heads, width = h if heads == 1 else heads, f if width == 1 else width
    return heads, width


def _accumulate_dtype(operands: Sequence[Tensor]) -> torch.dtype:
    wide = any(t.dtype == torch.float64 for t in operands)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True, slots=True)
class OperandShape:
    """The part of an operand that a kernel's text depends on."""

    kind: str
    unit: int
    near: bool
    itemsize: int


@lru_cache(maxsize=4096)
def _renumbered(formula: Formula) -> tuple[Formula, tuple[int, ...], frozenset[str]]:
    """A formula over the operands that it uses, their indices, and facts about it."""
    used = tuple(dict.fromkeys(o.index for o in operands_of(formula)))
    facts = {o.side for o in operands_of(formula)}
    if index_operands(formula):
        facts.add("sel")
    changed = map_operands(formula, lambda o: Operand(o.side, used.index(o.index)))
    return changed, used, frozenset(facts)


def operand_shape(t: Tensor, heads: int, width: int) -> OperandShape:
    """Return how a kernel reads an operand whose message has so many heads and columns."""
    own, size, stride = (t.size(1), t.size(2)), t.element_size(), t.stride(0)
    near = t.size(0) * stride + heads * width < _INT32_ENTRIES
    if own == (1, 1):
        return OperandShape("number", 0 if stride == 1 else 1, near, size)
    if own == (heads, width):
        kind = "full"
    elif own == (heads, 1):
        return OperandShape("head", 1, near, size)
    else:
        kind = "feature"
    unit = max(16 // size, 1)
    while stride % unit:
        unit //= 2
    return OperandShape(kind, unit, near, size)


@lru_cache(maxsize=4096)
def _recipe(
    formula: Formula,
    shapes: tuple[OperandShape, ...],
    reduces: tuple[str, ...],
    winners: str,
    extent: tuple[int, int],
    graph: tuple[int, int, int],
    facts: tuple[bool, str, str],
    device: Device,
    dot: bool,
) -> "_Kernels":
    """The kernels for a graph of so many (rows, columns, entries)."""
    heads, width = extent
    numbered, accumulate, position = facts
    sides = {o.index: o.side for o in operands_of(formula)}
    moving = [i for i, s in enumerate(shapes) if s.kind in ("full", "feature") and sides[i] != "v"]
    gathers = max(len(moving), 1)
    resident = sum(sides[i] == "u" for i in moving)
    itemsize = max((shapes[i].itemsize for i in moving or range(len(shapes))), default=4)
    states = states_of(reduces, winners)
    columns = width if dot else heads * width
    kept = max(len(states), 1)
    tile = choose_tile(device, *graph, columns, itemsize, gathers, resident, kept, dot)
    kinds, units, near = zip(*((s.kind, s.unit, s.near) for s in shapes), strict=True)
    unit = max(16 // min(s.itemsize for s in shapes), 1)
    while width % unit:
        unit //= 2
    head_of_tile = "one" if dot or heads == 1 or width % tile.columns == 0 else "mixed"
    adds = dot and columns > tile.columns
    if dot and not adds and heads > 1 and width < 64 and width & (width - 1) == 0:
        head_of_tile, unit, columns = "whole", width, heads * width
        tile = _widened(tile, min(1 << (heads - 1).bit_length(), max(64 // tile.columns, 1)))
    recipe = Recipe(
        formula=formula, kinds=kinds, aligned=units, near=near, reduces=reduces, winners=winners,
        tile=tile, tasks="rows", hubs=False, numbered=numbered, heads=head_of_tile, columns=unit,
        even=columns % tile.columns == 0, dot=dot, adds=adds, accumulate=accumulate,
        position=position,
    )  # fmt: skip
    return _Kernels(recipe, gathers, itemsize)


def _widened(tile: Tile, times: int) -> Tile:
    """A tile with more columns and fewer edges."""
    columns = tile.columns * times
    if tile.rows == 1:
        return replace(tile, columns=columns, lanes=max(tile.lanes // times, 1))
    return replace(tile, columns=columns, rows=max(tile.rows // times, 1))


class _Kernels(KernelSet[Recipe]):
    """The kernels of a formula."""

    def __init__(self, recipe: Recipe, gathers: int, itemsize: int) -> None:
        whole = replace(recipe, tile=combine_tile(recipe.tile))
        pieces = piece_tile(recipe.tile, itemsize, gathers)
        super().__init__(recipe, pieces, whole, kernel, combine_kernel)
        self.states = states_of(recipe.reduces, recipe.winners)
        self._facts = (gathers, itemsize)
        self._plain: _Kernels | None = None

    def plain(self) -> "_Kernels":
        """The same for entries without numbers of their own."""
        if self._plain is None:
            self._plain = _Kernels(replace(self.recipe, numbered=False), *self._facts)
        return self._plain


@dataclass(frozen=True)
class _Call:
    """One pass over a graph: what the launches of its rows, pieces and combinations share."""

    csr: CSR
    kernels: _Kernels
    operands: list[Tensor]
    outs: list[Tensor]
    winners: list[Tensor]
    columns: int
    width: int
    slices: int

    def go(self, part: int = 0) -> None:
        """Launch."""
        csr, kernels, tile = self.csr, self.kernels, self.kernels.recipe.tile
        schedule = schedule_of(
            csr.rowptr, csr.col.numel(), tile.split, tile.piece, ordered=tile.rows > 1
        )
        pieces, order = schedule.pieces, schedule.order
        rows = kernels.rows("rows" if order is None else "order", pieces is not None)
        stored = [*self.outs, *self.winners]
        self._launch(rows, tile, csr.num_rows, (order, None, None), stored, part)
        if pieces is None:
            return
        recipe = kernels.recipe
        accumulate, position = getattr(torch, recipe.accumulate), getattr(torch, recipe.position)
        count, size = pieces.row.numel(), self.columns * recipe.columns
        raw = [
            csr.col.new_empty((count, size), dtype=position if s.endswith("_at") else accumulate)
            for s in kernels.states
        ]
        direct = [out for out, r in zip(self.outs, recipe.reduces, strict=True) if r == "none"]
        where = (pieces.row, pieces.begin, pieces.end)
        self._launch(kernels.pieces(), kernels.piece_tile, count, where, [*raw, *direct], part)
        if raw:
            self._combine(pieces, raw)

    def _launch(
        self,
        function: Any,
        tile: Tile,
        tasks: int,
        where: tuple[Tensor | None, Tensor | None, Tensor | None],
        stored: list[Tensor],
        part: int,
    ) -> None:
        csr, recipe = self.csr, self.kernels.recipe
        arguments: list[Any] = [csr.rowptr, csr.col, csr.eid if recipe.numbered else None, *where]
        for t, unit in zip(self.operands, recipe.aligned, strict=True):
            arguments += [t, t.stride(0) // max(unit, 1)]
        arguments += [*stored, tasks, self.columns, self.width, part, tile.split]
        launch(function, (-(-tasks // tile.rows), self.slices), arguments, warps=tile.warps)

    def _combine(self, pieces: Pieces, raw: list[Tensor]) -> None:
        csr = self.csr
        eid = csr.eid if self.kernels.recipe.numbered else None
        arguments: list[Any] = [csr.rowptr, csr.col, eid, pieces.rows]
        arguments += [pieces.first, *raw, *self.outs, *self.winners, self.columns]
        launch(self.kernels.combine(), (pieces.rows.numel(), self.slices), arguments)


def _call(
    csr: CSR,
    formula: Formula,
    operands: list[Tensor],
    reduces: tuple[str, ...],
    winners: str,
    extent: tuple[int, int],
    dot: bool,
) -> Callable[..., _Call]:
    """Everything but the results."""
    formula, used, sides = _renumbered(formula)
    operands = [operands[i] for i in used]
    heads, width = extent
    shapes = tuple(operand_shape(t, heads, width) for t in operands)
    numbered = csr.eid is not None and ("e" in sides or "sel" in sides or "none" in reduces
                                        or winners == "at")  # fmt: skip
    entries = csr.col.numel()
    wide = csr.rowptr.dtype == torch.int64 or entries >= _INT32_ENTRIES
    accumulate = str(_accumulate_dtype(operands)).removeprefix("torch.")
    facts = (numbered, accumulate, "int64" if wide else "int32")
    graph = (csr.num_rows, csr.num_cols, entries)
    kernels = _recipe(formula, shapes, reduces, winners, extent, graph, facts,
                      device_facts(csr.rowptr), dot)  # fmt: skip
    recipe = kernels.recipe
    columns = heads * width // recipe.columns
    slices = -(-(heads * width) // recipe.tile.columns)
    if dot:
        columns = heads
        slices = -(-heads * width // recipe.tile.columns) if recipe.heads == "whole" else heads
    elif slices > 1 and csr.eid is not None and numbered and _only_weights(
        formula, shapes, sides, reduces, winners
    ):  # fmt: skip
        # Each slice would fetch every weight from where its edge lies: do that once.
        order = csr.eid
        operands = [
            gather.run(t, order) if s.kind in ("number", "head") else t
            for t, s in zip(operands, shapes, strict=True)
        ]
        kernels = kernels.plain()
    inner = 1 if recipe.heads == "whole" else width // recipe.columns
    return lambda outs, args: _Call(csr, kernels, operands, outs, args, columns, inner, slices)


def _only_weights(
    formula: Formula,
    shapes: tuple[OperandShape, ...],
    sides: frozenset[str],
    reduces: tuple[str, ...],
    winners: str,
) -> bool:
    """Whether edge numbers are used for nothing but narrow edge operands, and all narrow are."""
    if "sel" in sides or "none" in reduces or winners == "at":
        return False
    return all(
        (o.side == "e") == (shapes[o.index].kind in ("number", "head"))
        for o in operands_of(formula)
    )


def _reduce(
    csr: CSR,
    formula: Formula,
    operands: list[Tensor],
    reduces: tuple[str, ...],
    want_arg: bool,
    by_column: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    extent = _extent(formula, operands)
    rows, entries = csr.num_rows, csr.col.numel()
    device = csr.rowptr.device
    outs = [
        torch.empty((entries if r == "none" else rows, *extent), dtype=dtype, device=device)
        for r in reduces
    ]
    args = [csr.col.new_empty((rows, *extent))
            for r in reduces if want_arg and r in ("max", "min")]  # fmt: skip
    if rows and extent[0] * extent[1]:
        winners = ("col" if by_column else "at") if args else ""
        _call(csr, formula, operands, reduces, winners, extent, dot=False)(outs, args).go()
    return outs + args


def _dot(
    csr: CSR,
    formula: Formula,
    operands: list[Tensor],
    extent: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Messages summed over the width, [E, H, 1]."""
    heads, width = extent
    shape, device = (csr.col.numel(), heads, 1), csr.rowptr.device
    if width == 0 or 0 in shape or csr.num_rows == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    prepare = _call(csr, formula, operands, ("none",), "", extent, dot=True)
    call = prepare([], [])
    if not call.kernels.recipe.adds:
        out = torch.empty(shape, dtype=dtype, device=device)
        replace(call, outs=[out]).go()
        return out
    # One part of the width after the other: its features stay in cache while all edges read them.
    total = torch.zeros(shape, dtype=_accumulate_dtype(operands), device=device)
    call = replace(call, outs=[total])
    for part in range(-(-width // call.kernels.recipe.tile.columns)):
        call.go(part)
    return total.to(dtype)
