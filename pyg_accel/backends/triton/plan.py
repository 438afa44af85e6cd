"""Which kernels a pass over a graph takes: everything that is decided without reading tensors.

A plan depends on the formula, on shapes and strides, and on the size of the graph, so it is made
once and looked up by these afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.edges import Output, sides_of
from pyg_accel.backends.triton.expression import index_operands
from pyg_accel.backends.triton.launch import (
    Tile,
    attention_tile,
    choose_tile,
    combine_tile,
    piece_tile,
)
from pyg_accel.backends.triton.recipe import RowRecipe
from pyg_accel.formula import Const, Formula, Operand, map_operands, operands_of, shape_of
from pyg_accel.graph import CSR
from pyg_accel.graph.facts import INT32_ENTRIES, rounded
from pyg_accel.runtime.machine import INTERPRETED, Gpu, gpu_of

__all__ = [
    "GraphFacts",
    "LaunchPlan",
    "OperandFacts",
    "OperandShape",
    "accumulate_dtype",
    "device_facts",
    "extent_of",
    "graph_facts",
    "kind_of",
    "make_plan",
    "name_of",
    "operand_shape",
    "renumbered",
    "seen",
    "vector_unit",
]


class OperandFacts(NamedTuple):
    """Properties of an operand [rows, H, F] that select a kernel."""

    shape: tuple[int, ...]  # with a rounded number of rows
    stride: int  # between rows
    dtype: torch.dtype


def seen(t: Tensor) -> OperandFacts:
    """Return the properties of an operand."""
    rows, heads, width = t.shape
    return OperandFacts((rounded(rows), heads, width), t.stride(0), t.dtype)


class GraphFacts(NamedTuple):
    """Properties of a graph that select a kernel; sizes are rounded."""

    num_rows: int
    num_cols: int
    entries: int
    wide: bool  # positions of entries are 64-bit
    numbered: bool  # entries have edge numbers (eid)
    device: Gpu


def graph_facts(csr: CSR) -> GraphFacts:
    """Return the properties of a graph."""
    rowptr, entries = csr.rowptr, csr.col.numel()
    wide = rowptr.dtype == torch.int64 or entries >= INT32_ENTRIES
    numbered = csr.eid is not None
    return GraphFacts(
        rounded(rowptr.numel() - 1), rounded(csr.num_cols), rounded(entries), wide, numbered,
        device_facts(rowptr),
    )  # fmt: skip


def device_facts(tensor: Tensor) -> Gpu:
    """Return the properties of a tensor's device for the division of work."""
    return gpu_of(tensor.device.index) if tensor.is_cuda else INTERPRETED


@lru_cache(maxsize=4096)
def extent_of(formula: Formula, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Return (heads, width) of a formula without sums, for operands [rows, H, F]."""
    sizes = {i: (shape[1], shape[2]) for i, shape in enumerate(shapes)}
    heads, width = shape_of(formula, sizes)
    for o in operands_of(formula):  # the winners that `sel` reads
        h, f = sizes[o.index]
        heads, width = h if heads == 1 else heads, f if width == 1 else width
    return heads, width


def accumulate_dtype(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


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


def operand_shape(operand: OperandFacts, heads: int, width: int) -> OperandShape:
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
class LaunchPlan:
    """How a pass over rows is launched.

    Attributes:
        recipe: of its rows.
        pieces: tile of the pieces of long rows.
        whole: recipe of putting pieces together.
        used: the operands that are read, in the order of the kernels' arguments.
        gathered: of these, which are brought into the order of the entries first; nothing if none.
        heads: of a message.
        width: of a head, in units of the recipe.
        programs: that share a row.
    """

    recipe: RowRecipe
    pieces: Tile
    whole: RowRecipe
    used: tuple[int, ...]
    gathered: tuple[bool, ...]
    heads: int
    width: int
    programs: int


@lru_cache(maxsize=4096)
def make_plan(
    outputs: tuple[Output, ...],
    operands: tuple[OperandFacts, ...],
    graph: GraphFacts,
    *,
    score: Formula | None = None,
    winners: str = "",
    infinite: int = -1,
    whole: bool = False,
) -> LaunchPlan:
    """Return the plan of a pass.

    Args:
        outputs: the outputs; for edges, also sums over the width.
        operands: of their formulas.
        graph: to go over.
        score: of softmax; see :class:`RowRecipe`.
        winners: numbering of the winners of maxima; empty if they are not needed.
        infinite: operand that reads as infinity for absent entries.
        whole: programs hold whole heads, over which formulas sum.
    """
    formulas = [output.formula for output in outputs] + ([] if score is None else [score])
    used = tuple(dict.fromkeys(o.index for f in formulas for o in operands_of(f)))
    indices = any(map(index_operands, formulas))
    operands = tuple(operands[i] for i in used)
    outputs, score = renumbered(outputs, used), score and _moved(score, used)
    sizes = [o.shape[1:] for o in operands] + [output.shape for output in outputs]
    heads, width = (max((size[d] for size in sizes), default=1) for d in (0, 1))
    dot = not whole and any(output.shape[1] < width for output in outputs if output.side == "e")
    alike = all(o.shape[1:] in ((heads, width), (1, 1)) for o in operands)
    if alike and not (whole or dot):
        operands, outputs = _flat(operands, outputs, heads, width)
        heads, width = 1, heads * width
    shapes = tuple(operand_shape(o, heads, width) for o in operands)
    sides = sides_of((outputs,)) | {o.index: o.side for o in operands_of(score or Const(0.0))}
    stores = any(output.side == "e" for output in outputs)
    by_entry = indices or stores or "e" in sides.values() or winners == "at"
    kinds, units, near = zip(*((s.kind, s.unit, s.near) for s in shapes), strict=True)
    unit = vector_unit(shapes, width)
    facts: dict[str, Any] = {
        "outputs": outputs, "kinds": kinds, "aligned": units, "near": near, "unit": unit,
        "stored": tuple(kind_of(output.shape, heads, width) for output in outputs),
        "accumulate": name_of(accumulate_dtype(tuple(o.dtype for o in operands))),
        "position": "int64" if graph.wide else "int32", "numbered": graph.numbered and by_entry,
        "score": score, "winners": winners,
        "infinite": used.index(infinite) if infinite in used else -1,
    }  # fmt: skip
    tile, pieces, block = _tiles(graph, shapes, sides, outputs, (heads, width), facts, whole, dot)
    columns = tile.columns
    recipe = RowRecipe(
        **facts, tile=tile, heads=block, columns=columns, blocks=-(-heads // block),
        slices=-(-width // columns), even_heads=heads % block == 0,
        even_width=width % columns == 0, adds=dot and columns < width,
    )  # fmt: skip
    combined = replace(recipe, tile=combine_tile(replace(tile, columns=columns * block)))
    programs = recipe.blocks * (1 if recipe.adds else recipe.slices)
    gathered: tuple[bool, ...] = ()
    narrow = [s.kind in ("number", "head") for s in shapes]
    weights = all((sides[i] == "e") == small for i, small in enumerate(narrow))
    if programs > 1 and recipe.numbered and weights and not (whole or indices or stores or winners):
        # Each slice would fetch every weight from where its edge lies: do that once.
        gathered = tuple(narrow)
        recipe, combined = (replace(r, numbered=False) for r in (recipe, combined))
    return LaunchPlan(recipe, pieces, combined, used, gathered, heads, width // unit, programs)


def _moved(formula: Formula, used: tuple[int, ...]) -> Formula:
    return map_operands(formula, lambda o: Operand(o.side, used.index(o.index)))


def renumbered(outputs: tuple[Output, ...], used: tuple[int, ...]) -> tuple[Output, ...]:
    """Return outputs with operands numbered as in ``used``, without facts that no kernel reads."""
    return tuple(
        replace(output, formula=_moved(output.formula, used), trailing=(), returned=True,
                wide=False, of=used.index(output.of) if output.of >= 0 else -1)
        for output in outputs
    )  # fmt: skip


def _flat(
    operands: tuple[OperandFacts, ...], outputs: tuple[Output, ...], heads: int, width: int
) -> tuple[tuple[OperandFacts, ...], tuple[Output, ...]]:
    """Merge all heads into one, for operands that do not distinguish heads."""

    def flat(size: tuple[int, ...]) -> tuple[int, int]:
        return (1, heads * width) if size == (heads, width) else (1, 1)

    return (
        tuple(o._replace(shape=(o.shape[0], *flat(o.shape[1:]))) for o in operands),
        tuple(replace(output, shape=flat(output.shape)) for output in outputs),
    )


def kind_of(size: tuple[int, int], heads: int, width: int) -> str:
    """Return the kind of an output."""
    return operand_shape(
        OperandFacts((0, *size), size[0] * size[1], torch.float32), heads, width
    ).kind


def _tiles(
    graph: GraphFacts,
    shapes: tuple[OperandShape, ...],
    sides: dict[int, str],
    outputs: tuple[Output, ...],
    extent: tuple[int, int],
    facts: dict[str, Any],
    whole: bool,
    dot: bool,
) -> tuple[Tile, Tile, int]:
    """Return the tiles of rows (columns of one head) and of pieces, and the heads of a program."""
    heads, width = extent
    moving = [i for i, s in enumerate(shapes) if s.kind in ("full", "feature") and sides[i] != "v"]
    gathers, resident = max(len(moving), 1), sum(sides[i] == "u" for i in moving)
    of_all = () if whole else range(len(shapes))
    itemsize = max((shapes[i].itemsize for i in moving or of_all), default=4)
    if whole:
        by_edge = any(output.side == "e" for output in outputs)
        by_edge = by_edge or any(side == "e" and i not in moving for i, side in sides.items())
        tile, block = attention_tile(
            graph.device, *graph[:3], heads, width, itemsize, gathers, resident, by_edge
        )
    else:
        states = {(o.formula, o.reduce in ("sum", "mean") or o.reduce) for o in outputs
                  if o.side != "e"}  # fmt: skip
        positions = sum(o.reduce in ("max", "min") for o in outputs) if facts["winners"] else 0
        tile = choose_tile(graph.device, *graph[:3], width if dot else heads * width, itemsize,
                           gathers, resident, max(len(states) + positions, 1), dot)  # fmt: skip
        own = 1 << max(width - 1, 0).bit_length()
        block = min(max(tile.columns // own, 1), 1 << max(heads - 1, 0).bit_length())
        if dot and heads > 1 and width < 64 and own <= tile.columns:
            block = min(1 << (heads - 1).bit_length(), max(64 // own, 1))
            tile = _with_heads(tile, block)
        tile = replace(tile, columns=min(tile.columns, own))
    pieces = piece_tile(replace(tile, columns=tile.columns * block), itemsize, gathers)
    most = max(tile.unroll * tile.rows, 1) if whole else pieces.unroll
    unroll = min(pieces.unroll, most)
    return tile, replace(pieces, columns=tile.columns, unroll=unroll), block


def _with_heads(tile: Tile, heads: int) -> Tile:
    """Return a tile for several heads, with fewer edges."""
    if tile.rows == 1:
        return replace(tile, lanes=max(tile.lanes // heads, 1))
    return replace(tile, rows=max(tile.rows // heads, 1))
