"""Kernels over the rows of a CSR matrix: gather, compute, reduce or store, in one pass.

A program has ``rows`` rows, or pieces of long rows, with ``lanes`` entries of each in parallel,
unrolled ``unroll`` times. Softmax is online: when the running maximum of the scores rises, sums are
rescaled (they "fade").
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
    shape,
    value,
)
from pyg_accel.backends.triton.expression import Names, emit, keeps_zero, per_target, stays_finite
from pyg_accel.backends.triton.recipe import RowRecipe, State
from pyg_accel.formula import Formula, Operand

__all__ = ["combine_kernel", "row_kernel"]

_START = {"product": "1.0", "most": 'float("-inf")', "least": 'float("inf")',
          "top": 'float("-inf")'}  # fmt: skip
_SUMS = ("total", "squares", "share", "norm")
_FADE = ['shift = tl.where(high == float("-inf"), 0.0, high)', "fade = tl.exp(top - shift)"]


@lru_cache(maxsize=4096)
def row_kernel(recipe: RowRecipe) -> Any:
    """Return the kernel that goes over the entries of rows, or of pieces of long ones."""
    pieces = recipe.tasks == "pieces"
    names = ["rowptr_ptr", "col_ptr", "eid_ptr", "task_ptr", "begin_ptr", "end_ptr"]
    for i in range(len(recipe.kinds)):
        names += [f"x{i}_ptr", f"x{i}_stride"]
    names += [f"{name}_ptr" for name in ([s.name for s in recipe.states] if pieces
                                         else recipe.results)]  # fmt: skip
    names += [f"out{k}_ptr" for k, output in enumerate(recipe.outputs) if output.side == "e"]
    names += ["tasks", "heads", "width", "part", "limit"]
    return build("row_kernel", names, recipe, _types(recipe), _entries(recipe))


@lru_cache(maxsize=1024)
def combine_kernel(recipe: RowRecipe) -> Any:
    """Return the kernel that puts the pieces of long rows together, in their order."""
    names = ["rowptr_ptr", "col_ptr", "eid_ptr", "task_ptr", "begin_ptr"]
    names += [f"{state.name}_in_ptr" for state in recipe.states]
    names += [f"{name}_ptr" for name in recipe.results] + ["heads", "width"]
    return build("combine_kernel", names, recipe, _types(recipe), _combination(recipe))


def _types(recipe: RowRecipe) -> list[str]:
    return [
        f"POS: tl.constexpr = tl.{recipe.position}",
        f"NOWHERE: tl.constexpr = {2**31 - 1 if recipe.position == 'int32' else 2**63 - 1}",
    ]


def _edges(recipe: RowRecipe) -> int:
    return recipe.tile.rows * recipe.tile.lanes


def _formulas(recipe: RowRecipe) -> list[Formula]:
    scores = [] if recipe.score is None else [recipe.score]
    return [*scores, *(output.formula for output in recipe.outputs)]


def _tasks(recipe: RowRecipe) -> list[str]:
    """`task`, `row`, `begin`, `end`, `keep` of every edge lane (scalars if all are of one row)."""
    rows, lanes = recipe.tile.rows, recipe.tile.lanes
    mask = ", mask=task < tasks, other=0" if rows > 1 else ""
    if rows == 1:
        lines = ["task = tl.program_id(0)", f"lane = tl.arange(0, {lanes})"]
    elif lanes == 1:
        lines = [f"task = tl.program_id(0) * {rows} + tl.arange(0, {rows})"]
    else:
        lines = [f"task = tl.program_id(0) * {rows} + tl.arange(0, {rows * lanes}) // {lanes}",
                 f"lane = tl.arange(0, {rows * lanes}) % {lanes}"]  # fmt: skip
    lines.append("keep = task < tasks")
    own = f"tl.load(task_ptr + task{mask})"
    lines.append("row = task" if recipe.tasks == "rows" else f"row = {own}")
    begin, end = ("begin_ptr + task", "end_ptr + task")
    if recipe.tasks != "pieces":
        begin, end = ("rowptr_ptr + row", "rowptr_ptr + row + 1")
    lines += [f"begin = tl.load({begin}{mask}).to(POS)", f"end = tl.load({end}{mask}).to(POS)"]
    if recipe.hubs:
        if rows == 1:
            # For stores one per edge lane: Triton 3.9 interprets a scalar with a block as numbers.
            lines.append("keeps = lane * 0 + (end - begin) <= limit")
        lines += ["keep = keep & (end - begin <= limit)", "end = tl.where(keep, end, begin)"]
    return lines


def _entries(recipe: RowRecipe) -> list[str]:
    tile, formulas = recipe.tile, _formulas(recipe)
    scalar = tile.rows == 1  # one row: its numbers are scalars
    operands, indices = operands_read(formulas), selectors(formulas)
    body = column_lines(recipe, "part" * recipe.adds) + _tasks(recipe)
    computed: dict[Formula, str] = {}
    for o in operands:
        if o.side == "v":
            computed[o] = f"v{o.index}"
            code = load(recipe, o.index, "row", "keep", scalar=scalar, cast=o not in indices)
            body.append(f"{computed[o]} = {code}")
    invariants = names_of(recipe, computed, "row")
    for part in dict.fromkeys(part for formula in formulas for part in per_target(formula)):
        emit(part, invariants, "")
    body += invariants.lines + _starts(recipe, _edges(recipe))
    # Pointers move with `offset` and `step`; the edges of a step are at constant distances.
    body.append("offset = begin + lane" if tile.lanes > 1 or scalar else "offset = begin")
    body.append("left = end - offset")
    if _clamps(recipe):
        body.append("last = tl.maximum(end - 1, 0)")
    else:
        body.append("col_at = col_ptr + offset")
        body += ["eid_at = eid_ptr + offset"] * recipe.numbered
    longest = "end - begin" if scalar else "tl.max(end - begin, axis=0)"
    # `while`: with NumPy 2.4 Triton's interpreter cannot take the end of a `range` from a tensor.
    body += [f"longest = {longest}", "step = 0", "while step < longest:"]
    moving = [o for o in operands if o.side != "v"]
    body += [f"    {line}" for line in _reads(recipe, moving, indices)]
    body += [f"    {line}" for line in _step(recipe, invariants.computed, moving)]
    body.append(f"    step += {tile.lanes * tile.unroll}")
    body += _fold(recipe)
    if recipe.tasks == "pieces":
        return [*body, _at("task", scalar), *_stores(recipe, {s.name: s for s in recipe.states})]
    return [*body, *_finish(recipe)]


def _starts(recipe: RowRecipe, edges: int) -> list[str]:
    lines = []
    for state in recipe.states:
        at = state.kind.endswith("_at")
        start = "NOWHERE, POS" if at else f"{_START.get(state.kind, '0.0')}, ACC"
        lines.append(f"{state.name} = tl.full({shape(recipe, state.shape, edges)}, {start})")
    return lines


def _clamps(recipe: RowRecipe) -> bool:
    """Whether absent entries of a row repeat its last entry, rather than read as zeros.

    Then loads need no masks, and maxima are right. Sums must exclude repeated entries, which costs
    more than zeros if the message of an entry is computed.
    """
    if recipe.score is not None or recipe.infinite >= 0:
        return False
    formulas = [output.formula for output in recipe.outputs if output.side != "e"]
    if not formulas or any(s.kind not in ("total", "squares") for s in recipe.states):
        return True
    return any(isinstance(f, Operand) or not keeps_zero(f) for f in formulas)


def _reads(recipe: RowRecipe, moving: list[Operand], indices: set[Formula]) -> list[str]:
    """All addresses, then all loads of one pass of the loop: `u0_1` is operand 0 of edge tile 1."""
    tile, clamps = recipe.tile, _clamps(recipe)
    gathers = any(o.side == "u" for o in moving)
    edges = any(o.side == "e" for o in moving) or bool(indices)
    edges = edges or any(output.side == "e" for output in recipe.outputs)
    positions = bool(recipe.winners) or (edges and not recipe.numbered)
    lines, loads = ["remaining = left - step"], []
    if gathers and not clamps:
        lines.append("col_here = col_at + step")
    if edges and recipe.numbered and not clamps:
        lines.append("eid_here = eid_at + step")
    for u in range(tile.unroll):
        far = f" + {u * tile.lanes}" if u else ""
        lines.append(f"ok{u} = remaining > {u * tile.lanes}")
        if clamps:
            lines.append(f"at{u} = tl.minimum(offset + (step{far}), last)")
        elif positions:
            lines.append(f"at{u} = offset + (step{far})")
        here = f"_ptr + at{u}" if clamps else f"_here{far}, mask=ok{u}, other=0"
        if gathers:
            lines.append(f"col{u} = tl.load(col{here})")
        if edges:
            lines.append(f"edge{u} = " + (f"tl.load(eid{here})" if recipe.numbered else f"at{u}"))
        for o in moving:
            code = load(
                recipe, o.index, f"col{u}" if o.side == "u" else f"edge{u}",
                "" if clamps else f"ok{u}", scalar=False, cast=o not in indices,
                other='float("inf")' if o.index == recipe.infinite else "0",
            )  # fmt: skip
            loads.append(f"{o.side}{o.index}_{u} = {code}")
        if recipe.adds:  # read along the edges, with the operands: nothing waits for it later
            loads.append(f"before{u} = tl.load(out0_ptr + edge{u}.to(tl.int64) * heads + head)")
    return lines + loads


def _step(recipe: RowRecipe, computed: dict[Formula, str], moving: list[Operand]) -> list[str]:
    """The arithmetic of one pass of the loop; equal parts are computed once."""
    unroll = recipe.tile.unroll
    names = [
        names_of(recipe, {**computed, **{o: f"{o.side}{o.index}_{u}" for o in moving}}, str(u))
        for u in range(unroll)
    ]
    lines = _scores(recipe, names) if recipe.score is not None else []
    for u in range(unroll):
        for k, output in enumerate(recipe.outputs):
            if output.side == "e":
                names[u].lines += _message(recipe, names[u], k, u)
        for state in recipe.states:
            if state.formula is not None:
                names[u].lines += _reduced(recipe, names[u], state, u)
        lines += names[u].lines
    return lines


def _scores(recipe: RowRecipe, names: list[Names]) -> list[str]:
    """Scores of all edge tiles, the new maximum, and the rescaling of earlier sums."""
    lines: list[str] = []
    assert recipe.score is not None
    for u, each in enumerate(names):
        score = value(recipe, each, recipe.score, "head", _edges(recipe), f"edge{u}")
        lines += each.lines
        each.lines.clear()
        lines.append(f's{u} = tl.where(ok{u}[:, None, None], {score}, float("-inf"))')
    lines.append("high = top")
    lines += [f"high = tl.maximum(high, s{u})" for u in range(len(names))]
    lines += [*_FADE, "top = high"]
    lines += [f"{s.name} *= fade" for s in recipe.states if s.kind in ("norm", "share")]
    for u in range(len(names)):
        lines += [f"p{u} = tl.exp(s{u} - shift)", f"norm += p{u}"]
    return lines


def _message(recipe: RowRecipe, names: Names, k: int, u: int) -> list[str]:
    """Store messages, or their sums over the width, in the rows of their edges."""
    formula, kind, edges = recipe.outputs[k].formula, recipe.stored[k], _edges(recipe)
    name = value(recipe, names, formula, kind, edges, f"edge{u}")
    row = f"edge{u}.to(tl.int64)[:, None, None]"
    to, mask = place(recipe, kind, row, [f"ok{u}[:, None, None]"], formula)
    before = f" + before{u}.to(ACC)[:, None, None]" * recipe.adds
    whole = f"tl.broadcast_to({name}{before}, {block(recipe, edges)})"
    return [f"tl.store(out{k}_ptr + {to}, {whole}, mask={mask})"]


def _reduced(recipe: RowRecipe, names: Names, state: State, u: int) -> list[str]:
    """Reduce messages into a state."""
    assert state.formula is not None
    name, kind, ok = state.name, state.kind, f"ok{u}[:, None, None]"
    message = value(recipe, names, state.formula, state.shape, _edges(recipe), f"edge{u}")
    if kind == "share":
        part = f"p{u} * {message}"
        if not stays_finite(state.formula):
            part = f"tl.where({ok}, {part}, 0.0)"
        return [f"{name} += {part}"]
    if kind == "product":
        return [f"{name} *= tl.where({ok}, {message}, 1.0)"]
    if kind in ("most", "least"):
        return _better(recipe, name, kind, message, f"at{u}[:, None, None]", ok)
    lines = []
    if _clamps(recipe) or (recipe.infinite < 0 and not keeps_zero(state.formula)):
        lines.append(f"{message} = tl.where({ok}, {message}, 0.0)")
    return [*lines, f"{name} += {message}" + f" * {message}" * (kind == "squares")]


def _better(
    recipe: RowRecipe, name: str, kind: str, message: str, position: str, ok: str = ""
) -> list[str]:
    """Take the larger (smaller) value; ties go to the first."""
    sign, function = (">", "maximum") if kind == "most" else ("<", "minimum")
    if not recipe.winners:
        return [f"{name} = tl.{function}({name}, {message}, propagate_nan=tl.PropagateNan.ALL)"]
    return [
        f"better = ({message} {sign} {name}) | ({name}_at == NOWHERE) | "
        f"(({message} != {message}) & ({name} == {name}))",
        *([f"better = better & {ok}"] if ok else []),
        f"{name} = tl.where(better, {message}, {name})",
        f"{name}_at = tl.where(better, {position}, {name}_at)",
    ]


def _fold(recipe: RowRecipe) -> list[str]:
    """Reduce the lanes of each row; every lane gets the result, and shapes are unchanged."""
    tile = recipe.tile
    if tile.lanes == 1:
        return []
    axis = 1 if tile.rows > 1 else 0
    apart = f"{tile.rows}, {tile.lanes}" if tile.rows > 1 else f"{tile.lanes}"
    lines, last = [], []
    for state in recipe.states:
        wide = shape(recipe, state.shape, apart)
        if tile.rows > 1:
            lines.append(f"{state.name} = tl.reshape({state.name}, {wide})")
        last.append(f"{state.name} = tl.broadcast_to({state.name}, {wide})")
        if tile.rows > 1:
            flat = shape(recipe, state.shape, _edges(recipe))
            last.append(f"{state.name} = tl.reshape({state.name}, {flat})")
    if recipe.score is not None:
        lines += [f"high = tl.max(top, axis={axis}, keep_dims=True)", *_FADE, "top = high"]
    for state in recipe.states:
        name, kind = state.name, state.kind
        if kind in ("share", "norm"):
            lines.append(f"{name} *= fade")
        if kind in _SUMS:
            lines.append(f"{name} = tl.sum({name}, axis={axis}, keep_dims=True)")
        elif kind == "product":
            lines.append(f"{name} = tl.reduce({name}, {axis}, multiply, keep_dims=True)")
        elif kind in ("most", "least"):
            minus = "-" if kind == "least" else ""
            lines.append(f"best = {minus}most_of({minus}{name}, {axis})")
            if recipe.winners:  # of the lanes with the best value, the first in the row
                lines += [
                    f"wins = ({name} == best) | (({name} != {name}) & (best != best))",
                    f"{name}_at = tl.min(tl.where(wins, {name}_at, NOWHERE), axis={axis}, "
                    "keep_dims=True)",
                ]
            lines.append(f"{name} = best")
    return lines + last


def _at(row: str, scalar: bool) -> str:
    """`place`: the row of every lane."""
    return f"place = ({row}.to(tl.int64)" + (" + lane * 0" if scalar else "") + ")[:, None, None]"


def _stores(recipe: RowRecipe, results: dict[str, State], *, whole: bool = False) -> list[str]:
    """Store results, by the names of their pointers; ``whole`` rows need no mask."""
    tile, masks = recipe.tile, []
    if not whole and (tile.rows > 1 or (recipe.hubs and recipe.tasks != "pieces")):
        masks.append("keeps[:, None, None]" if tile.rows == 1 else "keep[:, None, None]")
    if tile.lanes > 1:
        masks.append("(lane == 0)[:, None, None]")
    lines = []
    for name, state in results.items():
        to, mask = place(recipe, state.shape, "place", masks)
        mask = f", mask={mask}" if mask else ""
        if len(results) > 2 and recipe.score is None:
            mask += ', cache_modifier=".cs"'  # so many would drive the features out of the L2
        lines.append(f"tl.store({name}_ptr + {to}, {state.name}{mask})")
    return lines


def _finish(recipe: RowRecipe, *, whole: bool = False) -> list[str]:
    """Compute results from states."""
    scalar = recipe.tile.rows == 1
    count = "count = (end - begin)" + ("" if scalar else "[:, None, None]")
    lines, results = [count, _at("row", scalar)], {}
    if recipe.score is not None:
        lines.append("norm = tl.where(count > 0, norm, 1.0)")
    for k, output in enumerate(recipe.outputs):
        if output.side == "e":
            continue
        state = recipe.state_of(k)
        code = {
            "mean": f"{state.name} / tl.maximum(count, 1).to(ACC)",
            "max": f"tl.where(count > 0, {state.name}, 0.0)",
            "min": f"tl.where(count > 0, {state.name}, 0.0)",
        }.get(output.reduce, state.name)
        code = f"{state.name} / norm" if recipe.score is not None else code
        lines.append(f"result{k} = {code}")
        results[f"out{k}"] = State(f"result{k}", "", state.shape)
    if recipe.score is not None:
        lines += ['largest = tl.where(top == float("-inf"), 0.0, top)', "inverse = 1.0 / norm"]
        results |= {name: State(name, "", "head") for name in ("largest", "inverse")}
    source = "col_ptr" if recipe.winners == "col" else "eid_ptr"
    for k, output in enumerate(recipe.outputs):
        if recipe.winners and output.reduce in ("max", "min"):
            at = f"{recipe.state_of(k).name}_at"
            lines.append(f"exists = {at} != NOWHERE")
            if recipe.winners == "col" or recipe.numbered:
                lines.append(f"winner{k} = tl.load({source} + {at}, mask=exists, other=-1)")
            else:
                lines.append(f"winner{k} = tl.where(exists, {at}, -1)")
            results[f"winner{k}"] = State(f"winner{k}", "", recipe.stored[k])
    return lines + _stores(recipe, results, whole=whole)


def _combination(recipe: RowRecipe) -> list[str]:
    """A program combines the pieces of one long row, some columns at a time."""
    lanes = recipe.tile.lanes
    step = ["at = begin + step + lane", "ok = (at < end)[:, None, None]",
            "place = at.to(tl.int64)[:, None, None]"]  # fmt: skip
    for state in recipe.states:
        to, mask = place(recipe, state.shape, "place", ["ok"])
        other = "NOWHERE" if state.kind.endswith("_at") else _START.get(state.kind, "0.0")
        step.append(f"{state.name}_in = tl.load({state.name}_in_ptr + {to}, mask={mask}, "
                    f"other={other})")  # fmt: skip
    if recipe.score is not None:
        step += ["high = tl.maximum(top, top_in)", *_FADE, "part = tl.exp(top_in - shift)",
                 "top = high"]  # fmt: skip
    for state in recipe.states:
        name, kind = state.name, state.kind
        if kind in ("share", "norm"):
            step.append(f"{name} = {name} * fade + {name}_in * part")
        elif kind in ("total", "squares"):
            step.append(f"{name} += {name}_in")
        elif kind == "product":
            step.append(f"{name} *= {name}_in")
        elif kind in ("most", "least"):  # pieces come in order: an equal value is not better
            step += _better(recipe, name, kind, f"{name}_in", f"{name}_at_in")
    return [
        *column_lines(recipe),
        "task = tl.program_id(0)",
        "row = tl.load(task_ptr + task)",
        "begin = tl.load(begin_ptr + task)",
        "end = tl.load(begin_ptr + task + 1)",
        f"lane = tl.arange(0, {lanes})",
        *_starts(recipe, lanes),
        "step = 0",
        "while step < end - begin:",
        *(f"    {line}" for line in step),
        f"    step += {lanes}",
        *_fold(recipe),
        "begin = tl.load(rowptr_ptr + row)",
        "end = tl.load(rowptr_ptr + row + 1)",
        *_finish(recipe, whole=True),
    ]
