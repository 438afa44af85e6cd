"""Launches passes over an edge list: chooses recipes and blocks."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.edges import Output, Passes, sides_of
from pyg_accel.backends.triton.edges_codegen import edge_kernel
from pyg_accel.backends.triton.kernels.edges import finish_kernel
from pyg_accel.backends.triton.launcher import type_of
from pyg_accel.backends.triton.plan import (
    OperandFacts,
    accumulate_dtype,
    kind_of,
    name_of,
    operand_shape,
    renumbered,
    vector_unit,
)
from pyg_accel.backends.triton.recipe import EdgeRecipe
from pyg_accel.backends.triton.sequence import Blocks, Kernel, Sequence, Size, Slot
from pyg_accel.formula import has_sum
from pyg_accel.graph.csr import Edges

__all__ = ["bind", "run"]

COLUMNS, ELEMENTS, LOADS, WARPS = 64, 512, 8, 4  # of a block; loads of a thread in flight
FINISHED = 1024  # elements of a program that finishes results
_ENTRIES, _COLS, _ROWS = Size(0), Size(1), Size(2)  # of the graph
_COUNTS = {"u": _COLS, "v": _ROWS, "e": _ENTRIES}


class _Read(NamedTuple):
    """An operand of a pass, and the reduction of its ordered bits."""

    seen: OperandFacts
    slot: Slot
    ordered: str


def run(edges: Edges, passes: Passes, operands: list[Tensor]) -> list[Tensor]:
    """Run a single call."""
    results: list[Tensor] = bind(edges, passes, operands)(
        edges.edge_index, edges.sizes(), [t for t in operands if t is not None]
    )
    return results


def bind(
    edges: Edges, passes: Passes, operands: SequenceOf[Tensor | None]
) -> Callable[[Tensor, SequenceOf[int], SequenceOf[Tensor]], list[Tensor]]:
    """Return a function that launches similar calls on any graph.

    It takes the edge list, :meth:`Edges.sizes` and the operands that are not None.
    """
    present = [t for t in operands if t is not None]
    dtypes = tuple(t.dtype for t in present if t.is_floating_point())
    sequence = Sequence(1 + len(present), edges.edge_index.device)
    slots = iter(sequence.operands[1:])
    reads = [None if t is None else _Read(OperandFacts((0, *t.shape[1:]), t.stride(0), t.dtype),
                                          next(slots), "") for t in operands]  # fmt: skip
    generated: list[tuple[EdgeRecipe, tuple[int, ...]]] = []
    later = [_Read(_seen(output, dtypes), Slot(0), _order(output))
             for part in passes for output in part]  # fmt: skip
    plain = [*reads, *later]
    at = len(operands)
    for part in passes:
        recipe, used = _recipe(part, plain[:at], dtypes)
        loops, traps = edges.loops is not None, edges.edge_index.is_cuda
        generated.append((replace(recipe, loops=loops, traps=traps), used))
        at += len(part)
    places = _allocate(sequence, passes, [recipe for recipe, _ in generated], dtypes)
    for part, (recipe, used) in zip(passes, generated, strict=True):
        buffers = [next(places) for _ in part]
        _append(sequence, recipe, [reads[i] for i in used], [buffer for buffer, _ in buffers])
        for output, (buffer, final) in zip(part, buffers, strict=True):
            reads.append(_Read(_seen(output, dtypes), buffer, _order(output)))
            if final is not None:
                _finish(sequence, output, buffer, final, recipe.accumulate)

    def go(
        edge_index: Tensor, sizes: SequenceOf[int], operands: SequenceOf[Tensor]
    ) -> list[Tensor]:
        return sequence([edge_index, *operands], sizes)

    return go


def _order(output: Output) -> str:
    return output.reduce if output.reduce in ("max", "min") else ""


def _bits(output: Output, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype of the reduction over edges."""
    wide = accumulate_dtype(dtypes)
    if output.reduce == "winner":
        return torch.int64
    if output.reduce == "sum":
        return wide
    return torch.uint64 if wide == torch.float64 else torch.uint32


def _seen(output: Output, dtypes: tuple[torch.dtype, ...]) -> OperandFacts:
    heads, width = output.shape
    return OperandFacts((0, heads, width), heads * width, _bits(output, dtypes))


def _recipe(
    part: tuple[Output, ...], reads: SequenceOf[_Read | None], dtypes: tuple[torch.dtype, ...]
) -> tuple[EdgeRecipe, tuple[int, ...]]:
    """Return the recipe of a pass, and the operands that it reads."""
    sides = sides_of((part,))
    used = tuple(sorted(sides))
    read = [r for i in used if (r := reads[i]) is not None]
    sizes = [r.seen.shape[1:] for r in read] + [output.shape for output in part]
    heads, width = (max((size[d] for size in sizes), default=1) for d in (0, 1))
    shapes = tuple(operand_shape(r.seen, heads, width) for r in read)
    whole = any(has_sum(output.formula) for output in part)
    columns = _ceil_power(width) if whole else min(_ceil_power(width), COLUMNS)
    block = min(_ceil_power(heads), max(COLUMNS // columns, 1))
    gathers = max(sum(s.kind in ("full", "feature") for s in shapes), 1)
    unit = vector_unit(shapes, width) if shapes else 1
    recipe = EdgeRecipe(
        outputs=renumbered(part, used),
        stored=tuple(kind_of(output.shape, heads, width) for output in part),
        kinds=tuple(s.kind for s in shapes), aligned=tuple(s.unit for s in shapes),
        near=(False,) * len(shapes), ordered=tuple(r.ordered for r in read),
        lanes=max(ELEMENTS // (block * columns), 1), unroll=max(LOADS // gathers, 2), heads=block,
        columns=columns, blocks=-(-heads // block), slices=-(-width // columns), unit=unit,
        even_heads=heads % block == 0, even_width=width % columns == 0,
        accumulate=name_of(accumulate_dtype(dtypes)),
    )  # fmt: skip
    return recipe, used


def _allocate(
    sequence: Sequence,
    passes: Passes,
    recipes: SequenceOf[EdgeRecipe],
    dtypes: tuple[torch.dtype, ...],
) -> Any:
    """Yield the buffer of each reduction, and its final place; None if it stays in the buffer."""
    outputs = [(output, recipe, k) for part, recipe in zip(passes, recipes, strict=True)
               for k, output in enumerate(part)]  # fmt: skip
    finals: list[Slot | None] = []
    stays: list[bool] = []
    for output, recipe, k in outputs:
        dtype, bits = _dtype(output, dtypes), _bits(output, dtypes)
        atomic = recipe.is_atomic(k)
        stays.append(output.reduce == "sum" and (dtype == bits or not atomic))
        own: tuple[int, ...] = output.trailing or output.shape
        shape: tuple[int | Size, ...] = (_COUNTS[output.side], *own)
        result = (
            sequence.result(shape, dtype, zero=stays[-1] and atomic) if output.returned else None
        )
        finals.append(result)
    for (output, recipe, k), final, stay in zip(outputs, finals, stays, strict=True):
        if stay and final is not None:
            yield final, None
        else:
            bits = _bits(output, dtypes)
            shape = (_COUNTS[output.side], *output.shape)
            yield sequence.scratch(shape, bits, zero=recipe.is_atomic(k)), final


def _dtype(output: Output, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    if output.reduce == "winner":
        return torch.int32
    return accumulate_dtype(dtypes) if output.wide else dtypes[0]


def _append(
    sequence: Sequence, recipe: EdgeRecipe, reads: SequenceOf[_Read | None], outs: list[Slot]
) -> None:
    """Append the launch of a pass."""
    arguments: list[Any] = [sequence.operands[0]]
    for read, unit in zip(reads, recipe.aligned, strict=True):
        assert read is not None
        arguments += (read.slot, read.seen.stride // max(unit, 1))
    widths = [r.seen.shape[1:] for r in reads if r is not None]
    widths += [output.shape for output in recipe.outputs]
    heads, width = (max(size[d] for size in widths) for d in (0, 1))
    arguments += [*outs, _ENTRIES, _COLS, _ROWS, *map(Size, range(3, 7)), heads,
                  width // recipe.unit]  # fmt: skip
    empty = 0 in (heads, width)
    grid = (Blocks(0, 1, recipe.lanes * recipe.unroll),
            0 if empty else recipe.blocks * recipe.slices)  # fmt: skip
    sequence.launch(Kernel(edge_kernel(recipe), WARPS), grid, arguments)


def _finish(sequence: Sequence, output: Output, buffer: Slot, final: Slot, accumulate: str) -> None:
    """Append the kernel that converts a buffer to a result."""
    columns = output.shape[0] * output.shape[1]
    count = _COUNTS[output.side]
    kernel = Kernel(finish_kernel, WARPS, BLOCK=FINISHED, KIND=output.reduce,
                    ACC=type_of(getattr(torch, accumulate)))  # fmt: skip
    grid = (Blocks(count.at, columns, FINISHED),)
    sequence.launch(kernel, grid, (buffer, final, count, columns))


def _ceil_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
