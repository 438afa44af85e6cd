"""Kernels that hold whole heads: attention, and several formulas over the same operands at once.

A program has a tile of ``rows * lanes`` edges by ``heads`` by ``width``, and whole heads of whole
width, so that scores are sums inside the tile. Operands broadcast as [edges, heads | 1, width | 1].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyg_accel.backends.triton.codegen import build
from pyg_accel.backends.triton.expression import Names, emit, keeps_zero, per_target
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.reduction import header, task_lines
from pyg_accel.formula import Binary, Const, Formula, Operand, Unary, children, operands_of

__all__ = ["AttentionRecipe", "attention_combine_kernel", "attention_kernel", "stays_finite"]


@dataclass(frozen=True, slots=True)
class AttentionRecipe:
    """Everything that the text of a kernel depends on.

    Attributes:
        score: of attention, one number an edge and head; None in a pass of several formulas.
        value: of attention, what is added up.
        sums: formulas to add up.
        widths: of each, whether it has columns.
        stores: formulas of one number an edge and head to store where their edges lie. Sums over
            the width, in all formulas, are of more than one column.
        infinite: operand that entries which are not there read as infinity: by their formulas the
            messages of such entries are 0 then. -1 if there is none.
        kinds: of each operand: ``full``, ``head`` [rows, H, 1], ``feature`` [rows, 1, F] or
            ``number`` [rows, 1, 1].
        aligned: of each operand: row strides are counted in units of so many elements; 0 means a
            stride of one element.
        near: of each operand: offsets fit 32 bits.
        tile: rows, lanes, unroll; ``columns`` is the width of a head, rounded up.
        heads: of a program.
        tasks: ``rows``, ``order`` (rows in a given order) or ``pieces`` (of long rows, whose
            results stay raw).
        hubs: rows above the limit are left to others.
        numbered: entries have edge numbers of their own.
        unit: columns are counted in units of so many elements.
        even_heads: the last program has all its heads.
        even_width: a head fills its columns.
        accumulate: dtype of sums.
        position: dtype of positions in ``col``.
    """

    score: Formula | None
    value: Formula
    sums: tuple[Formula, ...]
    widths: tuple[bool, ...]
    stores: tuple[Formula, ...]
    infinite: int
    kinds: tuple[str, ...]
    aligned: tuple[int, ...]
    near: tuple[bool, ...]
    tile: Tile
    heads: int
    tasks: str
    hubs: bool
    numbered: bool
    unit: int
    even_heads: bool
    even_width: bool
    accumulate: str
    position: str

    @property
    def states(self) -> tuple[tuple[str, bool], ...]:
        """What a program keeps for each row: (name, whether it has columns)."""
        if self.score is not None:
            return ("acc", True), ("most", False), ("total", False)
        return tuple((f"acc{k}", wide) for k, wide in enumerate(self.widths))


@lru_cache(maxsize=1024)
def attention_kernel(recipe: AttentionRecipe) -> Any:
    """Return the kernel that goes over the entries of rows, or of pieces of long ones."""
    return build("attention_kernel", _entry_lines(recipe))


@lru_cache(maxsize=1024)
def attention_combine_kernel(recipe: AttentionRecipe) -> Any:
    """Return the kernel that puts the pieces of long rows together, in their order."""
    return build("attention_combine_kernel", _combine_lines(recipe))


def _results(recipe: AttentionRecipe) -> list[str]:
    """Names of what a kernel over whole rows stores, an element a row."""
    return ["out", "sums"] if recipe.score is not None else [name for name, _ in recipe.states]


def _columns(recipe: AttentionRecipe) -> list[str]:
    """`h` and `w`, which of them exist, and whether this thread's column is the first."""
    size, heads = recipe.tile.columns, recipe.heads
    return [
        f"h = (tl.program_id(1) * {heads} + tl.arange(0, {heads}))[None, :, None]",
        f"w = tl.arange(0, {size})[None, None, :]",
        "h_ok = h < heads",
        f"w_ok = w < width * {recipe.unit}",
        "first = w == 0",
    ]


def _stride(recipe: AttentionRecipe, i: int) -> str:
    unit = recipe.aligned[i]
    return f"(x{i}_stride * {unit})" if unit else "1"


def _inside(recipe: AttentionRecipe, wide: bool, *others: str) -> str:
    """The mask of a load or store over the heads, and the columns if it has some."""
    masks = list(others)
    if not recipe.even_heads:
        masks.append("h_ok")
    if wide and not recipe.even_width:
        masks.append("w_ok")
    return " & ".join(masks)


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
    stored = [name for name, _ in recipe.states] if pieces else _results(recipe)
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
    body = _columns(recipe) + task_lines(tile, recipe.tasks, hubs=recipe.hubs)
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
    body += _fold(recipe) + _store(recipe)
    return _function("attention_kernel", recipe, _parameters(recipe), body)


def _function(
    name: str, recipe: AttentionRecipe, parameters: list[str], body: list[str]
) -> list[str]:
    top = header(name, parameters, accumulate=recipe.accumulate, position=recipe.position)
    return top + [f"    {line}" for line in body]


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
    own = {o: f"{o.side}{o.index}_{u}" for o in _operands(recipe) if o.side != "v"}
    return Names({**known, **own}, str(u), summed=summed)


def _attention_step(recipe: AttentionRecipe, known: dict[Formula, str], summed: str) -> list[str]:
    """Scores of all edge tiles, the new maximum, then what is kept fades and the rest is added."""
    lines: list[str] = []
    unroll, shape = recipe.tile.unroll, _shape(recipe, wide=False)
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
            kept = f"tl.broadcast_to({emit(formula, names, '')}, {_shape(recipe, wide=True)})"
            mask = _inside(recipe, False, ok, "first")
            place = f"(edge{u}.to(tl.int64) * heads)[:, None, None] + (h + 0 * w)"
            names.lines.append(f"tl.store(edges{k}_ptr + {place}, {kept}, mask={mask})")
        for k, formula in enumerate(recipe.sums):
            part = f"tl.broadcast_to({emit(formula, names, '')}, "
            part += f"{_shape(recipe, wide=recipe.widths[k])})"
            if recipe.infinite < 0 and not keeps_zero(formula):
                part = f"tl.where({ok}, {part}, 0.0)"
            names.lines.append(f"acc{k} += {part}")
        lines += names.lines
    return lines


def _shape(recipe: AttentionRecipe, *, wide: bool) -> str:
    columns = recipe.tile.columns if wide else 1
    return f"[{recipe.tile.rows * recipe.tile.lanes}, {recipe.heads}, {columns}]"


def stays_finite(formula: Formula) -> bool:
    """Return whether zeros in place of an entry's operands give a finite number."""
    match formula:
        case Unary(op="exp" | "log" | "sqrt" | "pow"):
            return False
        case Binary(op="div", left=left, right=right):
            return isinstance(right, Const) and right.value != 0.0 and stays_finite(left)
    return all(stays_finite(child) for child in children(formula))


def _fold(recipe: AttentionRecipe) -> list[str]:
    """Give every lane what all lanes of its row have together; shapes stay what they are."""
    tile = recipe.tile
    if tile.lanes == 1:
        return []
    axis = 1 if tile.rows > 1 else 0
    lead = f"{tile.rows}, {tile.lanes}, " if tile.rows > 1 else f"{tile.lanes}, "
    edges = tile.rows * tile.lanes

    def shape(wide: bool, flat: bool) -> str:
        first = f"{edges}, " if flat else lead
        return f"[{first}{recipe.heads}, {tile.columns if wide else 1}]"

    lines: list[str] = []
    for name, wide in recipe.states:
        lines.append(f"{name} = tl.reshape({name}, {shape(wide, False)})")
    if recipe.score is not None:
        lines += [
            f"high = tl.max(most, axis={axis}, keep_dims=True)",
            'shift = tl.where(high == float("-inf"), 0.0, high)',
            "fade = tl.exp(most - shift)",
            "total *= fade",
            "acc *= fade",
            f"most = tl.broadcast_to(high, {shape(False, False)})",
        ]
    for name, wide in recipe.states:
        if name != "most":
            lines.append(f"{name} = tl.broadcast_to(tl.sum({name}, axis={axis}, keep_dims=True), "
                         f"{shape(wide, False)})")  # fmt: skip
        lines.append(f"{name} = tl.reshape({name}, {shape(wide, True)})")
    return lines


def _store(recipe: AttentionRecipe) -> list[str]:
    """Store the results of rows, or what there is of a piece."""
    tile, pieces = recipe.tile, recipe.tasks == "pieces"
    scalar = tile.rows == 1
    masks = []
    if not pieces and (recipe.hubs or tile.rows > 1):
        masks.append("keeps[:, None, None]" if scalar else "keep[:, None, None]")
    elif tile.rows > 1:
        masks.append("keep[:, None, None]")
    if tile.lanes > 1:
        masks.append("(lane == 0)[:, None, None]")
    place = "task" if pieces else "row"
    place = f"{place}.to(tl.int64)" + (" + lane * 0" if scalar else "")
    lines = [f"place = ({place})[:, None, None]"]
    if pieces or recipe.score is None:
        return lines + [_store_state(recipe, name, name, wide, masks)
                        for name, wide in recipe.states]  # fmt: skip
    count = "(end - begin)" if scalar else "(end - begin)[:, None, None]"
    lines.append(f"total = tl.where({count} > 0, total, 1.0)")
    return lines + _finish(recipe, masks)


def _finish(recipe: AttentionRecipe, masks: Sequence[str]) -> list[str]:
    """From maximum, sum and weighted sum to the result and the logarithm of the sum."""
    return [
        "out = acc / total",
        'sums = tl.where(most == float("-inf"), 0.0, most) + tl.log(total)',
        _store_state(recipe, "out", "out", True, masks),
        _store_state(recipe, "sums", "sums", False, masks),
    ]


def _store_state(
    recipe: AttentionRecipe, name: str, value: str, wide: bool, masks: Sequence[str]
) -> str:
    where = f"{name}_ptr + (place * heads + h)"
    if wide:
        where = f"{name}_ptr + ((place * heads + h) * (width * {recipe.unit}) + w)"
    mask = _inside(recipe, wide, *masks)
    return f"tl.store({where}, {value}" + (f", mask={mask})" if mask else ")")


def _combine_lines(recipe: AttentionRecipe) -> list[str]:
    """A program puts the pieces of one long row together, some heads at a time."""
    parameters = ["task_ptr", "begin_ptr", *(f"{name}_in_ptr" for name, _ in recipe.states)]
    parameters += [f"{name}_ptr" for name in _results(recipe)] + ["heads", "width"]
    body = [
        *_columns(recipe),
        "task = tl.program_id(0)",
        "row = tl.load(task_ptr + task)",
        "begin = tl.load(begin_ptr + task)",
        "end = tl.load(begin_ptr + task + 1)",
    ]
    for state, wide in recipe.states:
        start = 'float("-inf")' if state == "most" else "0.0"
        columns = recipe.tile.columns if wide else 1
        body.append(f"{state} = tl.full([1, {recipe.heads}, {columns}], {start}, ACC)")
    body += ["at = begin", "while at < end:"]
    body += [f"    {line}" for line in _combine_step(recipe)] + ["    at += 1"]
    body.append("place = row.to(tl.int64)")
    if recipe.score is None:
        body += [_store_state(recipe, name, name, wide, []) for name, wide in recipe.states]
    else:
        if not recipe.even_heads:
            body.append("total = tl.where(h_ok, total, 1.0)")
        body += _finish(recipe, [])
    return _function("attention_combine_kernel", recipe, parameters, body)


def _combine_step(recipe: AttentionRecipe) -> list[str]:
    lines = ["place = at.to(tl.int64)"]
    for name, wide in recipe.states:
        where = "(place * heads + h)"
        if wide:
            where = f"({where} * (width * {recipe.unit}) + w)"
        mask = _inside(recipe, wide)
        mask = f", mask={mask}, other=0" if mask else ""
        lines.append(f"{name}_in = tl.load({name}_in_ptr + {where}{mask})")
    if recipe.score is None:
        return lines + [f"{name} += {name}_in" for name, _ in recipe.states]
    return [
        *lines,
        "high = tl.maximum(most, most_in)",
        'shift = tl.where(high == float("-inf"), 0.0, high)',
        "fade = tl.exp(most - shift)",
        "part = tl.exp(most_in - shift)",
        "total = total * fade + total_in * part",
        "acc = acc * fade + acc_in * part",
        "most = high",
    ]
