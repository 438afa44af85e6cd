"""Compiles message formulas for the register machine in csrc/cpu/program_kernel.h."""

import struct
from dataclasses import dataclass
from functools import lru_cache

from pyg_accel.formula import (
    SIDES,
    Formula,
    Operand,
    Sum,
    children,
    has_sum,
    operands_of,
    selects,
    shape_of,
)
from pyg_accel.formula.functions import OPS

__all__ = [
    "COMBINE",
    "REDUCES",
    "SIDES",
    "Program",
    "compile_formula",
    "compile_formulas",
    "program_reasons",
    "sums_inside",
]

# The numbers of csrc/cpu/kernels.h: its enumerations list the same names in the same order.
COMBINE = ("mul", "add", "sub", "reverse_sub")
REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")
MAX_OPERANDS = 12
MAX_INSTRUCTIONS = 48
MAX_REDUCES = 6
WORDS = 6  # integers per instruction


@dataclass(frozen=True)
class Program:
    """Straight-line code.

    Attributes:
        code: six integers per instruction.
        result: the register of the message.
        sum_result: whether to sum the message over the width.
    """

    code: tuple[int, ...]
    result: int
    sum_result: bool


def sums_inside(formula: Formula) -> bool:
    """Whether a formula has a sum over the width that is not its outermost operation."""
    return has_sum(formula.arg if isinstance(formula, Sum) else formula)


def program_reasons(formula: Formula, reduces: tuple[str, ...]) -> list[str]:
    """Return why the register machine does not support a formula."""
    reasons = []
    inner = formula.arg if isinstance(formula, Sum) else formula
    if sums_inside(formula):
        reasons.append("a sum over the width inside the message")
    if len({o.index for o in operands_of(formula)}) > MAX_OPERANDS:
        reasons.append(f"more than {MAX_OPERANDS} operands")
    if len(_instructions(inner)) > MAX_INSTRUCTIONS:
        reasons.append(f"more than {MAX_INSTRUCTIONS} operations")
    if len(reduces) > MAX_REDUCES:
        reasons.append(f"more than {MAX_REDUCES} reductions")
    return reasons


@lru_cache(maxsize=1024)
def compile_formula(formula: Formula, shapes: tuple[tuple[int, int], ...], width: int) -> Program:
    """Return the code of a formula; equal parts are computed once.

    Args:
        formula: the message; only its outermost operation may be a sum.
        shapes: (heads, width) of the operands.
        width: width of the message, before that sum.
    """
    inner = formula.arg if isinstance(formula, Sum) else formula
    code, results = compile_formulas((inner,), shapes, width)
    return Program(code, results[0], isinstance(formula, Sum))


def compile_formulas(
    formulas: tuple[Formula, ...], shapes: tuple[tuple[int, int], ...], width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the code of several formulas without sums, and the register of each."""
    sizes = dict(enumerate(shapes))
    registers: dict[Formula, int] = {}
    code: list[int] = []
    for node in _instructions(*formulas):
        inputs = [*(_register(child, registers) for child in children(node)), 0, 0][:2]
        op, value = getattr(node, "op", "const"), getattr(node, "value", 0.0)
        wide = shape_of(node, sizes)[1] == width and width > 1
        invariant = all(o.side == "v" for o in operands_of(node)) and not selects(node)
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        registers[node] = len(shapes) + len(code) // WORDS
        code += [OPS.index(op), *inputs, bits, wide, invariant]
    return tuple(code), tuple(_register(f, registers) for f in formulas)


def _register(node: Formula, registers: dict[Formula, int]) -> int:
    return node.index if isinstance(node, Operand) else registers[node]


def _instructions(*formulas: Formula) -> dict[Formula, None]:
    """Return the distinct operations of formulas, inputs before outputs."""
    operations: dict[Formula, None] = {}

    def visit(node: Formula) -> None:
        if isinstance(node, Operand) or node in operations:
            return
        for child in children(node):
            visit(child)
        operations[node] = None

    for formula in formulas:
        visit(formula)
    return operations
