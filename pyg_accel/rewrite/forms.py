"""Equal forms of one expression: with sums multiplied out, and with common factors taken out.

A linear layer after a sum can be applied to each of its terms, ``(A X + X) W = A (X W) + X W``; and
powers of a matrix need not be computed one by one, ``P X W1 + P P X W2 = P (X W1 + P (X W2))``,
which is Horner's rule. Each form has associations that the others do not have.
"""

from dataclasses import replace
from itertools import product

from pyg_accel.rewrite.ir import Attend, Expr, Leaf, Map, Product, Sum, leaves_of, verify
from pyg_accel.rewrite.simplification import merge, simplify

__all__ = ["forms"]


def forms(expr: Expr) -> tuple[Expr, ...]:
    """Return the expression and those equal to it, simplified and without repetitions."""
    plain = simplify(expr)
    if not any(leaf.kind == "weight" for leaf in leaves_of(plain)):
        return (merge(plain),)  # there is nothing to multiply first
    out = distribute(plain)
    return tuple(dict.fromkeys(merge(simplify(e)) for e in (plain, out, factor(out))))


def distribute(expr: Expr) -> Expr:
    """Multiply sums out."""
    match expr:
        case Product(factors=factors):
            choices = [_spread(f) for f in map(distribute, factors)]
            terms = [_flat(term) for term in product(*choices)]
            result: Expr = Sum(tuple(terms)) if len(terms) > 1 else terms[0]
        case Sum(terms=terms_):
            parts = [distribute(t) for t in terms_]
            flat = [u for t in parts for u in (t.terms if isinstance(t, Sum) else (t,))]
            result = Sum(tuple(flat))
        case Map(arg=arg):
            result = replace(expr, arg=distribute(arg))
        case Attend(args=args):
            result = replace(expr, args=tuple(map(distribute, args)))
        case _:
            result = expr
    verify(result)
    return result


def _spread(expr: Expr) -> tuple[Expr, ...]:
    """The terms of a sum that can be multiplied out; a bias is no matrix of the same size."""
    if not isinstance(expr, Sum):
        return (expr,)
    biased = any(isinstance(t, Leaf) and t.kind == "bias" for t in expr.terms)
    return (expr,) if biased else expr.terms


def factor(expr: Expr) -> Expr:
    """Take sparse factors that several terms begin with out of a sum, again and again."""
    match expr:
        case Sum(terms=terms):
            groups: dict[object, list[Expr]] = {}
            for number, term in enumerate(terms):
                groups.setdefault(_head(term) or number, []).append(term)
            parts: list[Expr] = []
            for head, members in groups.items():
                if not isinstance(head, tuple) or len(members) == 1:
                    parts += members
                    continue
                rests = [_flat(m.factors[len(head) :]) for m in members if isinstance(m, Product)]
                parts.append(_flat((*head, factor(Sum(tuple(rests))))))
            result: Expr = Sum(tuple(parts)) if len(parts) > 1 else parts[0]
        case Map(arg=arg):
            result = replace(expr, arg=factor(arg))
        case Attend(args=args):
            result = replace(expr, args=tuple(map(factor, args)))
        case _:
            result = expr
    verify(result)
    return result


def _head(term: Expr) -> tuple[Expr, ...] | None:
    """The factors of a term up to its first matrix of edges and the diagonals behind that."""
    if not isinstance(term, Product):
        return None
    end = 0
    seen = False
    for item in term.factors:
        kind = item.kind if isinstance(item, Leaf) else "data"
        if kind in ("sparse", "weighted") and not seen:
            seen = True
        elif kind != "diagonal":
            break
        end += 1
    # Behind D A D the next hop begins with a D of its own; so does what follows a bare A.
    if seen and end < len(term.factors) and _is_sparse(term.factors[end]) and _pair(term, end):
        end -= 1
    return term.factors[:end] if seen and end < len(term.factors) else None


def _pair(term: Product, end: int) -> bool:
    return end >= 2 and term.factors[end - 1] == term.factors[end - 2]


def _is_sparse(item: Expr) -> bool:
    return isinstance(item, Leaf) and item.kind in ("sparse", "weighted")


def _flat(factors: tuple[Expr, ...]) -> Expr:
    flat = tuple(g for f in factors for g in (f.factors if isinstance(f, Product) else (f,)))
    return Product(flat) if len(flat) > 1 else flat[0]
