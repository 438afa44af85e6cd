"""The language of messages: formulas, the functions in them, and their derivatives."""

from pyg_accel.formula.language import (
    BINARY,
    SIDES,
    UNARY,
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    Unary,
    children,
    dot_ends,
    factors,
    gradient,
    has_sum,
    is_summed,
    map_children,
    map_operands,
    operands_of,
    parse,
    selects,
    shape_of,
    summed,
    swap_sides,
    times,
    weighted_source,
    where,
)

__all__ = [
    "BINARY", "SIDES", "UNARY", "Binary", "Const", "Formula", "Operand", "Sum", "Unary", "children",
    "dot_ends", "factors", "gradient", "has_sum", "is_summed", "map_children", "map_operands",
    "operands_of", "parse", "selects", "shape_of", "summed", "swap_sides", "times",
    "weighted_source", "where",
]  # fmt: skip
