"""Launches attention, and several formulas at once: which recipe, which tiles."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.backends.triton.attention_codegen import (
    attention_combine_kernel,
    attention_kernel,
    stays_finite,
)
from pyg_accel.backends.triton.kernel_set import KernelSet, Tasks
from pyg_accel.backends.triton.kernels.attention import delta_kernel
from pyg_accel.backends.triton.launch import attention_tile, piece_tile
from pyg_accel.backends.triton.launcher import type_of
from pyg_accel.backends.triton.padding import LONG_ROW, cut, fill, rows_to_pad
from pyg_accel.backends.triton.plan import graph_facts, operand_shape, seen, vector_unit
from pyg_accel.backends.triton.recipe import AttentionRecipe
from pyg_accel.backends.triton.sequence import Kernel, Sequence, Slot
from pyg_accel.cache import Bounded
from pyg_accel.facts import facts_of
from pyg_accel.formula import (
    Formula,
    Sum,
    has_sum,
    map_children,
    operands_of,
    shape_of,
)
from pyg_accel.graph import CSR

__all__ = [
    "bind", "bind_backward", "bind_several", "run", "run_backward", "run_several",
]  # fmt: skip

# Measured on an H200: of 25 edges for each row that is copied, GATConv with rows of 160 bytes gains
# a third, with 1312 bytes it loses 8%, and GATv2Conv and TransformerConv, where the copies are two
# or three, lose up to 20%; of 250 edges all gain or lose nothing.
_SPARSE, _DENSE = 20, 200


def run(csr: CSR, score: Formula, value: Formula, operands: list[Tensor]) -> list[Tensor]:
    """Run a call by itself."""
    found: list[Tensor] = bind(csr, score, value, operands)(csr).bound()(operands)
    return found


def bind(
    csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Go over each row once, with a running maximum of its scores."""
    heads, width = _extent(score, value, shapes_of(operands))
    entries, a_row = csr.col.numel(), _entries_a_copy(score, operands)
    if wide := rows_to_pad([score, value], operands, entries, csr.num_rows, a_row):
        filled = bind(csr, score, value, fill(operands, wide))

        def padded(csr: CSR) -> Launch:
            go = filled(csr).bound()

            def attend(operands: list[Tensor]) -> list[Tensor]:
                out, sums = go(fill(operands, wide))
                return [cut(out, width), sums]

            return Launch(attend, listed=True)

        return padded
    dtype, count = operands[0].dtype, len(operands)
    go = _pass_over(csr, operands, heads, width, (score, value, (), ()))

    def on(csr: CSR) -> Launch:
        sequence, rows = Sequence(count, csr.rowptr.device), csr.num_rows
        out = sequence.result((rows, heads, width), dtype)
        sums = sequence.result((rows, heads), accumulate(dtype))
        if rows and heads * width:
            go.append_to(sequence, csr, sequence.operands, [out, sums], [])
        return Launch(sequence, listed=True)

    return on


def run_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> list[Tensor]:
    """Run several formulas in one pass."""
    found: list[Tensor] = bind_several(csr, formulas, reduces, operands)(csr).bound()(operands)
    return found


def bind_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return what runs several formulas in one pass."""
    bound = _bind_several(csr, formulas, reduces, operands, a_row=_DENSE)
    return lambda csr: Launch(bound(csr), listed=True)


def _bind_several(
    csr: CSR,
    formulas: SequenceOf[Formula],
    reduces: SequenceOf[str],
    operands: list[Tensor],
    infinite: int = -1,
    *,
    a_row: int,
) -> Callable[[CSR], Callable[[list[Tensor]], list[Tensor]]]:
    shapes = shapes_of(operands)
    heads, width = (max(each) for each in zip(*shapes, strict=True))
    if wide := rows_to_pad(formulas, operands, csr.col.numel(), csr.num_rows, a_row):
        filled = fill(operands, wide)
        bound = _bind_several(csr, formulas, reduces, filled, infinite, a_row=a_row)

        def padded(csr: CSR) -> Callable[[list[Tensor]], list[Tensor]]:
            go = bound(csr)
            return lambda operands: [
                cut(out, width) if out.size(2) > width else out for out in go(fill(operands, wide))
            ]

        return padded
    dtype, count = operands[0].dtype, len(operands)
    widths = [_extent_of(formula, shapes)[1] for formula in formulas]
    sums, stores = (
        tuple(f for f, r in zip(formulas, reduces, strict=True) if r == each)
        for each in ("sum", "none")
    )
    recipe = (None, formulas[0], sums, stores)
    go = _pass_over(csr, operands, heads, width, recipe, infinite)

    def on(csr: CSR) -> Callable[[list[Tensor]], list[Tensor]]:
        rows, entries, device = csr.num_rows, csr.col.numel(), csr.col.device
        sequence = Sequence(count, device)
        places = {"sum": list[Slot](), "none": list[Slot]()}
        sizes = []
        for reduce, columns in zip(reduces, widths, strict=True):
            sizes.append((rows if reduce == "sum" else entries, heads, columns))
            places[reduce].append(sequence.result(sizes[-1], dtype))
        if not rows or not heads * width or not entries:
            return lambda operands: [torch.zeros(s, dtype=dtype, device=device) for s in sizes]
        go.append_to(sequence, csr, sequence.operands, places["sum"], places["none"])
        return sequence

    return on


def run_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Run a call by itself."""
    found: list[Tensor] = bind_backward(csr, call)(csr).bound()(call.tensors)
    return found


def bind_backward(csr: CSR, call: AttentionGradient) -> Callable[[CSR], Launch]:
    """Compute weights anew, and add up gradients, in one pass."""
    total = call.total.unsqueeze(-1)
    sums, left = call.formulas()
    reduces = ["sum"] * len(sums) + ["none"] * len(left)
    finite = stays_finite(call.score) and stays_finite(call.value)
    infinite = len(call.operands) + 1 if finite else -1
    bound = _bind_several(
        csr, [*sums, *left], reduces, [*call.operands, call.grad, total, total], infinite,
        a_row=_entries_a_copy(call.score, call.operands),
    )  # fmt: skip
    heads, width = call.out.shape[1:]
    delta = _Delta(heads, width, call.grad.stride(0), call.out.stride(0), call.out.dtype)

    def on(csr: CSR) -> Launch:
        pass_over, delta_of = bound(csr), delta.on(csr)

        def differentiate(tensors: list[Tensor]) -> list[Tensor]:
            *operands, out, total, grad = tensors
            (delta,) = delta_of([grad, out])
            return pass_over([*operands, grad, total.unsqueeze(-1), delta])

        return Launch(differentiate, listed=True)

    return on


def _entries_a_copy(score: Formula, operands: list[Tensor]) -> int:
    """How many edges a row that is copied must have, to gain more by it than the copies take."""
    row = max(t.size(1) * t.size(2) * t.element_size() for t in operands)
    return _DENSE if has_sum(score) or row > LONG_ROW else _SPARSE


class _Delta:
    """The dot products [N, H, 1] of two tensors [N, H, F], with these strides between rows."""

    def __init__(
        self, heads: int, width: int, grad_stride: int, out_stride: int, dtype: torch.dtype
    ) -> None:
        self._sizes, self._strides = (heads, width), (grad_stride, out_stride)
        self._dtype = accumulate(dtype)
        block = 1 << max(width - 1, 0).bit_length()
        self._kernel = Kernel(delta_kernel, 4, ROWS=max(2048 // block, 1), COLUMNS=block,
                              ACC=type_of(self._dtype))  # fmt: skip

    def on(self, csr: CSR) -> Sequence:
        """Return what computes them of the targets of a transposed graph."""
        sequence, nodes, (heads, width) = Sequence(2, csr.col.device), csr.num_cols, self._sizes
        grad, out = sequence.operands
        delta = sequence.result((nodes, heads, 1), self._dtype)
        pairs = (grad, self._strides[0], out, self._strides[1])
        if nodes and heads:
            grid = (-(-nodes * heads // self._kernel.constants["ROWS"]),)
            sequence.launch(self._kernel, grid, (*pairs, delta, nodes, heads, width))
        return sequence


def _extent(score: Formula, value: Formula, shapes: Shapes) -> tuple[int, int]:
    a, b = _extent_of(score, shapes), _extent_of(value, shapes)
    return (b[0] if a[0] == 1 else a[0]), b[1]


@lru_cache(maxsize=4096)
def _extent_of(formula: Formula, shapes: Shapes) -> tuple[int, int]:
    return shape_of(formula, dict(enumerate(shapes)))


def _without_short_sums(formula: Formula, sizes: dict[int, tuple[int, int]]) -> Formula:
    """Leave out sums of a single column."""
    plain = map_children(formula, lambda part: _without_short_sums(part, sizes))
    return plain.arg if isinstance(plain, Sum) and shape_of(plain.arg, sizes)[1] == 1 else plain


# Score and value of attention; or None, formulas that are added up and those that are stored.
Formulas = tuple[Formula | None, Formula, tuple[Formula, ...], tuple[Formula, ...]]


def _kernels(
    csr: CSR,
    operands: list[Tensor],
    heads: int,
    width: int,
    formulas: Formulas,
    infinite: int,
) -> KernelSet[AttentionRecipe]:
    graph, sizes = graph_facts(csr), dict(enumerate(shapes_of(operands)))
    shapes = [operand_shape(seen(t), heads, width) for t in operands]
    score, value, sums, stores = formulas
    widths = tuple(shape_of(f, sizes)[1] > 1 for f in sums)
    score = None if score is None else _without_short_sums(score, sizes)
    value = _without_short_sums(value, sizes)
    sums, stores = (tuple(_without_short_sums(f, sizes) for f in fs) for fs in (sums, stores))
    read = [f for f in (score, value, *sums, *stores) if f is not None]
    sides = {o.index: o.side for f in read for o in operands_of(f)}
    wide = [i for i, side in sides.items() if side != "v" and shapes[i].kind in ("full", "feature")]
    resident = sum(sides[i] == "u" for i in wide)
    itemsize = max((shapes[i].itemsize for i in wide), default=4)
    by_edge = bool(stores) or any(sides[i] == "e" and i not in wide for i in sides)
    tile, block = attention_tile(
        graph.device, *graph[:3], heads, width, itemsize, max(len(wide), 1), resident, by_edge
    )
    kinds, units, near = zip(*((s.kind, s.unit, s.near) for s in shapes), strict=True)
    unit = vector_unit(shapes, width)
    recipe = AttentionRecipe(
        score=score, value=value, sums=sums, widths=widths, stores=stores,
        infinite=infinite, kinds=kinds, aligned=units, near=near, tile=tile, heads=block,
        tasks="rows", hubs=False, unit=unit, even_heads=heads % block == 0,
        numbered=graph.numbered and (bool(stores) or "e" in sides.values()),
        even_width=width == tile.columns,
        accumulate=str(accumulate(operands[0].dtype)).removeprefix("torch."),
        position="int64" if graph.wide else "int32",
    )  # fmt: skip
    whole = replace(tile, columns=tile.columns * block)
    pieces = replace(piece_tile(whole, itemsize, max(len(wide), 1)), columns=tile.columns)
    unroll = max(min(pieces.unroll, tile.unroll * tile.rows), 1)
    return KernelSet(
        recipe, replace(pieces, unroll=unroll), recipe, attention_kernel, attention_combine_kernel
    )


_passes: "Bounded[tuple[Any, ...], _Pass]" = Bounded(4096)


def _pass_over(
    csr: CSR,
    operands: list[Tensor],
    heads: int,
    width: int,
    formulas: Formulas,
    infinite: int = -1,
) -> "_Pass":
    """The pass for calls of a kind: graphs of about one size, operands like these but for rows."""
    kind = facts_of(csr).kind
    key = (
        formulas, heads, width, infinite, kind, csr.eid is None,
        *[(t.dtype, t.stride(0), t.size(1), t.size(2)) for t in operands],
    )  # fmt: skip
    found = _passes.get(key)
    if found is None:
        found = _passes[key] = _Pass(csr, operands, heads, width, formulas, infinite)
    return found


class _Pass:
    """A pass over a graph: what the launches over its rows, pieces and combinations share."""

    def __init__(
        self,
        csr: CSR,
        operands: list[Tensor],
        heads: int,
        width: int,
        formulas: Formulas,
        infinite: int,
    ) -> None:
        kernels = _kernels(csr, operands, heads, width, formulas, infinite)
        self._heads = heads
        recipe = kernels.recipe
        self._width = width // recipe.unit
        self._tasks = Tasks(kernels, -(-heads // recipe.heads))
        dtype = accumulate(operands[0].dtype)
        self._raw = [(heads * (width if wide else 1), dtype) for _, wide in recipe.states]
        self._strides = [
            t.stride(0) // max(unit, 1) for t, unit in zip(operands, recipe.aligned, strict=True)
        ]

    def append_to(
        self,
        sequence: Sequence,
        csr: CSR,
        operands: list[Slot],
        outs: list[Slot],
        left: list[Slot],
    ) -> None:
        """Append its launches.

        Args:
            sequence: to append to.
            csr: the graph.
            operands: of the formulas.
            outs: where the results of targets go.
            left: where that which stays behind for every edge goes.
        """
        sizes = (self._heads, self._width)
        self._tasks.append_to(
            sequence, csr, [*zip(operands, self._strides, strict=True)], [*outs, *left], sizes,
            direct=left, raw=self._raw, before=(), after=(*outs, *sizes),
        )  # fmt: skip
