"""Kernels that hold whole heads: attention, and several formulas over the same operands at once.

A program has a tile of ``rows * lanes`` edges by ``heads`` by ``width``, and whole heads of whole
width, so that scores are sums inside the tile. Operands broadcast as [edges, heads | 1, width | 1].
"""

from functools import lru_cache
from typing import Any

from pyg_accel.backends.triton.attention_results import (
    column_lines,
    combine_lines,
    fold_lines,
    function_lines,
    inside,
    results_of,
    store_lines,
    tile_shape,
)
from pyg_accel.backends.triton.codegen import build
from pyg_accel.backends.triton.expression import Names, emit, keeps_zero, per_target
from pyg_accel.backends.triton.recipe import AttentionRecipe
from pyg_accel.backends.triton.reduction import task_lines
from pyg_accel.formula import Binary, Const, Formula, Operand, Unary, children, operands_of

__all__ = ["attention_combine_kernel", "attention_kernel", "stays_finite"]


@lru_cache(maxsize=1024)
def attention_kernel(recipe: AttentionRecipe) -> Any:
    """Return the kernel that goes over the entries of rows, or of pieces of long ones."""
    return build("attention_kernel", _entry_lines(recipe))


@lru_cache(maxsize=1024)
def attention_combine_kernel(recipe: AttentionRecipe) -> Any:
    """Return the kernel that puts the pieces of long rows together, in their order."""
    return build("attention_combine_kernel", combine_lines(recipe))


def _stride(recipe: AttentionRecipe, i: int) -> str:
    unit = recipe.aligned[i]
    return f"(x{i}_stride * {unit})" if unit else "1"


def _load(recipe: AttentionRecipe, i: int, place: str, ok: str, scalar: bool) -> str:
    """Code that reads an operand for every edge of a tile, or (`scalar`) for the one row."""
    kind = recipe.kinds[i]
    rows = f"{place}.to(tl.int32)" if recipe.near[i] else f"{place}.to(tl.int64)"
    rows = f"{rows} * {_stride(recipe, i)}"
    if not scalar:
        rows = f"({rows})[:, None, None]"
    column = {"full": f"(h * (width * {recipe.unit}) + w)", "head": "h", "feature": "w",
              "number": "0 * h"}[kind]  # fmt: skip
    masks = [] if scalar or not ok else [f"{ok}[:, None, None]"]
    if not recipe.even_heads and kind in ("full", "head"):
        masks.append("h_ok")
    if not recipe.even_width and kind in ("full", "feature"):
        masks.append("w_ok")
    other = 'float("inf")' if i == recipe.infinite else "0"
    mask = f", mask={' & '.join(masks)}, other={other}" if masks else ""
    return f"tl.load(x{i}_ptr + ({rows} + {column}){mask}).to(ACC)"


def _parameters(recipe: AttentionRecipe) -> list[str]:
    names = ["rowptr_ptr", "col_ptr", "eid_ptr", "task_ptr", "begin_ptr", "end_ptr"]
    for i in range(len(recipe.kinds)):
        names += [f"x{i}_ptr", f"x{i}_stride"]
    pieces = recipe.tasks == "pieces"
    stored = [name for name, _ in recipe.states] if pieces else results_of(recipe)
    names += [f"{name}_ptr" for name in stored]
    names += [f"edges{k}_ptr" for k in range(len(recipe.stores))]
    return [*names, "tasks", "heads", "width", "limit"]


def _formulas(recipe: AttentionRecipe) -> list[Formula]:
    if recipe.score is not None:
        return [recipe.score, recipe.value]
    return [*recipe.stores, *recipe.sums]


def _operands(recipe: AttentionRecipe) -> list[Operand]:
    return list(dict.fromkeys(o for f in _formulas(recipe) for o in operands_of(f)))


def _entry_lines(recipe: AttentionRecipe) -> list[str]:
    tile = recipe.tile
    edges, size = tile.rows * tile.lanes, tile.columns
    scalar = tile.rows == 1
    operands = _operands(recipe)
    body = column_lines(recipe) + task_lines(tile, recipe.tasks, hubs=recipe.hubs)
    known: dict[Formula, str] = {}
    for operand in operands:
        if operand.side == "v":
            name = known[operand] = f"v{operand.index}"
            body.append(f"{name} = {_load(recipe, operand.index, 'row', 'keep', scalar)}")
    inner = "{x}" if recipe.even_width else "tl.where(w_ok, {x}, 0.0)"
    summed = f"tl.sum({inner}, axis=2, keep_dims=True)"
    invariants = Names(known, "row", summed=summed)
    for part in dict.fromkeys(p for f in _formulas(recipe) for p in per_target(f)):
        emit(part, invariants, "")
    body += invariants.lines
    for state, wide in recipe.states:
        start = 'float("-inf")' if state == "most" else "0.0"
        columns = size if wide else 1
        body.append(f"{state} = tl.full([{edges}, {recipe.heads}, {columns}], {start}, ACC)")
    body.append("offset = begin + lane" if tile.lanes > 1 or scalar else "offset = begin")
    body += ["left = end - offset", "col_at = col_ptr + offset"]
    if recipe.numbered:
        body.append("eid_at = eid_ptr + offset")
    longest = "end - begin" if scalar else "tl.max(end - begin, axis=0)"
    body += [f"longest = {longest}", "step = 0", "while step < longest:"]
    step = _several_step if recipe.score is None else _attention_step
    body += [f"    {line}" for line in _reads(recipe, operands)]
    body += [f"    {line}" for line in step(recipe, known, summed)]
    body.append(f"    step += {tile.lanes * tile.unroll}")
    body += fold_lines(recipe) + store_lines(recipe)
    return function_lines("attention_kernel", recipe, _parameters(recipe), body)


def _reads(recipe: AttentionRecipe, operands: list[Operand]) -> list[str]:
    """All addresses, then all loads of one pass of the loop: `u0_1` is operand 0 of edge tile 1."""
    tile = recipe.tile
    moving = [o for o in operands if o.side != "v"]
    gathers = any(o.side == "u" for o in moving)
    wants_edge = any(o.side == "e" for o in moving) or bool(recipe.stores)
    lines = ["rest = left - step"]
    for u in range(tile.unroll):
        far = f" + {u * tile.lanes}" if u else ""
        lines.append(f"ok{u} = rest > {u * tile.lanes}")
        here = f"step{far}, mask=ok{u}, other=0"
        if gathers:
            lines.append(f"col{u} = tl.load(col_at + {here})")
        if wants_edge:
            lines.append(f"edge{u} = tl.load(eid_at + {here})" if recipe.numbered
                         else f"edge{u} = offset + (step{far})")  # fmt: skip
    for u in range(tile.unroll):
        for o in moving:
            place = f"col{u}" if o.side == "u" else f"edge{u}"
            code = _load(recipe, o.index, place, f"ok{u}", False)
            lines.append(f"{o.side}{o.index}_{u} = {code}")
    return lines


def _names(recipe: AttentionRecipe, known: dict[Formula, str], u: int, summed: str) -> Names:
    own: dict[Formula, str] = {
        o: f"{o.side}{o.index}_{u}" for o in _operands(recipe) if o.side != "v"
    }
    return Names({**known, **own}, str(u), summed=summed)


def _attention_step(recipe: AttentionRecipe, known: dict[Formula, str], summed: str) -> list[str]:
    """Scores of all edge tiles, the new maximum, then what is kept fades and the rest is added."""
    lines: list[str] = []
    unroll, shape = recipe.tile.unroll, tile_shape(recipe, wide=False)
    assert recipe.score is not None
    names = [_names(recipe, known, u, summed) for u in range(unroll)]
    for u in range(unroll):
        score = emit(recipe.score, names[u], "")
        lines += names[u].lines
        names[u].lines.clear()
        lines.append(f"s{u} = tl.broadcast_to({score}, {shape})")
        lines.append(f's{u} = tl.where(ok{u}[:, None, None], s{u}, float("-inf"))')
    lines.append("high = most")
    lines += [f"high = tl.maximum(high, s{u})" for u in range(unroll)]
    lines += ['shift = tl.where(high == float("-inf"), 0.0, high)', "fade = tl.exp(most - shift)",
              "most = high", "total *= fade", "acc *= fade"]  # fmt: skip
    for u in range(unroll):
        lines += [f"p{u} = tl.exp(s{u} - shift)", f"total += p{u}"]
        value = emit(recipe.value, names[u], "")
        lines += names[u].lines
        part = f"p{u} * {value}"
        if not stays_finite(recipe.value):
            part = f"tl.where(ok{u}[:, None, None], {part}, 0.0)"
        lines.append(f"acc += {part}")
    return lines


def _several_step(recipe: AttentionRecipe, known: dict[Formula, str], summed: str) -> list[str]:
    """What is stored for each edge, then what is added up; equal parts are computed once."""
    lines: list[str] = []
    for u in range(recipe.tile.unroll):
        names = _names(recipe, known, u, summed)
        ok = f"ok{u}[:, None, None]"
        for k, formula in enumerate(recipe.stores):
            # Stored by the threads that hold the first column: no new layout for the sums.
            kept = f"tl.broadcast_to({emit(formula, names, '')}, {tile_shape(recipe, wide=True)})"
            mask = inside(recipe, False, ok, "first")
            place = f"(edge{u}.to(tl.int64) * heads)[:, None, None] + (h + 0 * w)"
            names.lines.append(f"tl.store(edges{k}_ptr + {place}, {kept}, mask={mask})")
        for k, formula in enumerate(recipe.sums):
            part = f"tl.broadcast_to({emit(formula, names, '')}, "
            part += f"{tile_shape(recipe, wide=recipe.widths[k])})"
            if recipe.infinite < 0 and not keeps_zero(formula):
                part = f"tl.where({ok}, {part}, 0.0)"
            names.lines.append(f"acc{k} += {part}")
        lines += names.lines
    return lines


def stays_finite(formula: Formula) -> bool:
    """Return whether zeros in place of an entry's operands give a finite number."""
    match formula:
        case Unary(op="exp" | "log" | "sqrt" | "pow"):
            return False
        case Binary(op="div", left=left, right=right):
            return isinstance(right, Const) and right.value != 0.0 and stays_finite(left)
    return all(stays_finite(child) for child in children(formula))
