"""Passes over the matrix IR that leave fewer and larger products (paper, section 3.2)."""

from dataclasses import replace

from pyg_accel.rewrite.ir import (
    SPARSE,
    Attend,
    Broadcast,
    Expr,
    Leaf,
    Map,
    Product,
    Sum,
    leaves_of,
    verify,
)

__all__ = ["merge", "simplify"]


def simplify(expr: Expr) -> Expr:
    """Turn row broadcasts into diagonal factors; leave one level of products and of sums.

    The paper's post-processing (section 3.2): ``d ⊗ (A X)`` is ``D A X``, which any neighbours of
    ``D`` may be associated with. A vector whose length is no dimension of a sparse matrix of the
    expression stays a barrier.
    """
    matrices = [leaf for leaf in leaves_of(expr) if leaf.kind in SPARSE]
    nodes = {size for matrix in matrices for size in (matrix.rows, matrix.cols)}
    result = _simplify(expr, nodes)
    verify(result)
    return result


def _simplify(expr: Expr, nodes: set[str]) -> Expr:
    match expr:
        case Product(factors=factors):
            parts = [_simplify(f, nodes) for f in factors]
            flat = [g for f in parts for g in (f.factors if isinstance(f, Product) else (f,))]
            return Product(_numbers_first(flat)) if len(flat) > 1 else flat[0]
        case Sum(terms=terms):
            parts = [_simplify(t, nodes) for t in terms]
            flat = [g for t in parts for g in (t.terms if isinstance(t, Sum) else (t,))]
            return Sum(tuple(flat)) if len(flat) > 1 else flat[0]
        case Broadcast(vector=vector, arg=arg):
            inner = _simplify(arg, nodes)
            if vector.rows not in nodes:
                return Map(f"{vector} ⊗ ", inner)
            diagonal = replace(vector, cols=vector.rows, kind="diagonal")
            return _simplify(Product((diagonal, inner)), nodes)
        case Map(arg=arg):
            return replace(expr, arg=_simplify(arg, nodes))
        case Attend(args=args):
            return replace(expr, args=tuple(_simplify(a, nodes) for a in args))
    return expr


def _numbers_first(factors: list[Expr]) -> tuple[Expr, ...]:
    """Factors with those that are numbers in front: they commute with all others."""
    numbers = [f for f in factors if isinstance(f, Leaf) and f.number]
    if not numbers or len(numbers) == len(factors):
        return tuple(factors)
    others = [f for f in factors if not (isinstance(f, Leaf) and f.number)]
    rows = others[0].rows
    return (*(replace(n, rows=rows, cols=rows) for n in numbers), *others)


def merge(expr: Expr) -> Expr:
    """Multiply neighbouring equal diagonals: the D D between two hops of D A D D A D."""
    match expr:
        case Product(factors=factors):
            merged: list[Expr] = []
            for factor in map(merge, factors):
                last = merged[-1] if merged else None
                if (
                    isinstance(factor, Leaf)
                    and isinstance(last, Leaf)
                    and factor.kind == "diagonal"
                    and (last.name, last.kind) == (factor.name, "diagonal")
                ):
                    merged[-1] = replace(last, power=last.power + factor.power)
                else:
                    merged.append(factor)
            return Product(tuple(merged)) if len(merged) > 1 else merged[0]
        case Sum(terms=terms):
            return Sum(tuple(map(merge, terms)))
        case Map(arg=arg):
            return replace(expr, arg=merge(arg))
        case Attend(args=args):
            return replace(expr, args=tuple(map(merge, args)))
    return expr
