"""Messages that are linear in features of nodes, as sums of products of their operands."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyg_accel.formula import Binary, Const, Formula, Operand, Unary

__all__ = ["MOST", "Term", "terms_of"]

MOST = 4  # terms that a message may have


@dataclass(frozen=True)
class Term:
    """A number times scalars per node or edge, times features.

    Attributes:
        number: the constant factor.
        factors: operands with one column, and whether to divide by them.
        features: the operand with the features, if any.
    """

    number: float = 1.0
    factors: tuple[tuple[Operand, bool], ...] = ()
    features: Operand | None = None


def terms_of(formula: Formula, is_wide: Callable[[Operand], bool]) -> tuple[Term, ...] | None:
    """Return the terms of a message; None if it is not linear in its wide operands."""
    match formula:
        case Operand():
            if is_wide(formula):
                return (Term(features=formula),)
            return (Term(factors=((formula, False),)),)
        case Const(value=value):
            return (Term(value),)
        case Unary(op="neg", arg=arg):
            return _times(terms_of(arg, is_wide), (Term(-1.0),))
        case Binary(op="mul", left=left, right=right):
            return _times(terms_of(left, is_wide), terms_of(right, is_wide))
        case Binary(op="div", left=left, right=right):
            return _times(terms_of(left, is_wide), _inverse(terms_of(right, is_wide)))
        case Binary(op="add" | "sub" as op, left=left, right=right):
            first, second = terms_of(left, is_wide), terms_of(right, is_wide)
            second = _times(second, (Term(-1.0),)) if op == "sub" else second
            return None if first is None or second is None else (*first, *second)[: MOST + 1]
    return None


def _times(
    first: tuple[Term, ...] | None, second: tuple[Term, ...] | None
) -> tuple[Term, ...] | None:
    if first is None or second is None or len(first) * len(second) > MOST:
        return None
    if any(a.features and b.features for a in first for b in second):
        return None
    return tuple(
        Term(a.number * b.number, a.factors + b.factors, a.features or b.features)
        for a in first
        for b in second
    )


def _inverse(terms: tuple[Term, ...] | None) -> tuple[Term, ...] | None:
    if terms is None or len(terms) != 1 or terms[0].features or not terms[0].number:
        return None
    (term,) = terms
    inverted = tuple((operand, not below) for operand, below in term.factors)
    return (replace(term, number=1 / term.number, factors=inverted),)
