"""Kernels made from formulas: gather, compute the message, reduce or store it, in one pass.

:func:`kernel` returns a Triton function, compiled at its first launch, for a :class:`Recipe`. Its
source is ordinary text, kept where Python's tools (and Triton) look for source, so that tracebacks
and ``inspect.getsource`` show it.
"""

import linecache
import threading
from functools import lru_cache
from typing import Any

from pyg_accel.backends.triton.expression import Names, emit, index_operands, per_target
from pyg_accel.backends.triton.recipe import START, Recipe, states_of, winning
from pyg_accel.backends.triton.reduction import (
    combine_lines,
    header,
    reduce_lines,
    repeats,
    store_pieces,
    store_rows,
    task_lines,
)
from pyg_accel.formula import Formula, Operand, operands_of

__all__ = ["build", "combine_kernel", "kernel"]

_lock = threading.Lock()


@lru_cache(maxsize=4096)
def kernel(recipe: Recipe) -> Any:
    """Return the kernel that goes over the entries."""
    return build("gspmm_kernel", entry_lines(recipe))


@lru_cache(maxsize=1024)
def combine_kernel(recipe: Recipe) -> Any:
    """Return the kernel that puts the pieces of long rows together, in their order."""
    return build("combine_kernel", combine_lines(recipe))


def build(name: str, lines: list[str]) -> Any:
    """Return the Triton function of this name that the lines define."""
    import triton
    import triton.language as tl

    from pyg_accel.backends.triton.kernels import functions

    source = "\n".join(lines) + "\n"
    helpers = {helper: getattr(functions, helper) for helper in functions.__all__}
    with _lock:
        file = f"<pyg_accel {name} {len(linecache.cache)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        scope: dict[str, Any] = {"tl": tl, "__name__": __name__, **helpers}
        exec(compile(source, file, "exec"), scope)
        runtime = [p for p in scope[name].__code__.co_varnames[: scope[name].__code__.co_argcount]
                   if not p.endswith("_ptr")]  # fmt: skip
        return triton.jit(scope[name], do_not_specialize=runtime)


def _parameters(recipe: Recipe) -> list[str]:
    names = ["rowptr_ptr", "col_ptr", "eid_ptr", "task_ptr", "begin_ptr", "end_ptr"]
    for i in range(len(recipe.kinds)):
        names += [f"x{i}_ptr", f"x{i}_stride"]
    stored = recipe.reduces if recipe.tasks != "pieces" else states_of(
        recipe.reduces, recipe.winners
    ) + tuple(r for r in recipe.reduces if r == "none")  # fmt: skip
    names += [f"out{i}_ptr" for i in range(len(stored))]
    if recipe.tasks != "pieces":
        names += [f"winner{i}_ptr" for i, _ in winning(recipe)]
    return [*names, "tasks", "columns", "width", "part", "limit"]


def _columns(recipe: Recipe) -> list[str]:
    """`c`: columns of all heads, `head`: theirs, `c_ok`: which exist; `f`: within the head."""
    size = recipe.tile.columns
    if recipe.dot and recipe.heads == "one":  # part of the width of one head
        return [
            "head = tl.program_id(1)",
            f"f = part * {size} + tl.arange(0, {size})",
            f"c = head * (width * {recipe.columns}) + f",
            f"c_ok = f < width * {recipe.columns}",
            f"first_column = tl.arange(0, {size}) == 0",
        ]
    lines = [
        f"c = tl.program_id(1) * {size} + tl.arange(0, {size})",
        f"c_ok = c < columns * {recipe.columns}",
    ]
    if recipe.heads == "one":
        lines += [f"head = tl.program_id(1) * {size} // (width * {recipe.columns})",
                  f"f = c - head * (width * {recipe.columns})"]  # fmt: skip
    else:
        lines += [f"head = c // (width * {recipe.columns})",
                  f"f = c % (width * {recipe.columns})"]  # fmt: skip
    return lines


def _one_an_edge(recipe: Recipe, operand: Operand) -> bool:
    """Whether a tile reads a single value of an operand for every edge."""
    kind = recipe.kinds[operand.index]
    return kind == "number" or (kind == "head" and recipe.heads == "one")


def _stride(recipe: Recipe, operand: Operand) -> str:
    unit = recipe.aligned[operand.index]
    return f"(x{operand.index}_stride * {unit})" if unit else "1"


def _load(recipe: Recipe, operand: Operand, place: str, ok: str, scalar: bool, cast: bool) -> str:
    """Code that reads an operand for every edge of a tile, or (`scalar`) for the one row.

    `ok` names what says which edges are there; nothing if all can be read.
    """
    i, kind = operand.index, recipe.kinds[operand.index]
    # A 32-bit product costs one instruction, a 64-bit one five.
    rows = f"{place}.to(tl.int32)" if recipe.near[i] else f"{place}.to(tl.int64)"
    tail = ".to(ACC)" if cast else ""
    if _one_an_edge(recipe, operand):
        # Read along the edges alone, or each thread would read it many times.
        pointer = f"x{i}_ptr + {rows} * {_stride(recipe, operand)}" + (" + head" * (kind == "head"))
        if scalar:
            return f"tl.load({pointer}){tail}"
        mask = f", mask={ok}, other=0" if ok else ""
        return f"tl.load({pointer}{mask}){tail}[:, None]"
    column = {"full": "c", "head": "head", "feature": "f"}[kind]
    if not scalar:
        rows = f"({rows})[:, None]"
    pointer = f"x{i}_ptr + ({rows} * {_stride(recipe, operand)} + {column}[None, :])"
    masks = [] if scalar or not ok else [f"{ok}[:, None]"]
    if not recipe.even:
        masks.append("c_ok[None, :]")
    mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
    return f"tl.load({pointer}{mask}){tail}"


def entry_lines(recipe: Recipe) -> list[str]:
    """The kernel that goes over the entries of rows, or of pieces of long ones."""
    tile, formula = recipe.tile, recipe.formula
    edges, size = tile.rows * tile.lanes, tile.columns
    scalar = tile.rows == 1  # one row: its numbers are scalars
    operands = list(dict.fromkeys(operands_of(formula)))
    indices = index_operands(formula)
    body = _columns(recipe) + task_lines(tile, recipe.tasks, hubs=recipe.hubs)
    known: dict[Formula, str] = {}
    for operand in operands:
        if operand.side == "v":
            name = known[operand] = f"v{operand.index}"
            cast = operand not in indices
            body.append(f"{name} = {_load(recipe, operand, 'row', 'keep', scalar, cast)}")
    invariants = Names(known, "row")
    for part in dict.fromkeys(per_target(formula)):
        emit(part, invariants, "")
    body += invariants.lines
    for state in states_of(recipe.reduces, recipe.winners):
        start = "NOWHERE, POS" if state.endswith("_at") else f"{START[state]}, ACC"
        body.append(f"{state} = tl.full([{edges}, {size}], {start})")
    # Pointers move with `offset` and `step`; the edges of a step are at constant distances.
    body += ["offset = begin + lane" if tile.lanes > 1 or scalar else "offset = begin"]
    body.append("left = end - offset")
    if repeats(recipe):
        body.append("last = tl.maximum(end - 1, 0)")
    else:
        body.append("col_at = col_ptr + offset")
        if recipe.numbered:
            body.append("eid_at = eid_ptr + offset")
    for operand in _streams(recipe, operands):
        start = f"x{operand.index}_ptr + offset.to(tl.int64) * {_stride(recipe, operand)}"
        head = " + head" if recipe.kinds[operand.index] == "head" else ""
        body.append(f"x{operand.index}_at = {start}{head}")
    longest = "end - begin" if scalar else "tl.max(end - begin, axis=0)"
    # `while`: with NumPy 2.4 Triton's interpreter cannot take the end of a `range` from a tensor.
    body += [f"longest = {longest}", "step = 0", "while step < longest:"]
    body += [f"    {line}" for line in _step(recipe, operands, indices, known)]
    body.append(f"    step += {tile.lanes * tile.unroll}")
    if states_of(recipe.reduces, recipe.winners):
        body += store_pieces(recipe) if recipe.tasks == "pieces" else store_rows(recipe)
    types = {"accumulate": recipe.accumulate, "position": recipe.position}
    return header("gspmm_kernel", _parameters(recipe), **types) + [f"    {line}" for line in body]


def _streams(recipe: Recipe, operands: list[Operand]) -> list[Operand]:
    """Operands with one value per edge that are read along the entries."""
    if recipe.numbered or repeats(recipe):
        return []
    return [o for o in operands if o.side == "e" and _one_an_edge(recipe, o)]


def _step(
    recipe: Recipe, operands: list[Operand], indices: set[Formula], known: dict[Formula, str]
) -> list[str]:
    """One pass of the loop: all addresses, then all loads, then the arithmetic."""
    tile, formula = recipe.tile, recipe.formula
    stores = "none" in recipe.reduces
    streams = _streams(recipe, operands)
    wide_edges = [o for o in operands if o.side == "e" and o not in streams]
    wants_edge = stores or bool(wide_edges) or bool(indices)
    positions = any(s.endswith("_at") for s in states_of(recipe.reduces, recipe.winners))
    again = repeats(recipe)
    places, loads, work = ["rest = left - step"], [], []
    gathers = any(o.side == "u" for o in operands)
    if gathers and not again:
        places.append("col_here = col_at + step")
    if wants_edge and recipe.numbered and not again:
        places.append("eid_here = eid_at + step")
    places += [f"x{o.index}_here = x{o.index}_at + step * {_stride(recipe, o)}" for o in streams]
    for u in range(tile.unroll):
        far = f" + {u * tile.lanes}" if u else ""
        places.append(f"ok{u} = rest > {u * tile.lanes}")
        if again:
            places.append(f"at{u} = tl.minimum(offset + (step{far}), last)")
        elif positions or (wants_edge and not recipe.numbered):
            places.append(f"at{u} = offset + (step{far})")
        here = f"_ptr + at{u}" if again else f"_here{far}, mask=ok{u}, other=0"
        if gathers:
            places.append(f"col{u} = tl.load(col{here})")
        if wants_edge:
            places.append(f"edge{u} = " + (f"tl.load(eid{here})" if recipe.numbered else f"at{u}"))
    for u in range(tile.unroll):
        names = Names(dict(known), str(u))
        for operand in operands:
            if operand.side == "v":
                continue
            i = operand.index
            name = names.known[operand] = f"{operand.side}{i}_{u}"
            cast = operand not in indices
            if operand in streams:
                far = f" + {u * tile.lanes} * {_stride(recipe, operand)}" if u else ""
                tail = ".to(ACC)" if cast else ""
                code = f"tl.load(x{i}_here{far}, mask=ok{u}, other=0){tail}[:, None]"
            else:
                place = f"col{u}" if operand.side == "u" else f"edge{u}"
                code = _load(recipe, operand, place, "" if again else f"ok{u}", False, cast)
            loads.append(f"{name} = {code}")
        if recipe.adds:  # read along the edges, with the operands: nothing waits for it later
            loads.append(f"before{u} = tl.load(out0_ptr + edge{u}.to(tl.int64) * columns + head)")
        message = emit(formula, names, f"edge{u}[:, None]")
        work += names.lines
        if stores:
            work += store_message(recipe, message, u)
        work += reduce_lines(recipe, message, u)
    return places + loads + work


def store_message(recipe: Recipe, message: str, u: int) -> list[str]:
    """Store messages, or their sums over the width, where their edges lie."""
    tile = recipe.tile
    edges, slot = tile.rows * tile.lanes, len(recipe.reduces) - 1
    if recipe.tasks == "pieces":
        slot = len(states_of(recipe.reduces, recipe.winners))
    else:
        slot = recipe.reduces.index("none")
    out = f"out{slot}_ptr + edge{u}.to(tl.int64)"
    if not recipe.dot:
        ok = f"ok{u}[:, None]" + ("" if recipe.even else " & c_ok[None, :]")
        return [
            f"tl.store({out}[:, None] * (columns * {recipe.columns}) + c[None, :], "
            f"{message}, mask={ok})"
        ]
    lines = [f"full{u} = tl.broadcast_to({message}, [{edges}, {tile.columns}])"]
    if not recipe.even:
        lines.append(f"full{u} = tl.where(c_ok[None, :], full{u}, 0.0)")
    if recipe.heads == "one":
        # Stored by the lanes that hold the sums, first column only: a vector of sums would have to
        # be laid out anew, through shared memory.
        target = f"{out}[:, None] * columns + head + 0 * f[None, :]"
        lines += [
            f"sum{u} = tl.sum(full{u}, axis=1, keep_dims=True)"
            + f" + before{u}.to(ACC)[:, None]" * recipe.adds,
            f"sum{u} = tl.broadcast_to(sum{u}, [{edges}, {tile.columns}])",
        ]
        ok = f"ok{u}[:, None] & first_column[None, :]"
    else:  # `columns` counts whole heads: the width is a power of two
        width = recipe.columns
        heads = tile.columns // width
        lines += [
            f"sum{u} = tl.sum(tl.reshape(full{u}, [{edges}, {heads}, {width}]), axis=2)",
            f"h{u} = tl.program_id(1) * {heads} + tl.arange(0, {heads})",
        ]
        target = f"{out}[:, None] * columns + h{u}[None, :]"
        ok = f"ok{u}[:, None] & (h{u} < columns)[None, :]"
    return [*lines, f"tl.store({target}, sum{u}, mask={ok})"]
