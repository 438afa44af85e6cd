"""The start and the end of kernels that hold whole heads: columns, folding lanes, results."""

from collections.abc import Sequence

from pyg_accel.backends.triton.recipe import AttentionRecipe
from pyg_accel.backends.triton.reduction import header

__all__ = [
    "column_lines",
    "combine_lines",
    "fold_lines",
    "function_lines",
    "inside",
    "results_of",
    "store_lines",
    "tile_shape",
]


def function_lines(
    name: str, recipe: AttentionRecipe, parameters: list[str], body: list[str]
) -> list[str]:
    """Return the kernel's lines: its signature, its types and its body."""
    top = header(name, parameters, accumulate=recipe.accumulate, position=recipe.position)
    return top + [f"    {line}" for line in body]


def results_of(recipe: AttentionRecipe) -> list[str]:
    """Names of what a kernel over whole rows stores, an element a row."""
    return ["out", "sums"] if recipe.score is not None else [name for name, _ in recipe.states]


def column_lines(recipe: AttentionRecipe) -> list[str]:
    """`h` and `w`, which of them exist, and whether this thread's column is the first."""
    size, heads = recipe.tile.columns, recipe.heads
    return [
        f"h = (tl.program_id(1) * {heads} + tl.arange(0, {heads}))[None, :, None]",
        f"w = tl.arange(0, {size})[None, None, :]",
        "h_ok = h < heads",
        f"w_ok = w < width * {recipe.unit}",
        "first = w == 0",
    ]


def inside(recipe: AttentionRecipe, wide: bool, *others: str) -> str:
    """The mask of a load or store over the heads, and the columns if it has some."""
    masks = list(others)
    if not recipe.even_heads:
        masks.append("h_ok")
    if wide and not recipe.even_width:
        masks.append("w_ok")
    return " & ".join(masks)


def tile_shape(recipe: AttentionRecipe, *, wide: bool) -> str:
    """Return the shape of what a program holds for each edge, heads and columns or heads alone."""
    columns = recipe.tile.columns if wide else 1
    return f"[{recipe.tile.rows * recipe.tile.lanes}, {recipe.heads}, {columns}]"


def fold_lines(recipe: AttentionRecipe) -> list[str]:
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


def store_lines(recipe: AttentionRecipe) -> list[str]:
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
    mask = inside(recipe, wide, *masks)
    return f"tl.store({where}, {value}" + (f", mask={mask})" if mask else ")")


def combine_lines(recipe: AttentionRecipe) -> list[str]:
    """A program puts the pieces of one long row together, some heads at a time."""
    parameters = ["task_ptr", "begin_ptr", *(f"{name}_in_ptr" for name, _ in recipe.states)]
    parameters += [f"{name}_ptr" for name in results_of(recipe)] + ["heads", "width"]
    body = [
        *column_lines(recipe),
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
    return function_lines("attention_combine_kernel", recipe, parameters, body)


def _combine_step(recipe: AttentionRecipe) -> list[str]:
    lines = ["place = at.to(tl.int64)"]
    for name, wide in recipe.states:
        where = "(place * heads + h)"
        if wide:
            where = f"({where} * (width * {recipe.unit}) + w)"
        mask = inside(recipe, wide)
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
