"""Equal forms of an expression: sums expanded, and common factors factored out.

A linear layer after a sum can be applied to each of its terms, ``(A X + X) W = A (X W) + X W``; and
powers of a matrix can share factors by Horner's rule, ``P X W1 + P P X W2 = P (X W1 + P (X W2))``.
Each form has associations that the others do not have.
"""

from dataclasses import replace
from itertools import product

from pyg_accel.rewrite.ir import (
    Expr,
    Leaf,
    Product,
    Sum,
    is_bias,
    is_matrix,
    leaves_of,
    map_children,
    product_of,
    sum_of,
    verify,
)

__all__ = ["equivalents", "merge", "simplify"]


def equivalents(expr: Expr) -> tuple[Expr, ...]:
    """Return the distinct forms of an expression."""
    plain = simplify(expr)
    verify(plain)
    if not any(leaf.kind == "weight" for leaf in leaves_of(plain)):
        return (merge(plain),)  # no product gets smaller in another form
    expanded = distribute(plain)
    forms = (expanded, factor(expanded))
    for form in forms:
        verify(form)
    return tuple(dict.fromkeys(merge(simplify(form)) for form in (plain, *forms)))


def simplify(expr: Expr) -> Expr:
    """Move numbers to the front of each product: they commute with all other factors."""
    expr = map_children(expr, simplify)
    if not isinstance(expr, Product):
        return expr
    numbers = [f for f in expr.factors if isinstance(f, Leaf) and f.number]
    others = [f for f in expr.factors if f not in numbers]
    if not numbers or not others:
        return expr
    rows = others[0].rows
    return product_of((*(replace(n, rows=rows, cols=rows) for n in numbers), *others))


def merge(expr: Expr) -> Expr:
    """Multiply equal diagonals side by side: ``D A D D A D`` becomes ``D A D² A D``."""
    expr = map_children(expr, merge)
    if not isinstance(expr, Product):
        return expr
    merged: list[Expr] = []
    for item in expr.factors:
        last = merged[-1] if merged else None
        both = isinstance(item, Leaf) and isinstance(last, Leaf) and item.kind == last.kind
        if both and item.kind == "diagonal" and item.name == last.name:  # type: ignore[union-attr]
            merged[-1] = replace(last, power=last.power + item.power)  # type: ignore
        else:
            merged.append(item)
    return product_of(merged)


def distribute(expr: Expr) -> Expr:
    """Expand products of sums. A sum with a bias stays: the bias is a row, not a matrix."""
    expr = map_children(expr, distribute)
    if isinstance(expr, Product):
        choices = [f.terms if isinstance(f, Sum) and not any(map(is_bias, f.terms)) else (f,)
                   for f in expr.factors]  # fmt: skip
        expr = sum_of(product_of(term) for term in product(*choices))
    return expr


def factor(expr: Expr) -> Expr:
    """Factor out, recursively, the sparse factors that several terms of a sum begin with."""
    if not isinstance(expr, Sum):
        return expr if isinstance(expr, (Leaf, Product)) else map_children(expr, factor)
    groups: dict[object, list[Expr]] = {}
    for number, term in enumerate(expr.terms):
        groups.setdefault(_head(term) or number, []).append(term)
    parts: list[Expr] = []
    for head, members in groups.items():
        if not isinstance(head, tuple) or len(members) == 1:
            parts += members
            continue
        tails = [product_of(m.factors[len(head) :]) for m in members if isinstance(m, Product)]
        parts.append(product_of((*head, factor(sum_of(tails)))))
    return sum_of(parts)


def _head(term: Expr) -> tuple[Expr, ...] | None:
    """Return the factors of a term up to its first matrix of edges and the diagonals after it."""
    if not isinstance(term, Product):
        return None
    end = 0
    seen = False
    for item in term.factors:
        if is_matrix(item) and not seen:
            seen = True
        elif not isinstance(item, Leaf) or item.kind != "diagonal":
            break
        end += 1
    if not seen or end == len(term.factors):
        return None
    # In D A D D A D, the second D of the pair belongs to the next matrix.
    if is_matrix(term.factors[end]) and end >= 2 and term.factors[end - 1] == term.factors[end - 2]:
        end -= 1
    return term.factors[:end]
