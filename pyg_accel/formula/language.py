"""Message formulas as frozen data.

A formula defines the message of an edge before the reduction, e.g. ``relu(add(u0,e1))``: operand 0
is read at the source node of the edge, operand 1 at the edge itself. ``u`` is the source node,
``v`` the target node and ``e`` the edge, as in the DGL paper on x86 (section 2.1). Patching derives
formulas from ``message``; rewriting and the kernel generators use the same data; backward passes
are formulas too (:func:`gradient`).

Operands have the shape ``[rows, heads | 1, width | 1]``; values of different sizes broadcast.
"""

import ast
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import copysign

from pyg_accel.formula.functions import BINARY, FUNCTIONS, PARAMETRIC, UNARY

__all__ = [
    "BINARY", "SIDES", "UNARY", "Binary", "Const", "Formula", "Operand", "Sum", "Unary",
    "children", "dot_ends", "factors", "gradient", "has_sum", "is_summed", "map_children",
    "map_operands", "operands_of", "parse", "renumbered", "selects", "shape_of", "summed",
    "swap_sides", "times", "weighted_source", "where", "without_narrow_sums",
]  # fmt: skip

SIDES = ("u", "v", "e")
# ast.parse() in several threads may raise SystemError (python/cpython#106905).
_parsing = threading.RLock()  # reentrant, as a finalizer may parse too


class _Tree:
    """Stores the hash of a formula with parts: plans are looked up by formula in every call."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            parts = tuple(getattr(self, name) for name in self.__match_args__)  # type: ignore[attr-defined]
            object.__setattr__(self, "_hash", hash((type(self), *parts)))
            return self._hash


@dataclass(frozen=True, slots=True)
class Operand:
    """Operand number ``index``, read at the source (u), the target (v) or the edge (e)."""

    side: str
    index: int

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ValueError(f"expected an operand side of {SIDES} (got '{self.side}')")

    def __str__(self) -> str:
        return f"{self.side}{self.index}"


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A number; 0.0 and -0.0 are two, as quotients tell."""

    value: float

    def __eq__(self, other: object) -> bool:
        if type(other) is not Const:
            return NotImplemented
        return self.value == other.value and copysign(1, self.value) == copysign(1, other.value)

    def __hash__(self) -> int:
        return hash((Const, self.value))

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Unary(_Tree):
    """An elementwise function of one argument."""

    op: str
    arg: "Formula"
    value: float = 0.0
    __hash__ = _Tree.__hash__

    def __post_init__(self) -> None:
        if self.op not in UNARY:
            raise ValueError(f"unknown function '{self.op}'; there are {', '.join(UNARY)}")

    def __str__(self) -> str:
        tail = f",{self.value!r}" if self.op in PARAMETRIC else ""
        return f"{self.op}({self.arg}{tail})"


@dataclass(frozen=True, slots=True)
class Binary(_Tree):
    """An elementwise function of two arguments.

    ``sel(x, a)`` is x where the index operand a names this edge and 0 elsewhere: how the gradient
    of a maximum finds the edge that won.
    """

    op: str
    left: "Formula"
    right: "Formula"
    __hash__ = _Tree.__hash__

    def __post_init__(self) -> None:
        if self.op not in BINARY:
            raise ValueError(f"unknown operation '{self.op}'; there are {', '.join(BINARY)}")
        if self.op == "sel" and not isinstance(self.right, Operand):
            raise ValueError("expected the second argument of 'sel' to be an operand")

    def __str__(self) -> str:
        return f"{self.op}({self.left},{self.right})"


@dataclass(frozen=True, slots=True)
class Sum(_Tree):
    """The sum over the width, head by head: ``sum(mul(u0,v1))`` is a dot product."""

    arg: "Formula"
    __hash__ = _Tree.__hash__

    def __str__(self) -> str:
        return f"sum({self.arg})"


Formula = Operand | Const | Unary | Binary | Sum


@lru_cache(maxsize=4096)
def parse(text: str) -> Formula:
    """Read a formula from its text, e.g. ``"mul(u0,e1)"``; the inverse of ``str``."""
    try:
        with _parsing:
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"expected a message formula (got {text!r}): {error.msg}") from None
    return _from_syntax(tree, text)


def _from_syntax(node: ast.expr, text: str) -> Formula:
    match node:
        case ast.Name(id=name) if name[:1] in SIDES and name[1:].isdecimal():
            return Operand(name[0], int(name[1:]))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Const(float(number))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return Const(-float(number))
        case ast.Call(func=ast.Name(id="sum"), args=[arg], keywords=[]):
            return Sum(_from_syntax(arg, text))
        case ast.Call(func=ast.Name(id=op), args=[arg], keywords=[]) if op not in PARAMETRIC:
            return Unary(op, _from_syntax(arg, text))
        case ast.Call(func=ast.Name(id="where"), args=[condition, left, right], keywords=[]):
            return where(*(_from_syntax(arg, text) for arg in (condition, left, right)))
        case ast.Call(func=ast.Name(id=op), args=[left, right], keywords=[]):
            first, second = _from_syntax(left, text), _from_syntax(right, text)
            if op in PARAMETRIC and isinstance(second, Const):
                return Unary(op, first, second.value)
            return Binary(op, first, second)
    raise ValueError(f"expected a message formula such as 'relu(add(u0,e1))' (got {text!r})")


def operands_of(formula: Formula) -> Iterator[Operand]:
    """Yield every operand from left to right, with repetitions."""
    if isinstance(formula, Operand):
        yield formula
    for child in children(formula):
        yield from operands_of(child)


def children(formula: Formula) -> tuple[Formula, ...]:
    """Return the direct parts of a formula."""
    match formula:
        case Unary(arg=arg) | Sum(arg=arg):
            return (arg,)
        case Binary(left=left, right=right):
            return (left, right)
    return ()


@lru_cache(maxsize=4096)
def has_sum(formula: Formula) -> bool:
    """Whether a formula sums over the width anywhere."""
    return isinstance(formula, Sum) or any(has_sum(child) for child in children(formula))


def is_summed(formula: Formula) -> bool:
    """Whether a formula has operands, all of them inside of sums over the width."""
    if isinstance(formula, Sum):
        return True
    parts = [child for child in children(formula) if not isinstance(child, Const)]
    return bool(parts) and all(is_summed(part) for part in parts)


def selects(formula: Formula) -> bool:
    """Whether a value depends on the number of the edge, through ``sel``."""
    if isinstance(formula, Binary) and formula.op == "sel":
        return True
    return any(selects(child) for child in children(formula))


def map_children(formula: Formula, change: Callable[[Formula], Formula]) -> Formula:
    """Return the formula with its direct parts replaced."""
    match formula:
        case Unary(op=op, arg=arg, value=value):
            return Unary(op, change(arg), value)
        case Sum(arg=arg):
            return Sum(change(arg))
        case Binary(op=op, left=left, right=right):
            return Binary(op, change(left), change(right))
    return formula


def map_operands(formula: Formula, change: Callable[[Operand], Formula]) -> Formula:
    """Return the formula with every operand replaced by ``change(operand)``."""
    if isinstance(formula, Operand):
        return change(formula)
    return map_children(formula, lambda part: map_operands(part, change))


def renumbered(*formulas: Formula) -> tuple[list[Formula], tuple[int, ...]]:
    """Return formulas with operands 0, 1, ... in the order of first use, and the old indices."""
    used = tuple(dict.fromkeys(o.index for formula in formulas for o in operands_of(formula)))
    return [map_operands(f, lambda o: Operand(o.side, used.index(o.index))) for f in formulas], used


def weighted_source(formula: Formula) -> tuple[int, int | None] | None:
    """Return the operands of ``u`` (with None for a weight) or ``u * e``; None for others."""
    match formula:
        case Operand(side="u", index=index):
            return index, None
        case Binary(op="mul", left=Operand() as a, right=Operand() as b):
            source, weight = (a, b) if a.side == "u" else (b, a)
            if (source.side, weight.side) == ("u", "e"):
                return source.index, weight.index
    return None


def dot_ends(formula: Formula) -> tuple[int, int] | None:
    """Return the operands of ``sum(v * u)``, target first; None for other formulas."""
    match formula:
        case Sum(arg=Binary(op="mul", left=Operand() as a, right=Operand() as b)):
            target, source = (a, b) if a.side == "v" else (b, a)
            if (target.side, source.side) == ("v", "u"):
                return target.index, source.index
    return None


def swap_sides(formula: Formula) -> Formula:
    """Return the formula for the transposed graph: with sources and targets swapped."""
    swap = {"u": "v", "v": "u", "e": "e"}
    return map_operands(formula, lambda operand: Operand(swap[operand.side], operand.index))


Shape = tuple[int, int]


def shape_of(formula: Formula, shapes: dict[int, Shape]) -> Shape:
    """Return (heads, width) of the message, from the sizes of the operands by index.

    Raises:
        ValueError: if two sizes do not broadcast.
    """
    match formula:
        case Operand(index=index):
            return shapes[index]
        case Unary(arg=arg):
            return shape_of(arg, shapes)
        case Sum(arg=arg):
            return (shape_of(arg, shapes)[0], 1)
        case Binary(left=left, right=right):
            a, b = shape_of(left, shapes), shape_of(right, shapes)
            for x, y in zip(a, b, strict=True):
                if x != y and 1 not in (x, y):
                    raise ValueError(f"operands of sizes {a} and {b} do not broadcast in {formula}")
            # A dimension of 1 broadcasts, also to one of 0.
            return (b[0] if a[0] == 1 else a[0], b[1] if a[1] == 1 else a[1])
    return (1, 1)


def times(a: Formula, b: Formula) -> Formula:
    """Return the product of two, without a factor of 1."""
    if a == Const(1.0):
        return b
    return a if b == Const(1.0) else Binary("mul", a, b)


def summed(formula: Formula, shapes: dict[int, Shape] | None) -> Formula:
    """Return the sum over the width; with shapes, factors of width 1 move outside."""
    number, factor = (Const(1.0), formula) if shapes is None else factors(formula, shapes)
    return times(number, Sum(factor))


def without_narrow_sums(formula: Formula, shapes: dict[int, Shape]) -> Formula:
    """Return a formula without the sums of one column."""
    plain = map_children(formula, lambda part: without_narrow_sums(part, shapes))
    return plain.arg if isinstance(plain, Sum) and shape_of(plain.arg, shapes)[1] == 1 else plain


def factors(formula: Formula, shapes: dict[int, Shape]) -> tuple[Formula, Formula]:
    """Return a factor of width 1 and another factor whose product is the formula."""
    if shape_of(formula, shapes)[1] == 1:
        return formula, Const(1.0)
    match formula:
        case Unary(op="neg", arg=arg):
            number, factor = factors(arg, shapes)
            return times(Const(-1.0), number), factor
        case Binary(op="mul", left=left, right=right):
            (a, x), (b, y) = factors(left, shapes), factors(right, shapes)
            return times(a, b), times(x, y)
        case Binary(op="div", left=left, right=right) if shape_of(right, shapes)[1] == 1:
            number, factor = factors(left, shapes)
            return Binary("div", number, right), factor
    return Const(1.0), formula


def where(condition: Formula, left: Formula, right: Formula) -> Formula:
    """Return ``left`` where the condition is not 0, else ``right``."""
    chosen = Binary("keep", left, condition), Binary("keep", right, Unary("iszero", condition))
    return Binary("add", *chosen)


def gradient(
    formula: Formula, index: int, seed: Formula, shapes: dict[int, Shape] | None = None
) -> Formula | None:
    """Return the gradient of operand ``index`` from the gradient of the message.

    The seed is a formula too, usually the operand with the gradient of the reduction. The result is
    None if the message does not depend on the operand.

    Args:
        formula: the message.
        index: of the operand.
        seed: gradient of the message.
        shapes: (heads, width) of all operands, including operands of the seed. Only sums over the
            width need them; without shapes, a gradient that has width 1 already may be summed
            again.
    """

    def width(part: Formula) -> int | None:
        return None if shapes is None else shape_of(part, shapes)[1]

    def part(child: Formula, child_seed: Formula | None) -> Formula | None:
        if child_seed is None:
            return None
        if width(child_seed) == width(child) == 1 != width(formula):
            # All columns read the child: repeat the seed; its columns are summed at the operand.
            child_seed = Binary("add", child_seed, _zeros(formula, shapes or {}))
        return gradient(child, index, child_seed, shapes)

    match formula:
        case Operand(index=other):
            return seed if other == index else None
        case Const():
            return None
        case Sum(arg=arg):
            # A seed of several columns: the sum was broadcast to them.
            return gradient(arg, index, seed if width(seed) == 1 else summed(seed, shapes), shapes)
        case Unary(op=op, arg=arg, value=value):
            parts = [part(arg, g) for g in _gradients(op, value, seed, formula, arg)]
        case Binary(op=op, left=left, right=right):
            seeds = _gradients(op, 0.0, seed, formula, left, right)
            parts = [part(child, g) for child, g in zip((left, right), seeds, strict=True)]
    terms = [term for term in parts if term is not None]
    if shapes is not None and shapes[index][1] == 1 and len({*map(width, terms)}) > 1:
        # Terms of width 1 must not be broadcast and summed with the others.
        terms = [term if width(term) == 1 else summed(term, shapes) for term in terms]
    return reduce(partial(Binary, "add"), terms) if terms else None


def _zeros(formula: Formula, shapes: dict[int, Shape]) -> Formula:
    """Return a formula with value 0 and the width of another one, which is not 1."""
    widest = next(o for o in _outside_of_sums(formula) if shapes[o.index][1] != 1)
    return Binary("keep", widest, Const(0.0))


def _outside_of_sums(formula: Formula) -> Iterator[Operand]:
    if isinstance(formula, Operand):
        yield formula
    elif not isinstance(formula, Sum):
        parts = children(formula)
        for part in parts[:1] if isinstance(formula, Binary) and formula.op == "sel" else parts:
            yield from _outside_of_sums(part)


_ARGUMENTS = {name: Operand("e", index) for index, name in enumerate("xyfg")}


@lru_cache(maxsize=256)
def _gradient_of(text: str) -> Formula:
    """Return a gradient in the table of functions, with operands e0, e1, ... for its names."""
    numbered = re.sub(r"\b[xyfg]\b", lambda name: str(_ARGUMENTS[name[0]]), text)
    return parse(numbered)


def _gradients(
    op: str, value: float, seed: Formula, formula: Formula, *args: Formula
) -> list[Formula | None]:
    """Return the gradients for the arguments of a function: None where it is constant."""
    texts = FUNCTIONS[op].gradients
    texts = (texts(value),) if callable(texts) else texts
    names = dict(zip("xy", args, strict=False)) | {"f": formula, "g": seed}
    arguments = {_ARGUMENTS[name]: value for name, value in names.items()}

    def substitute(node: Formula) -> Formula:
        match node:
            case Operand():
                return arguments[node]
            case Binary(op="mul", left=left, right=right):
                return times(substitute(left), substitute(right))
        return map_children(node, substitute)

    return [substitute(_gradient_of(text)) if text else None for text in texts]
