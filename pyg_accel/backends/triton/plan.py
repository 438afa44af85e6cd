"""Which kernels a pass over a graph takes: everything that is decided without reading tensors.

A plan depends on the formula, on shapes and strides, and on the size of the graph, so it is made
once and looked up by these afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.triton.codegen import combine_kernel, kernel
from pyg_accel.backends.triton.expression import index_operands
from pyg_accel.backends.triton.kernel_set import KernelSet
from pyg_accel.backends.triton.launch import (
    Tile,
    choose_tile,
    combine_tile,
    piece_tile,
)
from pyg_accel.backends.triton.recipe import Recipe, states_of
from pyg_accel.facts import INT32_ENTRIES, rounded
from pyg_accel.formula import Formula, Operand, map_operands, operands_of, shape_of
from pyg_accel.graph import CSR
from pyg_accel.machine import INTERPRETED, Gpu, gpu_of

__all__ = [
    "GraphFacts",
    "OperandShape",
    "Plan",
    "Seen",
    "accumulate_dtype",
    "device_facts",
    "extent_of",
    "graph_facts",
    "make_plan",
    "operand_shape",
    "seen",
    "vector_unit",
]


class Seen(NamedTuple):
    """What kernels depend on of an operand [rows, H, F]."""

    shape: tuple[int, ...]  # with a rounded number of rows
    stride: int  # between rows
    dtype: torch.dtype


def seen(t: Tensor) -> Seen:
    """Look at an operand."""
    rows, heads, width = t.shape
    return Seen((rounded(rows), heads, width), t.stride(0), t.dtype)


class GraphFacts(NamedTuple):
    """What kernels depend on of a graph; sizes are rounded."""

    num_rows: int
    num_cols: int
    entries: int
    wide: bool  # positions of entries are 64-bit
    numbered: bool  # entries have numbers of their own
    device: Gpu


def graph_facts(csr: CSR) -> GraphFacts:
    """Look at a graph."""
    rowptr, entries = csr.rowptr, csr.col.numel()
    wide = rowptr.dtype == torch.int64 or entries >= INT32_ENTRIES
    numbered = csr.eid is not None
    return GraphFacts(
        rounded(rowptr.numel() - 1), rounded(csr.num_cols), rounded(entries), wide, numbered,
        device_facts(rowptr),
    )  # fmt: skip


def device_facts(tensor: Tensor) -> Gpu:
    """Return what the division of work asks of a tensor's device."""
    return gpu_of(tensor.device.index) if tensor.is_cuda else INTERPRETED


@lru_cache(maxsize=4096)
def extent_of(formula: Formula, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """(heads, width) of what a formula without sums computes of operands [rows, H, F]."""
    sizes = {i: (shape[1], shape[2]) for i, shape in enumerate(shapes)}
    heads, width = shape_of(formula, sizes)
    for o in operands_of(formula):  # the winners that `sel` reads
        h, f = sizes[o.index]
        heads, width = h if heads == 1 else heads, f if width == 1 else width
    return heads, width


def accumulate_dtype(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return what is added up in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@dataclass(frozen=True, slots=True)
class OperandShape:
    """The part of an operand that a kernel's text depends on."""

    kind: str
    unit: int
    near: bool
    itemsize: int


def vector_unit(shapes: Sequence[OperandShape], width: int) -> int:
    """Return how many features 16 bytes hold, or as many as divide the width."""
    unit = max(16 // min(s.itemsize for s in shapes), 1)
    while width % unit:
        unit //= 2
    return unit


def operand_shape(operand: Seen, heads: int, width: int) -> OperandShape:
    """Return how a kernel reads an operand whose message has so many heads and columns."""
    rows, *own = operand.shape
    size, stride = operand.dtype.itemsize, operand.stride
    near = rows * stride + heads * width < INT32_ENTRIES
    if own == [1, 1]:
        return OperandShape("number", 0 if stride == 1 else 1, near, size)
    if own == [heads, width]:
        kind = "full"
    elif own == [heads, 1]:
        return OperandShape("head", 1, near, size)
    else:
        kind = "feature"
    unit = max(16 // size, 1)
    while stride % unit:
        unit //= 2
    return OperandShape(kind, unit, near, size)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pass is launched.

    Attributes:
        kernels: of its rows, pieces and combinations.
        used: the operands that are read, in the order of the kernels' arguments.
        gathered: of these, which are brought into the order of the entries first; nothing if none.
        extent: heads and width of a message.
        columns: of a row of results, in units of the recipe.
        width: of a head, in the same units.
        slices: programs that share a row, each with columns of its own.
        reduces: what is computed.
        winners: how the winners of a maximum are numbered; empty if they are not needed.
    """

    kernels: KernelSet[Recipe]
    used: tuple[int, ...]
    gathered: tuple[bool, ...]
    extent: tuple[int, int]
    columns: int
    width: int
    slices: int
    reduces: tuple[str, ...]
    winners: str


@lru_cache(maxsize=4096)
def make_plan(
    formula: Formula,
    operands: tuple[Seen, ...],
    reduces: tuple[str, ...],
    winners: str,
    graph: GraphFacts,
    dot: bool,
) -> Plan:
    """Return the plan of a pass; with ``dot``, messages are summed over the width."""
    extent = extent_of(formula, tuple(o.shape for o in operands))
    heads, width = extent
    formula, used, needs_numbers = _renumbered(formula)
    operands = tuple(operands[i] for i in used)
    shapes = tuple(operand_shape(o, heads, width) for o in operands)
    by_entry = needs_numbers or "none" in reduces or winners == "at"
    kernels = _kernels(
        formula, shapes, reduces, winners, extent, graph, graph.numbered and by_entry,
        str(accumulate_dtype(tuple(o.dtype for o in operands))).removeprefix("torch."), dot,
    )  # fmt: skip
    recipe = kernels.recipe
    columns = heads * width // recipe.columns
    slices = -(-(heads * width) // recipe.tile.columns)
    gathered: tuple[bool, ...] = ()
    if dot:
        columns = heads
        slices = -(-heads * width // recipe.tile.columns) if recipe.heads == "whole" else heads
    elif slices > 1 and recipe.numbered and _only_weights(formula, shapes, reduces, winners):
        # Each slice would fetch every weight from where its edge lies: do that once.
        gathered = tuple(s.kind in ("number", "head") for s in shapes)
        kernels = replace(
            kernels, recipe=replace(recipe, numbered=False),
            whole=replace(kernels.whole, numbered=False),
        )  # fmt: skip
    inner = 1 if recipe.heads == "whole" else width // recipe.columns
    return Plan(kernels, used, gathered, extent, columns, inner, slices, reduces, winners)


def _renumbered(formula: Formula) -> tuple[Formula, tuple[int, ...], bool]:
    """A formula over the operands that it uses, their indices, and whether edges are numbered."""
    operands = list(operands_of(formula))
    used = tuple(dict.fromkeys(o.index for o in operands))
    numbered = bool(index_operands(formula)) or any(o.side == "e" for o in operands)
    return map_operands(formula, lambda o: Operand(o.side, used.index(o.index))), used, numbered


def _only_weights(
    formula: Formula, shapes: tuple[OperandShape, ...], reduces: tuple[str, ...], winners: str
) -> bool:
    """Whether edge numbers are used for nothing but narrow edge operands, and all narrow are."""
    if index_operands(formula) or "none" in reduces or winners == "at":
        return False
    return all(
        (o.side == "e") == (shapes[o.index].kind in ("number", "head"))
        for o in operands_of(formula)
    )


def _kernels(
    formula: Formula,
    shapes: tuple[OperandShape, ...],
    reduces: tuple[str, ...],
    winners: str,
    extent: tuple[int, int],
    graph: GraphFacts,
    numbered: bool,
    accumulate: str,
    dot: bool,
) -> KernelSet[Recipe]:
    heads, width = extent
    sides = {o.index: o.side for o in operands_of(formula)}
    moving = [i for i, s in enumerate(shapes) if s.kind in ("full", "feature") and sides[i] != "v"]
    gathers = max(len(moving), 1)
    resident = sum(sides[i] == "u" for i in moving)
    itemsize = max((shapes[i].itemsize for i in moving or range(len(shapes))), default=4)
    states = states_of(reduces, winners)
    columns = width if dot else heads * width
    kept = max(len(states), 1)
    tile = choose_tile(graph.device, *graph[:3], columns, itemsize, gathers, resident, kept, dot)
    kinds, units, near = zip(*((s.kind, s.unit, s.near) for s in shapes), strict=True)
    unit = vector_unit(shapes, width)
    head_of_tile = "one" if dot or heads == 1 or width % tile.columns == 0 else "mixed"
    adds = dot and columns > tile.columns
    if dot and not adds and heads > 1 and width < 64 and width & (width - 1) == 0:
        head_of_tile, unit, columns = "whole", width, heads * width
        tile = _widened(tile, min(1 << (heads - 1).bit_length(), max(64 // tile.columns, 1)))
    recipe = Recipe(
        formula=formula, kinds=kinds, aligned=units, near=near, reduces=reduces, winners=winners,
        tile=tile, tasks="rows", hubs=False, numbered=numbered, heads=head_of_tile, columns=unit,
        even=columns % tile.columns == 0, dot=dot, adds=adds, accumulate=accumulate,
        position="int64" if graph.wide else "int32",
    )  # fmt: skip
    whole = replace(recipe, tile=combine_tile(tile))
    pieces = piece_tile(tile, itemsize, gathers)
    return KernelSet(recipe, pieces, whole, kernel, combine_kernel)


def _widened(tile: Tile, times: int) -> Tile:
    """A tile with more columns and fewer edges."""
    columns = tile.columns * times
    if tile.rows == 1:
        return replace(tile, columns=columns, lanes=max(tile.lanes // times, 1))
    return replace(tile, columns=columns, rows=max(tile.rows // times, 1))
