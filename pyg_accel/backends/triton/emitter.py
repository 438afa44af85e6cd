"""Shared parts of generated kernels: blocks of columns, loads, values and stores.

A program has blocks [edges, heads, columns]; operands and values broadcast as
[edges, heads | 1, columns | 1]. Kernels go over the rows of a CSR matrix (:mod:`.rows_codegen`) or
an edge list (:mod:`.edges_codegen`). Their source is in :mod:`linecache`, where tracebacks,
``inspect.getsource`` and Triton look it up.
"""

import linecache
import threading
from typing import Any

from pyg_accel.backends.triton.expression import Names, emit, index_operands
from pyg_accel.backends.triton.recipe import SIZES, Recipe
from pyg_accel.formula import Formula, Operand, operands_of

__all__ = [
    "block", "build", "column_lines", "load", "names_of", "operands_read", "place", "selectors",
    "shape", "value",
]  # fmt: skip

_lock = threading.Lock()


def build(
    name: str, parameters: list[str], recipe: Recipe, types: list[str], body: list[str]
) -> Any:
    """Return the Triton function with a name and a body."""
    import triton
    import triton.language as tl

    from pyg_accel.backends.triton.kernels import functions

    lines = [
        f"def {name}({', '.join(parameters)}):",
        f"    ACC: tl.constexpr = tl.{recipe.accumulate}",
    ]
    lines += [f"    {line}" for line in (*types, *body)]
    source = "\n".join(lines) + "\n"
    helpers = {helper: getattr(functions, helper) for helper in functions.__all__}
    with _lock:
        file = f"<pyg_accel {name} {len(linecache.cache)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        scope: dict[str, Any] = {"tl": tl, "__name__": __name__, **helpers}
        exec(compile(source, file, "exec"), scope)
        numbers = [p for p in parameters if not p.endswith("_ptr")]
        return triton.jit(scope[name], do_not_specialize=numbers)


def column_lines(recipe: Recipe, piece: str = "") -> list[str]:
    """`h` and `w`, and their masks; ``piece`` names the slice of all programs."""
    split = recipe.slices > 1 and not piece
    head = f"tl.program_id(1) // {recipe.slices}" if split else "tl.program_id(1)"
    piece = piece or f"(tl.program_id(1) % {recipe.slices})"
    start = f"{piece} * {recipe.columns} + " if recipe.slices > 1 else ""
    return [
        f"head = {head}",
        f"h = (head * {recipe.heads} + tl.arange(0, {recipe.heads}))[None, :, None]",
        f"w = ({start}tl.arange(0, {recipe.columns}))[None, None, :]",
        "h_ok = h < heads",
        f"w_ok = w < width * {recipe.unit}",
    ]


def block(recipe: Recipe, edges: int) -> str:
    """Return the shape of a block."""
    return f"[{edges}, {recipe.heads}, {recipe.columns}]"


def shape(recipe: Recipe, kind: str, edges: int | str) -> str:
    """Return the shape of a program's part of an output."""
    heads, width = SIZES[kind]
    return f"[{edges}, {recipe.heads if heads > 1 else 1}, {recipe.columns if width > 1 else 1}]"


def _inner(recipe: Recipe, kind: str) -> str:
    """Offsets of the columns of a row."""
    if kind == "full":
        single = recipe.blocks == recipe.heads == 1
        return "w" if single else f"(h * (width * {recipe.unit}) + w)"
    return {"head": "h", "feature": "w", "number": "0 * h"}[kind]


def _limits(recipe: Recipe, kind: str) -> list[str]:
    """Masks of the columns of a row."""
    heads, width = SIZES[kind]
    masks = ["h_ok"] if heads > 1 and not recipe.even_heads else []
    return masks + (["w_ok"] if width > 1 and not recipe.even_width else [])


def load(
    recipe: Recipe, i: int, row: str, ok: str, *, scalar: bool, cast: bool, other: str = "0"
) -> str:
    """Return code that reads an operand for every edge of a block, or (``scalar``) for one row.

    Args:
        recipe: of the kernel.
        i: the operand.
        row: name of the rows to read.
        ok: name of their mask; empty if all exist.
        scalar: ``row`` is one row.
        cast: to the dtype of sums.
        other: the value of masked elements.
    """
    kind, unit = recipe.kinds[i], recipe.aligned[i]
    # A 32-bit product costs one instruction, a 64-bit one five.
    rows = f"{row}.to(tl.int32)" if recipe.near[i] else f"{row}.to(tl.int64)"
    rows = f"{rows} * (x{i}_stride * {unit})" if unit else rows
    tail = ".to(ACC)" * cast
    if kind == "number" or (kind == "head" and recipe.heads == 1):
        # Read along the edges only, or each thread would read it many times.
        head = " + head" * (kind == "head")
        mask = f", mask={ok}, other={other}" if ok and not scalar else ""
        return f"tl.load(x{i}_ptr + {rows}{head}{mask}){tail}" + "[:, None, None]" * (not scalar)
    rows = rows if scalar else f"({rows})[:, None, None]"
    masks = [f"{ok}[:, None, None]"] if ok and not scalar else []
    masks += _limits(recipe, kind)
    mask = f", mask={' & '.join(masks)}, other={other}" if masks else ""
    return f"tl.load(x{i}_ptr + ({rows} + {_inner(recipe, kind)}){mask}){tail}"


def operands_read(formulas: list[Formula]) -> list[Operand]:
    """Return the operands of formulas, each once."""
    return list(dict.fromkeys(o for formula in formulas for o in operands_of(formula)))


def selectors(formulas: list[Formula]) -> set[Formula]:
    """Return the operands that are numbers of edges."""
    return {o for formula in formulas for o in index_operands(formula)}


def names_of(recipe: Recipe, computed: dict[Formula, str], suffix: str) -> Names:
    """Return names with which sums over the width are sums of a block."""
    inner = "{x}" if recipe.even_width else "tl.where(w_ok, {x}, 0.0)"
    return Names(dict(computed), suffix, summed=f"tl.sum({inner}, axis=2, keep_dims=True)")


def value(recipe: Recipe, names: Names, formula: Formula, kind: str, edges: int, edge: str) -> str:
    """Emit a formula in the shape of an output; return its name.

    Args:
        recipe: of the kernel.
        names: of computed values.
        formula: to compute; dimensions that the output lacks are summed.
        kind: shape of the output.
        edges: of the block.
        edge: name of the edge numbers.
    """
    code, to = emit(formula, names, f"{edge}[:, None, None]"), shape(recipe, kind, edges)
    for axis, (ok, even) in enumerate((("h_ok", recipe.even_heads), ("w_ok", recipe.even_width))):
        if SIZES[kind][axis] < recipe.size_of(formula)[axis]:
            code = code if even else f"tl.where({ok}, {code}, 0.0)"
            code = f"tl.sum({code}, axis={axis + 1}, keep_dims=True)"
    name = f"m{len(names.lines)}_{names.suffix}"
    names.lines.append(f"{name} = tl.broadcast_to({code}, {to})")
    return name


def place(
    recipe: Recipe, kind: str, row: str, ok: list[str], formula: Formula | None = None
) -> tuple[str, str]:
    """Return the offsets of the rows of an output, and the mask of the store.

    Args:
        recipe: of the kernel.
        kind: shape of the output.
        row: code of the rows, [edges, 1, 1].
        ok: masks of the rows.
        formula: of the values, if they are stored from whole blocks: the threads of the first
            column store narrow values, which avoids a new layout.
    """
    whole = f"(width * {recipe.unit})"
    stride = {"full": f"(heads * {whole})", "head": "heads", "feature": whole, "number": "1"}[kind]
    inner, masks = (
        _inner(recipe, kind),
        [*ok, *_limits(recipe, kind if formula is None else "full")],
    )
    if formula is not None:
        inner = f"({inner} + 0 * h + 0 * w)"
        sizes = recipe.size_of(formula)
        for axis, (name, own) in enumerate((("h", recipe.heads), ("w", recipe.columns))):
            if SIZES[kind][axis] == 1:  # of each program, or of the first if all have the same
                masks.append(f"({name} % {own} == 0)" if sizes[axis] > 1 else f"({name} == 0)")
    return f"({row} * {stride} + {inner})", " & ".join(masks)
