"""Messages that are linear in features of nodes, as sums of products of their operands."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pyg_accel.formula import Binary, Const, Formula, Operand, Unary
from pyg_accel.rewrite.leaves import Unreadable, require

__all__ = ["Term", "terms_of"]

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


def terms_of(formula: Formula, is_wide: Callable[[Operand], bool]) -> tuple[Term, ...]:
    """Return the terms of a message.

    Raises:
        Unreadable: if it is not linear in its wide operands, or has too many terms.
    """
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
            require(len(first) + len(second) <= MOST)
            return first + (_times(second, (Term(-1.0),)) if op == "sub" else second)
    raise Unreadable


def _times(first: tuple[Term, ...], second: tuple[Term, ...]) -> tuple[Term, ...]:
    require(len(first) * len(second) <= MOST)
    require(not any(a.features and b.features for a in first for b in second))
    return tuple(
        Term(a.number * b.number, a.factors + b.factors, a.features or b.features)
        for a in first
        for b in second
    )


def _inverse(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    require(len(terms) == 1 and not terms[0].features and terms[0].number)
    (term,) = terms
    inverted = tuple((operand, not below) for operand, below in term.factors)
    return (replace(term, number=1 / term.number, factors=inverted),)
