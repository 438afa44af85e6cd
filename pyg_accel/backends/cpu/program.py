"""Compiles formulas without sums over the width for the register machine in csrc/cpu/machine.h."""

import struct

from pyg_accel.formula import Formula, Operand, children, operands_of, selects, shape_of
from pyg_accel.formula.functions import OPS

__all__ = ["MAX_INSTRUCTIONS", "MAX_OPERANDS", "WORDS", "compile_formulas"]

# The limits of csrc/cpu/kernels.h.
MAX_OPERANDS = 12
MAX_INSTRUCTIONS = 48
WORDS = 6  # integers per instruction


def compile_formulas(
    formulas: tuple[Formula, ...], shapes: tuple[tuple[int, int], ...], width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the code of several formulas, and the register of each; equal parts are computed once.

    Args:
        formulas: without sums over the width.
        shapes: (heads, width) of the operands.
        width: of the features; other parts have width 1.
    """
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
