"""Message formulas on the CPU: chooses the kernel of the library for a formula.

SpMM and dot products take one number besides the arrays of the graph, which says what to compute
(csrc/cpu/plan_code.h), and features with any strides and any trailing shape.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyg_accel.backends.base import Launch, winners_are_columns
from pyg_accel.backends.cpu import attention
from pyg_accel.backends.cpu.stages import COMBINE
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import Binary, Formula, Operand, Unary, dot_ends
from pyg_accel.graph import CSR
from pyg_accel.runtime.native import cpu_library, direct

__all__ = ["bind", "run"]

PLANNED = ("sum", "mean", "max", "min")


def run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Run a single call."""
    return bind(csr, formula, operands, reduces, want_arg=want_arg)(csr)(operands)


def bind(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> Callable[[CSR], Launch]:
    """Return a launcher of calls like this one: SpMM, dots or stages."""
    library, shapes = cpu_library(), shapes_of(operands)
    full = tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*shapes, strict=True))
    heads = full[0]
    arg_is_col = winners_are_columns(formula, reduces)
    planned = len(reduces) == 1
    product = _as_spmm(formula, shapes, full) if planned and reduces[0] in PLANNED else None
    if product is not None:
        x, combine, relu = product
        # The features are the second operand if weights come first.
        code = (
            PLANNED.index(reduces[0]) | combine << 2 | relu << 4 | arg_is_col << 5 | (x == 1) << 6
        )
        return _launcher(library.spmm_winners if want_arg else library.spmm, code, heads)
    ends = dot_ends(formula)
    if planned and reduces == ["none"] and ends and shapes[ends[0]] == shapes[ends[1]] == full:
        return _launcher(library.spmm, (ends[0] == 1) << 6 | 1 << 7, heads)
    return attention.bind_several(
        [formula] * len(reduces), reduces, operands, want_arg=want_arg, arg_is_col=arg_is_col
    )


def _launcher(operator: Any, code: int, heads: int) -> Callable[[CSR], Launch]:
    function, plan = direct(operator), max(heads, 1) << 8 | code
    return lambda csr: Launch(function, (*csr[:5], plan), accepts_any_layout=True)


def _as_spmm(
    formula: Formula, shapes: Shapes, full: tuple[int, ...]
) -> tuple[int, int, bool] | None:
    """Return features, how weights combine with them, and whether a relu follows, for SpMM kernels.

    These compute ``u``, ``u * e`` with one weight per edge (and head), and with edge features as
    wide as those of ``u`` also ``u + e``, ``u - e``, ``e - u``, ``u * e`` and the relu of each.
    """
    if isinstance(formula, Operand) and formula.side == "u":
        return formula.index, 0, False
    relu = isinstance(formula, Unary) and formula.op == "relu"
    match formula.arg if isinstance(formula, Unary) and relu else formula:
        case Binary(op=("mul" | "add" | "sub") as op, left=Operand() as a, right=Operand() as b):
            u, e = (a, b) if a.side == "u" else (b, a)
            if (u.side, e.side) != ("u", "e") or shapes[u.index] != full:
                return None
            if shapes[e.index] == full:
                combine = COMBINE.index("reverse_sub" if op == "sub" and a is e else op)
                return u.index, combine, relu
            if op == "mul" and not relu and shapes[e.index][1] == 1:
                return u.index, 0, False
    return None
