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
    store_pieces,
    store_rows,
    task_lines,
)
from pyg_accel.formula import Formula, Operand, operands_of

__all__ = ["combine_kernel", "kernel"]

_lock = threading.Lock()


@lru_cache(maxsize=4096)
def kernel(recipe: Recipe) -> Any:
    """Return the kernel that goes over the entries."""
    return _build("gspmm_kernel", entry_lines(recipe))


@lru_cache(maxsize=1024)
def combine_kernel(recipe: Recipe) -> Any:
    """Return the kernel that puts the pieces of long rows together, in their order."""
    return _build("combine_kernel", combine_lines(recipe))


def _build(name: str, lines: list[str]) -> Any:
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
        lines = [
            "head = tl.program_id(1)",
            f"f = part * {size} + tl.arange(0, {size})",
            f"c = head * (width * {recipe.columns}) + f",
            f"c_ok = f < width * {recipe.columns}",
        ]
        return lines
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


def _offset(recipe: Recipe, index: int, place: str, scalar: bool) -> tuple[str, str]:
    """Pointer expression of an operand, and the shape of its mask: edges, columns or both."""
    kind, unit = recipe.kinds[index], recipe.aligned[index]
    base = f"{place}.to(tl.int64)"
    base = base if scalar else f"{base}[:, None]"
    start = f"x{index}_ptr + {base} * (x{index}_stride * {unit})"
    if kind == "number":
        return start, "edges"
    if kind == "head" and recipe.heads == "one":
        return f"{start} + head", "edges"
    column = {"full": "c", "head": "head", "feature": "f"}[kind]
    return f"{start} + {column}[None, :]", "both"


def _load(recipe: Recipe, operand: Operand, place: str, ok: str, scalar: bool, cast: bool) -> str:
    pointer, spread = _offset(recipe, operand.index, place, scalar)
    masks = [] if scalar else [f"{ok}[:, None]"]
    if spread == "both" and not recipe.even:
        masks.append("c_ok[None, :]")
    mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
    return f"tl.load({pointer}{mask})" + (".to(ACC)" if cast else "")


def entry_lines(recipe: Recipe) -> list[str]:
    tile, formula = recipe.tile, recipe.formula
    edges, size = tile.rows * tile.lanes, tile.columns
    scalar = tile.rows == 1  # one row: its numbers are scalars
    body = _columns(recipe) + task_lines(recipe, finish=False)
    if tile.lanes > 1 or scalar:
        body.append(f"lane = tl.arange(0, {edges})" + (f" % {tile.lanes}" if not scalar else ""))
    operands = list(dict.fromkeys(operands_of(formula)))
    indices = index_operands(formula)
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
        if state.endswith("_at"):
            body.append(f"{state} = tl.full([{edges}, {size}], NOWHERE, POS)")
        else:
            body.append(f"{state} = tl.full([{edges}, {size}], {START[state]}, ACC)")
    longest = "end - begin" if scalar else "tl.max(end - begin, axis=0)"
    # `while`: with NumPy 2.4 Triton's interpreter cannot take the end of a `range` from a tensor.
    body += [f"longest = {longest}", "step = 0", "while step < longest:"]
    body += [f"    {line}" for line in _step(recipe, operands, indices, known)]
    body.append(f"    step += {tile.lanes * tile.unroll}")
    if recipe.tasks == "pieces":
        body += store_pieces(recipe)
    elif states_of(recipe.reduces, recipe.winners):
        body += store_rows(recipe)
    return header(recipe, "gspmm_kernel", _parameters(recipe)) + [f"    {line}" for line in body]


def _step(
    recipe: Recipe, operands: list[Operand], indices: set[Formula], known: dict[Formula, str]
) -> list[str]:
    """One pass of the loop: all addresses, then all loads, then the arithmetic."""
    tile, formula = recipe.tile, recipe.formula
    stores = "none" in recipe.reduces
    sides = {o.side for o in operands}
    wants_edge = stores or "e" in sides or bool(indices)
    places, loads, work = [], [], []
    for u in range(tile.unroll):
        at = f"begin + (step + {u * tile.lanes})" if tile.unroll > 1 else "begin + step"
        if tile.lanes > 1 or tile.rows == 1:
            at += " + lane"
        places += [f"at{u} = {at}", f"ok{u} = at{u} < end"]
        if "u" in sides:
            places.append(f"col{u} = tl.load(col_ptr + at{u}, mask=ok{u}, other=0)")
        if wants_edge:
            edge = f"tl.load(eid_ptr + at{u}, mask=ok{u}, other=0)" if recipe.numbered else f"at{u}"
            places.append(f"edge{u} = {edge}")
    for u in range(tile.unroll):
        names = Names(dict(known), str(u))
        for operand in operands:
            if operand.side == "v":
                continue
            name = names.known[operand] = f"{operand.side}{operand.index}_{u}"
            place = f"col{u}" if operand.side == "u" else f"edge{u}"
            cast = operand not in indices
            loads.append(f"{name} = {_load(recipe, operand, place, f'ok{u}', False, cast)}")
        message = emit(formula, names, f"edge{u}[:, None]")
        work += names.lines
        if stores:
            work += store_message(recipe, message, u)
        work += reduce_lines(recipe, message, u)
    return places + loads + work


def store_message(recipe: Recipe, message: str, u: int) -> list[str]:
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
        target = f"{out} * columns + head"
        lines.append(f"sum{u} = tl.sum(full{u}, axis=1)")
        ok = f"ok{u}"
    else:  # width is the power of two that the head dimension was made of
        per = "WIDTH"
        lines += [
            f"WIDTH: tl.constexpr = {recipe.columns}",
            f"sum{u} = tl.sum(tl.reshape(full{u}, "
            f"[{edges}, {tile.columns} // {per}, {per}]), axis=2)",
            f"h{u} = tl.program_id(1) * ({tile.columns} // {per}) + "
            f"tl.arange(0, {tile.columns} // {per})",
        ]
        target = f"{out}[:, None] * columns + h{u}[None, :]"
        ok = f"ok{u}[:, None] & (h{u} < columns)[None, :]"
    if recipe.adds:
        lines.append(f"sum{u} += tl.load({target}, mask={ok}, other=0).to(ACC)")
    return [*lines, f"tl.store({target}, sum{u}, mask={ok})"]
