"""Every valid association of an expression, by algorithm 1 of the paper.

A product is a chain of factors. For all neighbours that a primitive can multiply, their result
replaces them in a shorter chain, until one factor is left. Trees are values, so trees that differ
only in the order of independent steps are equal.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeGuard

from pyg_accel.rewrite.equivalents import equivalents
from pyg_accel.rewrite.ir import Attend, Expr, Leaf, Map, Product, Sum, is_matrix, leaves_of
from pyg_accel.rewrite.prune import Associations, prune
from pyg_accel.rewrite.tree import WRITTEN, Node, Tree, is_sparse
from pyg_accel.rewrite.tree_cost import Assumptions

__all__ = ["associations_of", "enumerate_trees"]

# With more combinations, a sum considers only the first and the last tree of each term.
MOST = 256


@lru_cache(maxsize=64)
def associations_of(expr: Expr, assumed: Assumptions) -> Associations:
    """Enumerate and prune; layers with equal expressions share the result."""
    return prune(enumerate_trees(expr), assumed)


def enumerate_trees(expr: Expr) -> tuple[Tree, ...]:
    """Return all association trees of an expression, over all of its forms.

    Where a matrix of edges is multiplied with more than once (powers of the adjacency), its
    diagonals go to the same side each time: all to the features, or all to the edges, whose scaled
    values are then computed once and shared.
    """
    trees = (
        tree
        for form in equivalents(expr)
        for scaling in _scalings(form)
        for tree in _trees(form, scaling)
    )
    return tuple(dict.fromkeys(trees))


def _scalings(expr: Expr) -> tuple[str, ...]:
    """Return what diagonals may scale in one tree: rows of features, entries of edges, or any."""
    matrices = [leaf.name for leaf in leaves_of(expr) if is_matrix(leaf)]
    repeated = len(set(matrices)) < len(matrices)
    scaled = any(leaf.kind == "diagonal" for leaf in leaves_of(expr))
    return ("rows", "edges") if repeated and scaled else ("any",)


def _trees(expr: Expr, scaling: str) -> tuple[Tree, ...]:
    match expr:
        case Leaf():
            return (expr,)
        case Product(factors=factors):
            trees: dict[Tree, None] = {}
            for chain in product(*(_trees(f, scaling) for f in factors)):
                if scaling == "edges":
                    chain = _scale_all(chain)
                trees |= dict.fromkeys(_associate(chain, scaling, {}))
            return tuple(trees)
        case Sum(terms=terms):
            return tuple(map(_sum, _combinations(terms, scaling)))
        case Map(name=name, arg=arg, keeps=True):
            compressed = [
                Node("select", (t,), t.rows, t.cols, "cbsr", name=name)
                for t in _trees(arg, scaling)
            ]
            dense = [Node("map", (t,), t.rows, t.cols, name=WRITTEN) for t in compressed]
            return (*compressed, *dense)
        case Map(name=name, arg=arg, free=free):
            heads = 1 if expr.cols_out else None
            return tuple(
                Node("map", (t,), t.rows, expr.cols, heads=heads or t.heads, name=name, free=free)
                for t in _trees(arg, scaling)
            )
        case Attend(name=name, matrix=matrix, args=args, heads=heads, folds=folds):
            choices = product(*(_trees(a, scaling) for a in args))
            return tuple(
                Node("attend", (matrix, *choice), matrix.rows, matrix.cols, "weighted", heads,
                     name, folds=folds)
                for choice in choices
            )  # fmt: skip
    raise ValueError(f"{expr} was not simplified")


def _combinations(terms: tuple[Expr, ...], scaling: str) -> Iterator[tuple[Tree, ...]]:
    """Yield a tree for each term; terms that differ in names only have the same association."""
    options = [tuple(o for o in _trees(t, scaling) if o.kind != "cbsr") for t in terms]
    groups: dict[str, list[int]] = {}
    for number, option in enumerate(options):
        groups.setdefault(" ".join(_anonymous(t) for t in option), []).append(number)
    if prod(len(options[group[0]]) for group in groups.values()) > MOST:
        options = [tuple(dict.fromkeys((o[0], o[-1]))) for o in options]
    for choice in product(*(range(len(options[group[0]])) for group in groups.values())):
        chosen: dict[int, Tree] = {}
        for group, index in zip(groups.values(), choice, strict=True):
            chosen |= {number: options[number][index] for number in group}
        yield tuple(chosen[number] for number in range(len(terms)))


def _anonymous(tree: Tree) -> str:
    """Return a tree as text without the names of its leaves."""
    if isinstance(tree, Leaf):
        return f"{tree.kind}{tree.rows}{tree.cols}{tree.power}"
    return f"{tree.op}{tree.name}({','.join(map(_anonymous, tree.args))})"


def _associate(
    chain: tuple[Tree, ...], scaling: str, seen: dict[tuple[Tree, ...], tuple[Tree, ...]]
) -> tuple[Tree, ...]:
    """Algorithm 1 on one chain, with the results for shorter chains stored in ``seen``."""
    if len(chain) == 1:
        return chain
    if chain not in seen:
        trees: dict[Tree, None] = {}
        for start, length, node in _candidates(chain, scaling):
            shorter = (*chain[:start], node, *chain[start + length :])
            trees |= dict.fromkeys(_associate(shorter, scaling, seen))
        seen[chain] = tuple(trees)
    return seen[chain]


def _candidates(chain: tuple[Tree, ...], scaling: str) -> Iterator[tuple[int, int, Node]]:
    """Yield each product that one primitive computes: position, number of factors, result."""
    for start in range(len(chain) - 1):
        three = chain[start : start + 3]
        kinds = [_is_vector(t) or 2 * is_matrix(t) for t in three]
        if scaling == "any" and kinds == [1, 2, 1]:
            yield start, 3, _scale_edges(*three)
        node = _pair(chain[start], chain[start + 1], scaling)
        # A number commutes with everything: it comes last.
        first = chain[start]
        number = isinstance(first, Leaf) and first.number
        if node is not None and not (number and start + 2 < len(chain)):
            yield start, 2, node


def _pair(left: Tree, right: Tree, scaling: str) -> Node | None:
    """Return the product of two neighbours, if there is a primitive for it."""
    heads = max(left.heads, right.heads)
    shape = (left.rows, right.cols)
    if left.kind == "diagonal" and right.kind in ("data", "cbsr"):
        return Node("scale_rows", (left, right), *shape, right.kind, heads)
    if is_sparse(left) and right.kind in ("data", "cbsr"):
        return Node("spmm", (left, right), *shape, heads=heads)
    if left.kind in ("data", "weight") and right.kind == "weight":
        return Node("gemm", (left, right), *shape, left.kind, heads)
    scales = (_is_vector(left) and is_matrix(right)) or (is_matrix(left) and _is_vector(right))
    if scaling == "any" and scales:
        return _scale_edges(left, right)
    # (D A) D is left out: _candidates() yields D A D as one step.
    return None


def _is_vector(tree: Tree) -> TypeGuard[Leaf]:
    return isinstance(tree, Leaf) and tree.kind == "diagonal" and not tree.number


def _scale_edges(*args: Tree) -> Node:
    (matrix,) = filter(is_sparse, args)
    return Node("scale_edges", args, matrix.rows, matrix.cols, "weighted", matrix.heads)


def _scale_all(chain: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Multiply the diagonals beside every matrix of edges into its entries.

    A square between two matrices, ``A D² A``, gives one factor to each. A single diagonal goes to
    the matrix on its right.
    """
    remaining = list(chain)
    result: list[Tree] = []
    while remaining:
        item = remaining.pop(0)
        if not is_matrix(item):
            result.append(item)
            continue
        args = [result.pop(), item] if result and _is_vector(result[-1]) else [item]
        if remaining and _is_vector(diagonal := remaining[0]):
            if len(remaining) == 1 or not is_sparse(remaining[1]):
                args.append(remaining.pop(0))
            elif diagonal.power == 2:
                remaining[0] = replace(diagonal, power=1)
                args.append(remaining[0])
        result.append(_scale_edges(*args) if len(args) > 1 else item)
    return tuple(result)


def _sum(parts: tuple[Tree, ...]) -> Node:
    main = next((p for p in parts if p.kind != "bias"), parts[0])
    return Node("add", parts, main.rows, main.cols, heads=main.heads)
