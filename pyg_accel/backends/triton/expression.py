"""A message formula as lines of a Triton kernel."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    Unary,
    children,
    operands_of,
    selects,
)
from pyg_accel.formula.functions import FUNCTIONS

__all__ = ["Names", "emit", "index_operands", "keeps_zero", "number", "per_target", "stays_finite"]

_LONGEST_PRODUCT = 8  # larger whole powers go through the logarithm


@dataclass
class Names:
    """Computed values of a kernel, and names for new ones."""

    computed: dict[Formula, str]
    suffix: str
    lines: list[str] = field(default_factory=list)
    summed: str = ""  # code of the sum of {x} over the width, if a program has the whole width

    def new(self, code: str, node: Formula) -> str:
        """Assign code to a fresh name."""
        name = f"t{len(self.computed)}_{self.suffix}"
        self.lines.append(f"{name} = {code}")
        self.computed[node] = name
        return name


def number(value: float) -> str:
    """Return a float as a literal of Triton."""
    finite = value == value and value not in (float("inf"), float("-inf"))
    return repr(value) if finite else f'float("{value}")'


def emit(node: Formula, names: Names, edge: str) -> str:
    """Append the computation of a formula, and return the name of its value.

    Operands must be computed. Equal parts are computed once.

    Args:
        node: a formula; without sums over the width unless ``names`` says how to compute them.
        names: of computed values; new values are added.
        edge: name of the edge numbers, for ``sel``.
    """
    if node in names.computed:
        return names.computed[node]
    match node:
        case Const(value=value):
            return names.new(f"tl.full([1, 1, 1], {number(value)}, ACC)", node)
        case Sum(arg=arg) if names.summed:
            return names.new(names.summed.format(x=emit(arg, names, edge)), node)
        case Unary(op="pow", arg=arg, value=value):
            return names.new(_power(emit(arg, names, edge), value), node)
        case Unary(op=op, arg=arg, value=value):
            x = emit(arg, names, edge)
            return names.new(FUNCTIONS[op].triton.format(x=x, v=number(value)), node)
        case Binary(op="sel", left=left, right=right):
            x, winner = emit(left, names, edge), emit(right, names, edge)
            return names.new(f"tl.where({edge} == {winner}, {x}, 0.0)", node)
        case Binary(op=op, left=left, right=right):
            x, y = emit(left, names, edge), emit(right, names, edge)
            return names.new(FUNCTIONS[op].triton.format(x=x, y=y), node)
    raise AssertionError(f"{node} should have been prepared for the kernel")


def _power(x: str, value: float) -> str:
    if value == 0.0:
        return f"tl.where({x} == {x}, 1.0, 1.0)"
    if value == 0.5:
        return f"tl.sqrt({x})"
    if value == -0.5:
        return f"1.0 / tl.sqrt({x})"
    whole = value == int(value) if abs(value) < 2**53 else True
    if whole and abs(value) <= _LONGEST_PRODUCT:
        product = " * ".join([x] * int(abs(value)))
        return product if value > 0 else f"1.0 / ({product})"
    odd = whole and int(value) % 2 == 1
    return f"power({x}, {number(value)}, {odd}, {whole})"


def per_target(formula: Formula) -> Iterator[Formula]:
    """Yield the largest parts that are equal for all edges of a target."""
    if _of_target(formula):
        yield formula
        return
    for child in children(formula):
        yield from per_target(child)


def _of_target(formula: Formula) -> bool:
    if isinstance(formula, Operand):
        return False  # loaded anyway
    return not selects(formula) and all(o.side == "v" for o in operands_of(formula))


def keeps_zero(formula: Formula) -> bool:
    """Whether the message of an absent entry, whose operands read as 0, is 0."""
    match formula:
        case Operand(side=side):
            return side != "v"
        case Unary(op=op, arg=arg):
            return FUNCTIONS[op].keeps_zero and keeps_zero(arg)
        case Binary(op=op, left=left, right=right) if FUNCTIONS[op].keeps_zero:
            return keeps_zero(left) and keeps_zero(right)
        case Binary(op="sel", left=left):
            return keeps_zero(left)
        case Binary(op="div", left=left, right=Const(value=value)):
            return value != 0.0 and keeps_zero(left)
        case Sum(arg=arg):
            return keeps_zero(arg)
    return False


def stays_finite(formula: Formula) -> bool:
    """Return whether operands of zero give a finite number."""
    match formula:
        case Unary(op="exp" | "log" | "sqrt" | "pow"):
            return False
        case Binary(op="div", left=left, right=right):
            return isinstance(right, Const) and right.value != 0.0 and stays_finite(left)
    return all(stays_finite(child) for child in children(formula))


def index_operands(formula: Formula) -> set[Formula]:
    """Operands that hold winners rather than features."""
    here: set[Formula] = set()
    match formula:
        case Binary(op="sel", right=right):
            here.add(right)
    return here.union(*map(index_operands, children(formula)))
