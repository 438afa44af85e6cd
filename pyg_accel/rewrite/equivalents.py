"""Equal forms of an expression: sums expanded, and common factors factored out.

A linear layer after a sum can be applied to each of its terms, ``(A X + X) W = A (X W) + X W``; and
powers of a matrix can share factors by Horner's rule, ``P X W1 + P P X W2 = P (X W1 + P (X W2))``.
Each form has associations that the others do not have.
"""

from dataclasses import replace
from itertools import product

from pyg_accel.rewrite import ir

__all__ = ["equivalents", "merge", "simplify"]


def equivalents(expr: ir.Expr) -> tuple[ir.Expr, ...]:
    """Return the distinct forms of an expression."""
    plain = simplify(expr)
    ir.verify(plain)
    if not any(leaf.kind == "weight" for leaf in ir.leaves_of(plain)):
        return (merge(plain),)  # no product gets smaller in another form
    expanded = distribute(plain)
    forms = (expanded, factor(expanded))
    for form in forms:
        ir.verify(form)
    return tuple(dict.fromkeys(merge(simplify(form)) for form in (plain, *forms)))


def simplify(expr: ir.Expr) -> ir.Expr:
    """Move numbers to the front of each product: they commute with all other factors."""
    expr = ir.map_children(expr, simplify)
    if not isinstance(expr, ir.Product):
        return expr
    numbers = [f for f in expr.factors if isinstance(f, ir.Leaf) and f.number]
    others = [f for f in expr.factors if f not in numbers]
    if not numbers or not others:
        return expr
    rows = others[0].rows
    return ir.product_of((*(replace(n, rows=rows, cols=rows) for n in numbers), *others))


def merge(expr: ir.Expr) -> ir.Expr:
    """Multiply equal diagonals side by side: ``D A D D A D`` becomes ``D A D² A D``."""
    expr = ir.map_children(expr, merge)
    if not isinstance(expr, ir.Product):
        return expr
    merged: list[ir.Expr] = []
    for item in expr.factors:
        match merged[-1:], item:
            case [ir.Leaf(name, kind="diagonal") as last], ir.Leaf(other) if other == name:
                merged[-1] = replace(last, power=last.power + item.power)
            case _:
                merged.append(item)
    return ir.product_of(merged)


def distribute(expr: ir.Expr) -> ir.Expr:
    """Expand products of sums. A sum with a bias stays: the bias is a row, not a matrix."""
    expr = ir.map_children(expr, distribute)
    if isinstance(expr, ir.Product):
        choices = [f.terms if isinstance(f, ir.Sum) and not any(map(ir.is_bias, f.terms)) else (f,)
                   for f in expr.factors]  # fmt: skip
        expr = ir.sum_of(ir.product_of(term) for term in product(*choices))
    return expr


def factor(expr: ir.Expr) -> ir.Expr:
    """Factor out, recursively, the sparse factors that several terms of a sum begin with."""
    if not isinstance(expr, ir.Sum):
        return expr if isinstance(expr, (ir.Leaf, ir.Product)) else ir.map_children(expr, factor)
    groups: dict[object, list[ir.Expr]] = {}
    for number, term in enumerate(expr.terms):
        groups.setdefault(_head(term) or number, []).append(term)
    parts: list[ir.Expr] = []
    for head, members in groups.items():
        if not isinstance(head, tuple) or len(members) == 1:
            parts += members
            continue
        tails = [m.factors[len(head) :] for m in members if isinstance(m, ir.Product)]
        parts.append(ir.product_of((*head, factor(ir.sum_of(map(ir.product_of, tails))))))
    return ir.sum_of(parts)


def _head(term: ir.Expr) -> tuple[ir.Expr, ...] | None:
    """Return the factors of a term up to its first matrix of edges and the diagonals after it."""
    if not isinstance(term, ir.Product):
        return None
    end = 0
    seen = False
    for item in term.factors:
        if ir.is_matrix(item) and not seen:
            seen = True
        elif not isinstance(item, ir.Leaf) or item.kind != "diagonal":
            break
        end += 1
    if not seen or end == len(term.factors):
        return None
    head, following = term.factors[:end], term.factors[end]
    # In D A D D A D, the second D of the pair belongs to the next matrix.
    pair = ir.is_matrix(following) and head[-2:] == (head[-1],) * 2
    return head[:-1] if pair else head
