"""Kernel lines that reduce messages over rows, and put the pieces of long rows together."""

from pyg_accel.backends.triton.expression import keeps_zero
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.recipe import ACCUMULATORS, START, Recipe, states_of, winning
from pyg_accel.formula import Operand

__all__ = [
    "combine_lines",
    "header",
    "reduce_lines",
    "repeats",
    "store_pieces",
    "store_rows",
    "task_lines",
]


def header(
    name: str, parameters: list[str], *, accumulate: str, position: str = "int32"
) -> list[str]:
    """The signature, and the types that the body speaks of."""
    return [
        f"def {name}({', '.join(parameters)}):",
        f"    ACC: tl.constexpr = tl.{accumulate}",
        f"    POS: tl.constexpr = tl.{position}",
        f"    NOWHERE: tl.constexpr = {2**31 - 1 if position == 'int32' else 2**63 - 1}",
    ]


def task_lines(tile: Tile, tasks: str, *, hubs: bool) -> list[str]:
    """`task`, `row`, `begin`, `end`, `keep` of every edge lane (scalars if all are of one row)."""
    rows, lanes = tile.rows, tile.lanes
    mask = ", mask=task < tasks, other=0" if rows > 1 else ""
    if rows == 1:
        lines = ["task = tl.program_id(0)", f"lane = tl.arange(0, {lanes})"]
    elif lanes == 1:
        lines = [f"task = tl.program_id(0) * {rows} + tl.arange(0, {rows})"]
    else:
        lines = [f"task = tl.program_id(0) * {rows} + tl.arange(0, {rows * lanes}) // {lanes}",
                 f"lane = tl.arange(0, {rows * lanes}) % {lanes}"]  # fmt: skip
    lines.append("keep = task < tasks")
    lines.append("row = task" if tasks == "rows" else f"row = tl.load(task_ptr + task{mask})")
    begin, end = ("begin_ptr + task", "end_ptr + task")
    if tasks != "pieces":
        begin, end = ("rowptr_ptr + row", "rowptr_ptr + row + 1")
    lines += [f"begin = tl.load({begin}{mask}).to(POS)", f"end = tl.load({end}{mask}).to(POS)"]
    if hubs:
        if rows == 1:
            # For stores one per edge lane: Triton 3.9 interprets a scalar with a block as numbers.
            lines.append("keeps = lane * 0 + (end - begin) <= limit")
        lines += ["keep = keep & (end - begin <= limit)", "end = tl.where(keep, end, begin)"]
    return lines


def repeats(recipe: Recipe) -> bool:
    """Whether entries that a row lacks are read as its last one again, rather than as zeros.

    Then loads need no masks and no zeros to begin with, and maxima are what they are; sums have to
    leave out what is there twice, which costs more than zeros where an entry's message is computed.
    """
    kept = set(states_of(recipe.reduces, recipe.winners))
    if not kept or not kept <= {"total", "squares"}:
        return True
    return isinstance(recipe.formula, Operand) or not keeps_zero(recipe.formula)


def reduce_lines(recipe: Recipe, message: str, u: int) -> list[str]:
    """Add messages [edges, columns] to the accumulators."""
    lines, ok = [], f"ok{u}[:, None]"
    kept = states_of(recipe.reduces, recipe.winners)
    zero = message
    if {"total", "squares"} & set(kept) and repeats(recipe):
        zero = f"m{u}"
        lines.append(f"{zero} = tl.where({ok}, {message}, 0.0)")
    if "total" in kept:
        lines.append(f"total += {zero}")
    if "squares" in kept:
        lines.append(f"squares += {zero} * {zero}")
    if "product" in kept:
        lines.append(f"product *= tl.where({ok}, {message}, 1.0)")
    for state, sign, name in (("most", ">", "maximum"), ("least", "<", "minimum")):
        if f"{state}_at" in kept:
            lines += [
                f"better = ({message} {sign} {state}) | ({state}_at == NOWHERE) | "
                f"(({message} != {message}) & ({state} == {state}))",
                f"better = better & {ok}",
                f"{state} = tl.where(better, {message}, {state})",
                f"{state}_at = tl.where(better, at{u}[:, None], {state}_at)",
            ]
        elif state in kept:
            lines.append(f"{state} = tl.{name}({state}, {message}, "
                         "propagate_nan=tl.PropagateNan.ALL)")  # fmt: skip
    return lines


def fold(recipe: Recipe) -> list[str]:
    """Give every lane what all lanes of its row have together.

    The shape stays [edges, columns], so that results leave from where they are.
    """
    tile = recipe.tile
    lines: list[str] = []
    if tile.lanes == 1:
        return lines
    kept = states_of(recipe.reduces, recipe.winners)
    for state in kept:
        if state.endswith("_at"):
            continue
        names = [state] + ([f"{state}_at"] if f"{state}_at" in kept else [])
        if tile.rows > 1:
            shape = f"[{tile.rows}, {tile.lanes}, {tile.columns}]"
            lines += [f"{name} = tl.reshape({name}, {shape})" for name in names]
        lines += _fold_state(state, len(names) > 1, 1 if tile.rows > 1 else 0)
        shape = f"[{tile.lanes}, {tile.columns}]"
        if tile.rows > 1:
            shape = f"[{tile.rows}, {tile.lanes}, {tile.columns}]"
        for name in names:
            lines.append(f"{name} = tl.broadcast_to({name}, {shape})")
            if tile.rows > 1:
                flat = f"[{tile.rows * tile.lanes}, {tile.columns}]"
                lines.append(f"{name} = tl.reshape({name}, {flat})")
    return lines


def _fold_state(state: str, positions: bool, axis: int) -> list[str]:
    if state in ("total", "squares"):
        return [f"{state} = tl.sum({state}, axis={axis}, keep_dims=True)"]
    if state == "product":
        return [f"product = tl.reduce(product, {axis}, multiply, keep_dims=True)"]
    minus = "-" if state == "least" else ""
    best = f"{minus}most_of({minus}{state}, {axis})"
    if not positions:
        return [f"{state} = {best}"]
    return [  # of the lanes that have the best value, the one that comes first in the row
        f"best = {best}",
        f"wins = ({state} == best) | (({state} != {state}) & (best != best))",
        f"{state}_at = tl.min(tl.where(wins, {state}_at, NOWHERE), axis={axis}, keep_dims=True)",
        f"{state} = best",
    ]


def store_pieces(recipe: Recipe) -> list[str]:
    """Store accumulators as they are."""
    place = _place(recipe, "task", recipe.tile.rows == 1)
    lines = [*fold(recipe), f"place = {place}"]
    for i, state in enumerate(states_of(recipe.reduces, recipe.winners)):
        lines.append(f"tl.store(out{i}_ptr + place, {state}{_result_mask(recipe, True)})")
    return lines


def store_rows(recipe: Recipe) -> list[str]:
    """Store the results of a tile's rows."""
    return fold(recipe) + _finish(recipe, recipe.tile.rows == 1)


def _place(recipe: Recipe, row: str, scalar: bool) -> str:
    """[edges, columns], where the results of a row belong."""
    start = f"{row}.to(tl.int64)" + ("" if scalar else "[:, None]")
    place = f"{start} * (columns * {recipe.columns}) + c[None, :]"
    return f"{place} + lane[:, None] * 0" if scalar else place


def _result_mask(recipe: Recipe, kept: bool) -> str:
    """Rows that are there and not left to others; one lane of each; columns that are there."""
    tile, masks = recipe.tile, []
    if kept and (recipe.hubs or tile.rows > 1):
        masks.append("keeps[:, None]" if tile.rows == 1 else "keep[:, None]")
    if tile.lanes > 1:
        masks.append("(lane == 0)[:, None]")
    if not recipe.even:
        masks.append("c_ok[None, :]")
    return f", mask={' & '.join(masks)}" if masks else ""


def _finish(recipe: Recipe, scalar: bool, kept: bool = True) -> list[str]:
    """From accumulators to results, both [edges, columns]."""
    spread = "" if scalar else "[:, None]"
    lines = [f"count = (end - begin){spread}", f"place = {_place(recipe, 'row', scalar)}"]
    mask = _result_mask(recipe, kept)
    if len(recipe.reduces) > 1:  # so many results would drive the features out of the L2
        mask += ', cache_modifier=".cs"'
    for i, reduce in enumerate(recipe.reduces):
        state = ACCUMULATORS.get(reduce)
        if state is None:
            continue
        value = state
        if reduce == "mean":
            value = "total / tl.maximum(count, 1).to(ACC)"
        elif reduce in ("max", "min"):
            value = f"tl.where(count > 0, {state}, 0.0)"
        lines.append(f"tl.store(out{i}_ptr + place, {value}{mask})")
    source = "col_ptr" if recipe.winners == "col" else "eid_ptr"
    for i, state in winning(recipe):
        lines.append(f"found = {state}_at != NOWHERE")
        if recipe.winners == "col" or recipe.numbered:
            lines.append(f"winner = tl.load({source} + {state}_at, mask=found, other=-1)")
        else:
            lines.append(f"winner = tl.where(found, {state}_at, -1)")
        lines.append(f"tl.store(winner{i}_ptr + place, winner{mask})")
    return lines


def combine_lines(recipe: Recipe) -> list[str]:
    """A program puts the pieces of one long row together, some columns at a time."""
    states = states_of(recipe.reduces, recipe.winners)
    tile = recipe.tile
    parameters = ["rowptr_ptr", "col_ptr", "eid_ptr", "task_ptr", "begin_ptr"]
    parameters += [f"{state}_ptr" for state in states]
    parameters += [f"out{i}_ptr" for i in range(len(recipe.reduces))]
    parameters += [f"winner{i}_ptr" for i, _ in winning(recipe)] + ["columns"]
    body = [
        "task = tl.program_id(0)",
        "row = tl.load(task_ptr + task)",
        "begin = tl.load(begin_ptr + task)",
        "end = tl.load(begin_ptr + task + 1)",
        f"c = tl.program_id(1) * {tile.columns} + tl.arange(0, {tile.columns})",
        f"c_ok = c < columns * {recipe.columns}",
        f"lane = tl.arange(0, {tile.lanes})",
    ]
    for state in states:
        start = "NOWHERE, POS" if state.endswith("_at") else f"{START[state]}, ACC"
        body.append(f"{state} = tl.full([{tile.lanes}, {tile.columns}], {start})")
    body += ["step = 0", "while step < end - begin:"]
    body += [f"    {line}" for line in _combine_step(recipe, states)]
    body.append(f"    step += {tile.lanes}")
    body += fold(recipe)
    body += ["begin = tl.load(rowptr_ptr + row)", "end = tl.load(rowptr_ptr + row + 1)"]
    body += _finish(recipe, scalar=True, kept=False)
    types = {"accumulate": recipe.accumulate, "position": recipe.position}
    return header("combine_kernel", parameters, **types) + [f"    {line}" for line in body]


def _combine_step(recipe: Recipe, states: tuple[str, ...]) -> list[str]:
    ok = "(at < end)[:, None]" + ("" if recipe.even else " & c_ok[None, :]")
    lines = [
        "at = begin + step + lane",
        f"ok = {ok}",
        f"place = at.to(tl.int64)[:, None] * (columns * {recipe.columns}) + c[None, :]",
    ]
    for state in states:
        start = "NOWHERE" if state.endswith("_at") else START[state]
        lines.append(f"{state}_in = tl.load({state}_ptr + place, mask=ok, other={start})")
    for state in states:
        if state in ("total", "squares"):
            lines.append(f"{state} += {state}_in")
        elif state == "product":
            lines.append("product *= product_in")
        elif state in ("most", "least"):
            sign, name = (">", "maximum") if state == "most" else ("<", "minimum")
            if f"{state}_at" in states:  # pieces come in order: an equal value is not better
                lines += [
                    f"better = ({state}_in {sign} {state}) | ({state}_at == NOWHERE) | "
                    f"(({state}_in != {state}_in) & ({state} == {state}))",
                    f"{state} = tl.where(better, {state}_in, {state})",
                    f"{state}_at = tl.where(better, {state}_at_in, {state}_at)",
                ]
            else:
                lines.append(f"{state} = tl.{name}({state}, {state}_in, "
                             "propagate_nan=tl.PropagateNan.ALL)")  # fmt: skip
    return lines
