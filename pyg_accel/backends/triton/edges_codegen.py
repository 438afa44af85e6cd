"""Kernels over an edge list, in its order, without a CSR matrix.

A program has ``unroll`` blocks of ``lanes`` edges by ``heads`` by ``columns``: a lane takes
``unroll`` neighbouring edges. Runs of neighbours with one target (or source) are reduced in
registers, and an atomic operation adds each run to memory: correct for any order of the edges, and
few operations for sorted edges or nodes with many.

Maxima are stored as unsigned integers of the same order (``ordered``), so that 0 is below all
numbers. Invalid ids are an error on the device; they read and write nothing.
"""

from functools import lru_cache
from typing import Any

from pyg_accel.backends.triton.emitter import (
    block,
    build,
    column_lines,
    load,
    names_of,
    operands_read,
    place,
    selectors,
    value,
)
from pyg_accel.backends.triton.expression import Names
from pyg_accel.backends.triton.recipe import EdgeRecipe
from pyg_accel.formula import Operand

__all__ = ["edge_kernel"]

_IDS = {"u": "col", "v": "row"}


@lru_cache(maxsize=4096)
def edge_kernel(recipe: EdgeRecipe) -> Any:
    """Return the kernel of one pass."""
    names = ["edges_ptr"]
    for i in range(len(recipe.kinds)):
        names += [f"x{i}_ptr", f"x{i}_stride"]
    names += [f"out{k}_ptr" for k in range(len(recipe.outputs))]
    names += ["entries", "num_cols", "num_rows", "source_at", "target_at", "step", "listed"]
    names += ["heads", "width"]
    bits = f"BITS: tl.constexpr = tl.uint{64 if recipe.accumulate == 'float64' else 32}"
    return build("edge_kernel", names, recipe, [bits], _lines(recipe))


def _lines(recipe: EdgeRecipe) -> list[str]:
    body = [*column_lines(recipe), *_ids(recipe)]
    formulas = [output.formula for output in recipe.outputs]
    operands, indices = operands_read(formulas), selectors(formulas)
    for u in range(recipe.unroll):
        body += [_load(recipe, operand, u, operand in indices) for operand in operands]
        for k, output in enumerate(recipe.outputs):
            if output.reduce == "winner":
                row = f"{_IDS[output.side]}{u}"
                code = load(recipe, output.of, row, f"ok{u}", scalar=False, cast=False)
                body.append(f"best{k}_{u} = {code}")
    floats = [o for o in operands if o not in indices]
    body += [_trap(recipe, floats[0])] if recipe.traps and floats else []
    sides = dict.fromkeys(output.side for output in recipe.outputs if output.side != "e")
    for u in range(recipe.unroll):
        names = names_of(recipe, {o: f"{o.side}{o.index}_{u}" for o in operands}, str(u))
        body += [line for side in sides for line in _runs(side, u)]
        for k, output in enumerate(recipe.outputs):
            name = _value(recipe, names, k, u)
            body += names.lines
            names.lines.clear()
            body += _store(recipe, k, name, u) if output.side == "e" else _add(recipe, k, name, u)
        body += [f"at_{side} = to_{side}{u}" for side in sides]
    for k, output in enumerate(recipe.outputs):
        if output.side != "e":
            body += [f"going = at_{output.side} >= 0", *_flush(recipe, k)]
    return body


def _ids(recipe: EdgeRecipe) -> list[str]:
    """`at`, `row`, `col`, `wrong` (-1 for ids of no node) and `ok` of every edge."""
    lanes, unroll = recipe.lanes, recipe.unroll
    lines = [f"first = tl.program_id(0) * {lanes * unroll} + tl.arange(0, {lanes}) * {unroll}"]
    for u in range(unroll):
        lines += [
            f"at{u} = first + {u}",
            f"place{u} = at{u}.to(tl.int64) * step",
            f"ok{u} = at{u} < listed",
            *(f"{name}{u} = tl.load(edges_ptr + {at} + place{u}, mask=ok{u}, other=-1).to(tl.int64)"
              for name, at in (("row", "target_at"), ("col", "source_at"))),
        ]  # fmt: skip
    for u in range(unroll):
        # Signs instead of comparisons and `where`, to which Triton 3.6 gives layouts that differ.
        if recipe.loops:  # ids are -1 where nothing was read
            lines += [
                f"behind{u} = (at{u} - listed).to(tl.int64)",
                f"own{u} = (behind{u} + 1) & ~(behind{u} >> 63)",
                f"other{u} = row{u} ^ col{u}",
                f"other{u} = (other{u} | -other{u} | ~(behind{u} >> 63)) >> 63",
                *(f"{name}{u} = {name}{u} + own{u}" for name in ("row", "col")),
            ]
        wrong = f"(row{u} | col{u} | (num_rows - 1 - row{u}) | (num_cols - 1 - col{u})) >> 63"
        dropped = f" | ~other{u} | ((entries - 1 - at{u}) >> 31)" if recipe.loops else ""
        lines += [
            f"wrong{u} = ({wrong}).to(tl.int32)",
            f"row{u} = (row{u} | wrong{u}{dropped}).to(tl.int32)",
            f"col{u} = (col{u} | wrong{u}{dropped}).to(tl.int32)",
            f"ok{u} = row{u} >= 0",
        ]
    return lines


def _trap(recipe: EdgeRecipe, operand: Operand) -> str:
    """Pass an operand through, and trap if an id of a node is invalid.

    device_assert would read ids in a second layout, as it does not work on features.
    """
    wrong = " | ".join(f"((wrong{u} < 0) & (at{u} < entries))" for u in range(recipe.unroll))
    kind, bits = ("d", 64) if recipe.accumulate == "float64" else ("f", 32)
    code = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p trap; mov.f{bits} $0, $1; }}"
    name = f"{operand.side}{operand.index}_0"
    return (
        f"{name} = tl.inline_asm_elementwise('{code}', '={kind},{kind},r', "
        f"[{name}, ({wrong}).to(tl.int32)[:, None, None]], dtype=tl.{recipe.accumulate}, "
        "is_pure=True, pack=1)"
    )


def _load(recipe: EdgeRecipe, operand: Operand, u: int, is_index: bool) -> str:
    row = f"at{u}" if operand.side == "e" else f"{_IDS[operand.side]}{u}"
    ordered = recipe.ordered[operand.index]
    code = load(recipe, operand.index, row, f"ok{u}", scalar=False, cast=not (ordered or is_index))
    if ordered:
        code = f"{'-' if ordered == 'min' else ''}from_ordered({code}, ACC)"
    return f"{operand.side}{operand.index}_{u} = {code}"


def _runs(side: str, u: int) -> list[str]:
    """Whether an edge continues the run of its lane, or ends it (`going`)."""
    lines = [f"to_{side}{u} = {_IDS[side]}{u}"]
    if u == 0:
        return [*lines, f"at_{side} = to_{side}0"]
    return [
        *lines,
        f"same_{side} = (to_{side}{u} == at_{side})[:, None, None]",
        f"ends_{side} = (to_{side}{u} != at_{side}) & (at_{side} >= 0)",
    ]


def _value(recipe: EdgeRecipe, names: Names, k: int, u: int) -> str:
    """Emit the contribution of an edge to an output; return its name."""
    output = recipe.outputs[k]
    name = value(recipe, names, output.formula, recipe.stored[k], recipe.lanes, f"at{u}")
    if output.reduce == "sum":
        return name
    of = output.reduce if output.reduce != "winner" else recipe.ordered[output.of]
    names.lines.append(f"b{k} = ordered({'-' if of == 'min' else ''}{name}, BITS)")
    if output.reduce == "winner":  # the first edge of the lowest source: the largest number
        number = f"(col{u}.to(tl.int64) << 32) | at{u}.to(tl.int64)"
        names.lines += [
            f"n{k} = ({2**63 - 1} - ({number}))[:, None, None]",
            f"b{k} = tl.where((b{k} == best{k}_{u}) & ok{u}[:, None, None], n{k}, 0)",
        ]
    return f"b{k}"


def _add(recipe: EdgeRecipe, k: int, name: str, u: int) -> list[str]:
    """Add a value to the run of its lane, or flush the run and start another."""
    side, reduce = recipe.outputs[k].side, recipe.outputs[k].reduce
    if u == 0:
        return [f"acc{k} = {name}"]
    both = f"acc{k} + {name}" if reduce == "sum" else f"tl.maximum(acc{k}, {name})"
    return [
        f"going = ends_{side}",
        *_flush(recipe, k),
        f"acc{k} = tl.where(same_{side}, {both}, {name})",
    ]


def _flush(recipe: EdgeRecipe, k: int) -> list[str]:
    output = recipe.outputs[k]
    lines = _spread(recipe, k, f"at_{output.side}", "going", f"acc{k}")
    if output.reduce == "sum":
        return [*lines, 'tl.atomic_add(place, spread, mask=mask, sem="relaxed")']
    # Most edges change nothing: a load is cheaper, and its value is never too large.
    return [
        *lines,
        "mask = mask & (spread > tl.load(place, mask=mask, other=0))",
        'tl.atomic_max(place, spread, mask=mask, sem="relaxed")',
    ]


def _store(recipe: EdgeRecipe, k: int, name: str, u: int) -> list[str]:
    lines = _spread(recipe, k, f"at{u}", f"ok{u}", name)
    if recipe.is_atomic(k):
        return [*lines, 'tl.atomic_add(place, spread, mask=mask, sem="relaxed")']
    return [*lines, "tl.store(place, spread, mask=mask)"]


def _spread(recipe: EdgeRecipe, k: int, row: str, ok: str, name: str) -> list[str]:
    """`place`, `mask` and `spread`: pointer, mask and value of a store, as a whole block."""
    row, ok = f"{row}.to(tl.int64)[:, None, None]", f"{ok}[:, None, None]"
    to, mask = place(recipe, recipe.stored[k], row, [ok], recipe.outputs[k].formula)
    spread = f"tl.broadcast_to({name}, {block(recipe, recipe.lanes)})"
    return [f"place = out{k}_ptr + {to}", f"mask = {mask}", f"spread = {spread}"]
