"""Every valid association of an expression, by algorithm 1 of the paper.

A product is a chain of factors. Wherever neighbours can be multiplied by a primitive, one new chain
is made in which their result stands in their place, until one factor is left. Trees are values, so
those that differ in the order of independent steps only are one tree.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from pyg_accel.rewrite.equivalents import equivalents
from pyg_accel.rewrite.ir import (
    Attend,
    Expr,
    Leaf,
    Map,
    Product,
    Sum,
    leaves_of,
)
from pyg_accel.rewrite.prune import Associations, prune
from pyg_accel.rewrite.tree import WRITTEN, Node, Tree, is_sparse, leaves_in
from pyg_accel.rewrite.tree_cost import Assumptions

__all__ = ["associations_of", "enumerate_trees"]

MOST = 256  # combinations of the terms of one sum; beyond, each term keeps its first and last


@lru_cache(maxsize=64)
def associations_of(expr: Expr, assumed: Assumptions) -> Associations:
    """Enumerate and prune; layers that compute the same share the result."""
    trees = enumerate_trees(expr)
    if assumed.sampled:  # a mean is over the sample: its kernel counts what it takes
        trees = tuple(t for t in trees if not any(leaf.mean_of for leaf in leaves_in(t)))
    return prune(trees, assumed)


def enumerate_trees(expr: Expr) -> tuple[Tree, ...]:
    """Return all association trees of an expression, over all of its forms.

    Where a matrix of edges is multiplied with more than once (powers of the adjacency), its
    diagonals go to the same side each time: all to the features, or all to the edges, whose scaled
    values are then computed once and shared.
    """
    found: dict[Tree, None] = {}
    for form in equivalents(expr):
        for scaling in _scalings(form):
            for tree in _trees(form, scaling):
                found.setdefault(_means(tree))
    return tuple(found)


def _scalings(expr: Expr) -> tuple[str, ...]:
    matrices = [leaf.name for leaf in leaves_of(expr) if is_sparse(leaf)]
    repeated = len(set(matrices)) < len(matrices)
    scaled = any(leaf.kind == "diagonal" for leaf in leaves_of(expr))
    return ("rows", "edges") if repeated and scaled else ("any",)


def _trees(expr: Expr, scaling: str) -> tuple[Tree, ...]:
    match expr:
        case Leaf():
            return (expr,)
        case Product(factors=factors):
            found: dict[Tree, None] = {}
            for chain in product(*(_trees(f, scaling) for f in factors)):
                if scaling == "edges":
                    chain = _scale_all(chain)
                for tree in _associate(chain, scaling, {}):
                    found.setdefault(tree)
            return tuple(found)
        case Sum(terms=terms):
            return tuple(map(_sum, _combinations(terms, scaling)))
        case Map(name=name, arg=arg, keeps=True, multiplies=multiplies):
            kept = [
                Node("select", (t,), t.rows, t.cols, "cbsr", name=name, multiplies=multiplies)
                for t in _trees(arg, scaling)
            ]
            written = [Node("map", (t,), t.rows, t.cols, name=WRITTEN) for t in kept]
            return (*kept, *written)
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
    """The choices for the terms of a sum; terms that differ in names only are treated alike."""
    options = [tuple(o for o in _trees(t, scaling) if o.kind != "cbsr") for t in terms]
    alike: dict[str, list[int]] = {}
    for number, option in enumerate(options):
        alike.setdefault(" ".join(_anonymous(t) for t in option), []).append(number)
    groups = list(alike.values())
    counts = [len(options[group[0]]) for group in groups]
    if prod(counts) > MOST:
        options = [tuple(dict.fromkeys((o[0], o[-1]))) for o in options]
        counts = [len(options[group[0]]) for group in groups]
    for choice in product(*(range(n) for n in counts)):
        picked: dict[int, Tree] = {}
        for group, which in zip(groups, choice, strict=True):
            picked |= {number: options[number][which] for number in group}
        yield tuple(picked[number] for number in range(len(terms)))


def _anonymous(tree: Tree | None) -> str:
    """A tree without the names of its leaves."""
    if tree is None:
        return "-"
    if isinstance(tree, Leaf):
        return f"{tree.kind}{tree.rows}{tree.cols}{tree.power}"
    return f"{tree.op}{tree.name}({','.join(map(_anonymous, tree.args))})"


def _associate(
    chain: tuple[Tree, ...], scaling: str, seen: dict[tuple[Tree, ...], tuple[Tree, ...]]
) -> tuple[Tree, ...]:
    """Algorithm 1 on one chain, remembering chains that other orders have led to."""
    if len(chain) == 1:
        return chain
    if chain not in seen:
        found: dict[Tree, None] = {}
        for start, length, node in _candidates(chain, scaling):
            rest = (*chain[:start], node, *chain[start + length :])
            for tree in _associate(rest, scaling, seen):
                found.setdefault(tree)
        seen[chain] = tuple(found)
    return seen[chain]


def _candidates(chain: tuple[Tree, ...], scaling: str) -> Iterator[tuple[int, int, Node]]:
    """What can be multiplied now: position, number of factors, result."""
    for start in range(len(chain) - 1):
        three = chain[start : start + 3]
        kinds = [_is_vector(t) or 2 * _is_matrix(t) for t in three]
        if scaling == "any" and kinds == [1, 2, 1]:
            yield start, 3, _scale_edges(*three)
        node = _pair(chain[start], chain[start + 1], scaling)
        # A number commutes with everything: it comes last.
        first = chain[start]
        number = isinstance(first, Leaf) and first.number
        if node is not None and not (number and start + 2 < len(chain)):
            yield start, 2, node


def _pair(left: Tree, right: Tree, scaling: str) -> Node | None:
    """The primitive for two neighbours, if there is one."""
    heads = max(left.heads, right.heads)
    shape = (left.rows, right.cols)
    if left.kind == "diagonal" and right.kind in ("data", "cbsr"):
        compressed = isinstance(right, Node) and right.multiplies
        return Node("scale_rows", (left, right), *shape, right.kind, heads, multiplies=compressed)
    if is_sparse(left) and right.kind in ("data", "cbsr"):
        return Node("spmm", (left, right), *shape, heads=heads)
    if isinstance(left, Node) and left.multiplies and right.kind == "weight":
        return Node("gemm", (left, right), *shape, heads=heads)
    if left.kind in ("data", "weight") and right.kind == "weight":
        return Node("gemm", (left, right), *shape, left.kind, heads)
    if scaling == "any" and _is_vector(left) and _is_matrix(right):
        return _scale_edges(left, right, None)
    if scaling == "any" and _is_matrix(left) and _is_vector(right):
        return _scale_edges(None, left, right)
    # (D A) D would be D A D in two steps: the one step stands for it.
    return None


def _is_vector(tree: Tree) -> bool:
    return isinstance(tree, Leaf) and tree.kind == "diagonal" and not tree.number


def _is_matrix(tree: Tree) -> bool:
    return isinstance(tree, Leaf) and is_sparse(tree)


def _scale_edges(left: Tree | None, matrix: Tree, right: Tree | None) -> Node:
    return Node("scale_edges", (left, matrix, right), matrix.rows, matrix.cols, "weighted",
                matrix.heads)  # fmt: skip


def _scale_all(chain: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Give the diagonals beside every matrix of edges to its entries.

    A square between two hops is shared out. What is left over stays with the features.
    """
    items = list(chain)
    result: list[Tree] = []
    for at, item in enumerate(items):
        if not (_is_matrix(item)):
            result.append(item)
            continue
        left: Tree | None = None
        if result and _is_vector(result[-1]):
            left = result.pop()
        right: Tree | None = None
        following = items[at + 1] if at + 1 < len(items) else None
        if isinstance(following, Leaf) and _is_vector(following):
            hop = at + 2 < len(items) and is_sparse(items[at + 2])
            if hop and following.power == 2:
                right = items[at + 1] = replace(following, power=1)
            elif not hop:
                right = following
                items[at + 1] = Leaf("", "", "", "data")  # taken
        result.append(item if left is None and right is None else _scale_edges(left, item, right))
    return tuple(r for r in result if r != Leaf("", "", "", "data"))


def _means(tree: Tree) -> Tree:
    """Let the kernel for means divide by the numbers of entries."""
    if isinstance(tree, Leaf):
        return tree
    args = tuple(None if a is None else _means(a) for a in tree.args)
    if tree.op == "scale_rows":
        diagonal, data = args
        if (
            isinstance(diagonal, Leaf)
            and diagonal.power == 1
            and isinstance(data, Node)
            and data.op == "spmm"
            and str(data.args[0]) == diagonal.mean_of
        ):
            return replace(data, mean=True)
    return tree if args == tree.args else replace(tree, args=args)


def _sum(parts: tuple[Tree, ...]) -> Node:
    main = next((p for p in parts if p.kind != "bias"), parts[0])
    return Node("add", parts, main.rows, main.cols, heads=main.heads)
