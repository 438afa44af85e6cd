"""Splits formulas into the stages of csrc/cpu/stages.h.

A message such as ``exp(sum(mul(u0,v1))) * u2`` has parts of width 1 and parts of the width of
features. The stages are: sums over the width; numbers (per edge and head) that are computed from
these sums; and rows of features that are multiplied by one number each and reduced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import groupby

from pyg_accel.backends.cpu.program import MAX_INSTRUCTIONS, MAX_OPERANDS, WORDS, compile_formulas
from pyg_accel.formula import (
    SIDES,
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    factors,
    has_sum,
    map_children,
    operands_of,
    renumbered,
    shape_of,
    times,
)

__all__ = [
    "COMBINE", "REDUCES", "Shape", "Stages", "compile_stages", "is_product", "stages_reasons",
]  # fmt: skip

# The numbers of csrc/cpu/kernels.h: its enumerations list the same names in the same order.
COMBINE = ("mul", "add", "sub", "reverse_sub")
REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")
# The limits and numbers of csrc/cpu/stages.h.
MAX_SOURCE_NUMBERS, MAX_SUMS, MAX_RESULTS = 3, 4, 8
MAX_TERMS, MAX_OUTPUTS = 8, 6
FIRST_SUM, FIRST_RESULT = MAX_SOURCE_NUMBERS, MAX_SOURCE_NUMBERS + MAX_SUMS

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
    """

    code: tuple[int, ...]
    sides: tuple[int, ...]
    heads: int
    scores: int


@lru_cache(maxsize=1024)
def stages_reasons(
    formulas: tuple[Formula, ...],
    reduces: tuple[str, ...],
    shapes: tuple[Shape, ...],
    score: Formula | None = None,
) -> list[str]:
    """Return why :func:`compile_stages` does not support formulas."""
    try:
        compile_stages(formulas, reduces, shapes, score)
    except _TooMuch as error:
        return [str(error)]
    return []


@lru_cache(maxsize=1024)
def compile_stages(
    formulas: tuple[Formula, ...],
    reduces: tuple[str, ...],
    shapes: tuple[Shape, ...],
    score: Formula | None = None,
) -> Stages:
    """Split formulas into stages.

    Operands beyond the shapes are further arguments of the kernel: a number per source and head.

    Args:
        formulas: the message of each result.
        reduces: the reduction of each result.
        shapes: (heads, width) of the operands.
        score: its softmax over each row multiplies the messages, which are summed.
    """
    return _Builder(formulas, reduces, shapes, score).stages()


class _Builder:
    def __init__(
        self,
        formulas: tuple[Formula, ...],
        reduces: tuple[str, ...],
        shapes: tuple[Shape, ...],
        score: Formula | None,
    ) -> None:
        self.count = len(shapes)
        everything = (*formulas, *(() if score is None else (score,)))
        self.heads = max((h for h, _ in shapes), default=1)
        self.sizes = dict(enumerate(shapes))
        for number in range(FIRST_RESULT + MAX_RESULTS):
            self.sizes[self.count + number] = (self.heads, 1)
        self.sides = {o.index: SIDES.index(o.side) for f in everything for o in operands_of(f)}
        self.wide_sums: list[Formula] = []
        self.results: list[Formula] = []
        self.scores = -1  # which number() reads
        self.scores = -1 if score is None else self.number(self.pulled(score))
        # Rows that a sum over the width has read are in the cache for the terms of sums.
        self.has_sums = any(map(has_sum, everything))
        results = list(zip(formulas, reduces, strict=True))
        self.outputs = [(REDUCES.index(r), self.width(f)) for f, r in results]
        self.terms: list[tuple[int, int, int, Formula | None]] = []
        first = 0
        for formula, group in groupby(results, lambda result: result[0]):
            members = [r for _, r in group]  # equal formulas one after another share a term
            self.terms += [(first, len(members), *t) for t in self.terms_of(formula, members)]
            first += len(members)

    def stages(self) -> Stages:
        code = [len(self.wide_sums)]
        for formula in self.wide_sums:
            code += self.program([formula], self.width(formula))
        code += self.program(self.results, 1, heads_as_columns=True)
        code += [len(self.outputs), *(number for output in self.outputs for number in output)]
        code += [len(self.terms)]
        for output, count, coefficient, rest in self.terms:
            parts = [] if rest is None else [rest]
            code += [output, count, coefficient, *self.program(parts, self.outputs[output][1])]
        _limit(self.terms, MAX_TERMS, "terms")
        _limit(self.outputs, MAX_OUTPUTS, "results")
        sides = tuple(self.sides.get(i, -1) for i in range(self.count))  # -1: nothing reads it
        return Stages(tuple(code), sides, self.heads, self.scores)

    def program(
        self, formulas: Sequence[Formula], width: int, *, heads_as_columns: bool = False
    ) -> list[int]:
        """Return width, operands, instructions and results of a program."""
        local, used = renumbered(*formulas)
        shapes = tuple(self.sizes[i] for i in used)
        columns = width
        if heads_as_columns:
            shapes, columns = tuple((1, h) for h, _ in shapes), self.heads
        code, results = compile_formulas(tuple(local), shapes, columns)
        _limit(used, MAX_OPERANDS, "operands")
        _limit(code[::WORDS], MAX_INSTRUCTIONS, "operations")
        return [width, len(used), *used, len(code), *code, len(results), *results]

    def width(self, formula: Formula) -> int:
        return shape_of(formula, self.sizes)[1]

    def number(self, formula: Formula) -> int:
        """Return the index of the number that a formula computes."""
        for number, other in enumerate(self.results, FIRST_RESULT):
            if other == formula and number != self.scores:  # the softmax replaces the scores
                return number
        self.results.append(formula)
        _limit(self.results, MAX_RESULTS, "numbers per edge")
        return FIRST_RESULT + len(self.results) - 1

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

    def terms_of(
        self, formula: Formula, reduces: Sequence[str]
    ) -> Iterator[tuple[int, Formula | None]]:
        """Yield coefficients and rows whose products are the messages, or add up to them."""
        linear = reduces in (["sum"], ["mean"])
        if self.width(formula) == 1 or not linear:
            yield self.whole(formula)
            return
        parts = list(addends(formula))
        shared = self.has_sums or self.scores >= 0 or self.are_rows(parts)
        split = shared and all(self.width(part) > 1 for _, part in parts)
        for sign, part in parts if split else [(1.0, formula)]:
            coefficient, rest = self.product(part, early=False)
            coefficient = times(coefficient, Const(sign))
            yield (-1 if coefficient == Const(1.0) else self.number(coefficient)), rest

    def whole(self, formula: Formula) -> tuple[int, Formula | None]:
        """Return a formula as a single number, or as rows."""
        if self.width(formula) > 1:
            return -1, self.inner(formula, early=False)
        coefficient = self.pulled(formula)
        alone = coefficient == Const(1.0) and self.scores >= 0
        return (-1 if alone else self.number(coefficient)), None

    def are_rows(self, parts: Sequence[tuple[float, Formula]]) -> bool:
        """Return whether addends are rows that are only read and multiplied by numbers."""
        rows = [factors(part, self.sizes)[1] for _, part in parts]
        return len(rows) <= MAX_SUMS and all(
            isinstance(row, Operand) and row.side != "v" for row in rows
        )

    def product(self, formula: Formula, *, early: bool) -> tuple[Formula, Formula | None]:
        """Return a number and rows (None for 1) whose product is a formula."""
        number, rest = factors(formula, self.sizes)
        return self.pulled(number), None if rest == Const(1.0) else self.inner(rest, early=early)

    def inner(self, formula: Formula, *, early: bool) -> Formula:
        """Return a formula of rows, with its parts of width 1 replaced by numbers."""
        if self.width(formula) == 1 and not isinstance(formula, Operand | Const):
            if not early and (has_sum(formula) or len(self.results) < MAX_RESULTS):
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
