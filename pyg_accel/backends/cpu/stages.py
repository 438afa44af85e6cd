"""Splits formulas into the stages of csrc/cpu/stages.h.

A message such as ``exp(sum(mul(u0,v1))) * u2`` has parts of width 1 and parts of the width of
features. The stages are: sums over the width; numbers (per edge and head) that are computed from
these sums; and rows of features that are multiplied by one number each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce

from pyg_accel.backends.cpu.program import (
    MAX_INSTRUCTIONS,
    MAX_OPERANDS,
    SIDES,
    WORDS,
    compile_formulas,
)
from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    factors,
    has_sum,
    map_children,
    map_operands,
    operands_of,
    selects,
    shape_of,
    times,
)

__all__ = ["Shape", "Stages", "compile_stages", "is_plain", "is_product", "stages_reasons"]

# The limits and numbers of csrc/cpu/stages.h and kernels.h.
MAX_GIVEN, MAX_SUMS, MAX_RESULTS = 2, 4, 8
MAX_TERMS, MAX_OUTPUTS, MAX_STORES = 8, 6, 2
FIRST_SUM, FIRST_RESULT = MAX_GIVEN, MAX_GIVEN + MAX_SUMS

Shape = tuple[int, int]


class _TooMuch(Exception):
    """The kernel does not support a formula."""


@dataclass(frozen=True)
class Stages:
    """The arguments of the kernel.

    Attributes:
        code: integers, in the format that stages.cpp reads.
        sides: of the operands.
        heads: of the outputs.
        scores: the index of the number that the softmax is taken of, or -1.
        plain: whether rows of features are only read and multiplied by numbers.
    """

    code: tuple[int, ...]
    sides: tuple[int, ...]
    heads: int
    scores: int
    plain: bool


@lru_cache(maxsize=1024)
def stages_reasons(
    sums: tuple[Formula, ...],
    stores: tuple[Formula, ...],
    shapes: tuple[Shape, ...],
    score: Formula | None = None,
) -> list[str]:
    """Return why :func:`compile_stages` does not support formulas."""
    try:
        compile_stages(sums, stores, shapes, score)
    except _TooMuch as error:
        return [str(error)]
    return []


@lru_cache(maxsize=1024)
def compile_stages(
    sums: tuple[Formula, ...],
    stores: tuple[Formula, ...],
    shapes: tuple[Shape, ...],
    score: Formula | None = None,
) -> Stages:
    """Split formulas into stages.

    Operands beyond the shapes are further arguments of the kernel: a number per source and head.

    Args:
        sums: to sum over each row.
        stores: with one number per edge and head, to return for every edge.
        shapes: (heads, width) of the operands.
        score: its softmax over each row multiplies the sums.
    """
    return _Builder(sums, stores, shapes, score).stages()


def is_plain(formula: Formula, reduce: str, shapes: tuple[Shape, ...]) -> bool:
    """Return whether stages that are ``plain`` compute a reduction of a formula."""
    if reduce not in ("sum", "none"):
        return False
    sums_and_stores = ((formula,), ()) if reduce == "sum" else ((), (formula,))
    if stages_reasons(*sums_and_stores, shapes):
        return False
    return compile_stages(*sums_and_stores, shapes).plain


class _Builder:
    def __init__(
        self,
        sums: tuple[Formula, ...],
        stores: tuple[Formula, ...],
        shapes: tuple[Shape, ...],
        score: Formula | None,
    ) -> None:
        self.count = len(shapes)
        everything = (*sums, *stores, *(() if score is None else (score,)))
        self.heads = max((h for h, _ in shapes), default=1)
        self.sizes = dict(enumerate(shapes))
        for number in range(FIRST_RESULT + MAX_RESULTS):
            self.sizes[self.count + number] = (self.heads, 1)
        self.sides = {o.index: SIDES.index(o.side) for f in everything for o in operands_of(f)}
        if any(selects(f) for f in everything):
            raise _TooMuch("winners of a maximum among the operands")
        self.wide_sums: list[Formula] = []
        self.results: list[Formula] = []
        self.scores = -1 if score is None else self.number(self.pulled(score))
        self.terms = [(o, *term) for o, f in enumerate(sums) for term in self.terms_of(f)]
        self.widths = [self.width(f) for f in sums]
        if any(self.width(f) > 1 for f in stores):
            raise _TooMuch("rows of features that are kept for every edge")
        self.stores = [self.number(self.pulled(f)) for f in stores]

    def stages(self) -> Stages:
        code = [len(self.wide_sums)]
        for formula in self.wide_sums:
            code += self.program([formula], self.width(formula))
        code += self.program(self.results, 1, heads_as_columns=True)
        code += [len(self.widths), *self.widths, len(self.terms)]
        for output, coefficient, rest in self.terms:
            parts = [] if rest is None else [rest]
            width = self.widths[output]
            code += [output, coefficient, *self.program(parts, width)]
        code += [len(self.stores), *self.stores]
        _limit(self.terms, MAX_TERMS, "terms")
        _limit(self.widths, MAX_OUTPUTS, "results")
        _limit(self.stores, MAX_STORES, "results per edge")
        sides = tuple(self.sides.get(i, -1) for i in range(self.count))  # -1: nothing reads it
        plain = all(is_product(f) for f in self.wide_sums) and all(
            rest is None or (isinstance(rest, Operand) and rest.side != "v")
            for _, _, rest in self.terms
        )
        return Stages(tuple(code), sides, self.heads, self.scores, plain)

    def program(
        self, formulas: Sequence[Formula], width: int, *, heads_as_columns: bool = False
    ) -> list[int]:
        """Return width, operands, instructions and results of a program."""
        used = list(dict.fromkeys(o.index for f in formulas for o in operands_of(f)))
        local = [map_operands(f, lambda o: Operand(o.side, used.index(o.index))) for f in formulas]
        shapes = tuple(self.sizes[i] for i in used)
        columns = width
        if heads_as_columns:
            shapes, columns = tuple((1, h) for h, _ in shapes), self.heads
        code, results = compile_formulas(tuple(local), shapes, columns)
        if len(used) > MAX_OPERANDS or len(code) // WORDS > MAX_INSTRUCTIONS:
            raise _TooMuch("a formula of too many operands or operations")
        return [width, len(used), *used, len(code), *code, len(results), *results]

    def width(self, formula: Formula) -> int:
        return shape_of(formula, self.sizes)[1]

    def number(self, formula: Formula) -> int:
        """Return the index of the number that a formula computes."""
        if formula not in self.results:
            self.results.append(formula)
            _limit(self.results, MAX_RESULTS, "numbers per edge")
        return FIRST_RESULT + self.results.index(formula)

    def pulled(self, formula: Formula) -> Formula:
        """Return a formula of width 1 with its sums replaced by the results of the first stage."""
        match formula:
            case Sum(arg=arg):
                parts = [self.summed(sign, part, self.width(arg)) for sign, part in addends(arg)]
                return reduce(partial(Binary, "add"), parts)
        return map_children(formula, self.pulled)

    def summed(self, sign: float, part: Formula, width: int) -> Formula:
        """Return the sum over the width of an addend, as a formula of numbers."""
        coefficient, rest = self.product(part, early=True)
        if rest is None:
            return times(coefficient, Const(sign * width))
        if rest not in self.wide_sums:
            self.wide_sums.append(rest)
            _limit(self.wide_sums, MAX_SUMS, "sums over the width")
        number = Operand("e", self.count + FIRST_SUM + self.wide_sums.index(rest))
        return times(times(coefficient, Const(sign)), number)

    def terms_of(self, formula: Formula) -> Iterator[tuple[int, Formula | None]]:
        """Yield coefficients and rows whose products add up to a formula."""
        for sign, part in addends(formula) if self.width(formula) > 1 else [(1.0, formula)]:
            coefficient, rest = self.product(part, early=False)
            coefficient = times(coefficient, Const(sign))
            if rest is None and self.width(formula) > 1:
                raise _TooMuch("a number that is added to rows")
            alone = coefficient == Const(1.0) and (rest is not None or self.scores >= 0)
            yield (-1 if alone else self.number(coefficient)), rest

    def product(self, formula: Formula, *, early: bool) -> tuple[Formula, Formula | None]:
        """Return a number and rows (None for 1) whose product is a formula."""
        number, rest = factors(formula, self.sizes)
        return self.pulled(number), None if rest == Const(1.0) else self.inner(rest, early=early)

    def inner(self, formula: Formula, *, early: bool) -> Formula:
        """Return a formula of rows, with its parts of width 1 replaced by numbers."""
        if self.width(formula) == 1 and not isinstance(formula, Operand | Const):
            if not early:
                return Operand("e", self.count + self.number(self.pulled(formula)))
            if has_sum(formula):
                raise _TooMuch("a sum over the width inside another")
            return formula
        return map_children(formula, partial(self.inner, early=early))


def is_product(formula: Formula) -> bool:
    """Return whether a formula multiplies two operands."""
    match formula:
        case Binary(op="mul", left=Operand(), right=Operand()):
            return True
    return False


def _limit(parts: Sequence[object], most: int, what: str) -> None:
    if len(parts) > most:
        raise _TooMuch(f"more than {most} {what}")


def addends(formula: Formula, sign: float = 1.0) -> Iterator[tuple[float, Formula]]:
    """What is added up at the top of a formula, with signs."""
    match formula:
        case Binary(op=("add" | "sub") as op, left=left, right=right):
            yield from addends(left, sign)
            yield from addends(right, sign if op == "add" else -sign)
        case _:
            yield sign, formula
