"""Message formulas on the CPU: which of the library's kernels runs a formula."""

from collections.abc import Callable

from torch import Tensor

from pyg_accel.backends.base import Launch, winners_are_columns
from pyg_accel.backends.cpu import attention
from pyg_accel.backends.cpu.program import COMBINE, REDUCES, SIDES, compile_formula, sums_inside
from pyg_accel.backends.cpu.stages import is_plain
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import Binary, Formula, Operand, Unary, dot_ends, operands_of
from pyg_accel.graph import CSR
from pyg_accel.native import cpu_library, direct

__all__ = ["bind", "run"]


def run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Run a call by itself."""
    return bind(csr, formula, operands, reduces, want_arg=want_arg)(csr)(operands)


def bind(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> Callable[[CSR], Launch]:
    """Return what launches calls like this one: SpMM, a dot, stages or the register machine."""
    library, shapes = cpu_library(), shapes_of(operands)
    full = tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*shapes, strict=True))
    heads, width = full
    if sums_inside(formula):
        return attention.bind_several([formula] * len(reduces), reduces, operands)
    codes = [REDUCES.index(reduce) for reduce in reduces]
    arg_is_col = winners_are_columns(formula, reduces)
    simple = len(reduces) == 1 and reduces[0] in ("sum", "mean", "max", "min")
    if simple and (product := _as_spmm(formula, shapes, full)) is not None:
        x, weight, *how = product
        how += [codes[0], want_arg, arg_is_col]
        spmm = direct(library.spmm)
        if weight is None:
            return lambda csr: Launch(spmm, csr, (None, *how))
        if x == 0 and operands[weight].is_contiguous():
            return lambda csr: Launch(spmm, csr, tuple(how))
        return lambda csr: Launch(
            lambda *given: spmm(*csr, given[x], given[weight].contiguous(), *how)
        )
    ends = dot_ends(formula)
    if reduces == ["none"] and ends and shapes[ends[0]] == shapes[ends[1]] == full:
        dot = direct(library.dot)
        if ends[0] == 0:
            return lambda csr: Launch(dot, csr[:4])
        return lambda csr: Launch(lambda source, target: dot(*csr[:4], target, source))
    if len(reduces) == 1 and is_plain(formula, reduces[0], shapes):
        return attention.bind_several([formula], reduces, operands)
    program = compile_formula(formula, shapes, width)
    sides = {o.index: SIDES.index(o.side) for o in operands_of(formula)}
    columns = 1 if program.sum_result else width
    like = next(t for t in operands if t.is_floating_point()).new_empty(0)
    program_and_sizes = (
        [sides[i] for i in range(len(operands))], list(program.code), program.result,
        program.sum_result, like, heads, width, columns, codes, want_arg, arg_is_col,
    )  # fmt: skip
    interpret = direct(library.gspmm)
    return lambda csr: Launch(interpret, csr[:4], program_and_sizes, listed=True)


def _as_spmm(
    formula: Formula, shapes: Shapes, full: tuple[int, ...]
) -> tuple[int, int | None, int, bool] | None:
    """What the SpMM kernels need: features, weights, how they meet, and whether a relu follows.

    They do ``u``, ``u * e`` with one weight per edge (and head), and with edge features as wide as
    those of ``u`` also ``u + e``, ``u - e``, ``e - u``, ``u * e`` and the relu of each.
    """
    if isinstance(formula, Operand) and formula.side == "u":
        return formula.index, None, 0, False
    relu = isinstance(formula, Unary) and formula.op == "relu"
    match formula.arg if isinstance(formula, Unary) and relu else formula:
        case Binary(op=("mul" | "add" | "sub") as op, left=Operand() as a, right=Operand() as b):
            u, e = (a, b) if a.side == "u" else (b, a)
            if (u.side, e.side) != ("u", "e") or shapes[u.index] != full:
                return None
            if shapes[e.index] == full:
                meet = COMBINE.index("reverse_sub" if op == "sub" and a is e else op)
                return u.index, e.index, meet, relu
            if op == "mul" and not relu and shapes[e.index][1] == 1:
                return u.index, e.index, 0, False
    return None
