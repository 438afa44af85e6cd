"""Association trees: primitives and their operands (paper, section 3.3)."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from pyg_accel.rewrite.ir import SPARSE, Leaf

__all__ = [
    "WRITTEN",
    "Node",
    "Tree",
    "composition_of",
    "folded_nodes",
    "is_sparse",
    "leaves_in",
    "matrix_of",
    "nodes_of",
    "static_nodes",
]

WRITTEN = "dense"  # name of the map that writes the zeros of a selection


@dataclass(frozen=True, slots=True)
class Node:
    """An intermediate result. Nodes are values: equal ones are computed once.

    Attributes:
        op: the primitive, with its arguments: ``gemm`` (data, weight), ``spmm`` (matrix, data),
            ``scale_rows`` (diagonal, data), ``scale_edges`` (a matrix, with a diagonal before it,
            after it, or both), ``add`` (terms), ``map`` (argument), ``attend`` (matrix, features),
            ``select`` (argument): a map that keeps ``k`` columns of each row.
        args: its arguments.
        rows: symbol of its number of rows.
        cols: symbol of its number of columns per head.
        kind: ``data``, ``weight`` or ``weighted`` as for a leaf; or ``cbsr``: each row stores only
            the ``k`` selected columns.
        heads: number of attention heads; scores per edge for a matrix.
        name: of a map or an attention.
        folds: of attention, see :class:`~pyg_accel.rewrite.ir.Attend`.
        free: whether a map is a view.
    """

    op: str
    args: "tuple[Tree, ...]"
    rows: str
    cols: str
    kind: str = "data"
    heads: int = 1
    name: str = ""
    folds: bool = False
    free: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the hash once: it visits the whole tree, and trees are keys of many dicts."""
        value = hash((self.op, self.args, self.cols, self.name))
        object.__setattr__(self, "_hash", value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Compute the hash again when unpickled: hashes of strings differ between processes."""
        return Node, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __str__(self) -> str:
        args = [*map(str, self.args)]
        if self.op == "add":
            return f"({' + '.join(args)})"
        if self.name:
            return f"{self.name}({', '.join(args)})"
        if self.mean and isinstance(matrix := self.args[0], Leaf):
            return f"mean({matrix.name}·{args[1]})"
        return f"({'·'.join(args)})"

    @property
    def mean(self) -> bool:
        """Whether an spmm takes the mean over each row."""
        return self.op == "spmm" and matrix_of(self).mean


Tree = Node | Leaf


def is_sparse(tree: Tree) -> bool:
    """Whether it is a matrix of edges."""
    return tree.kind in SPARSE


def leaves_in(tree: Tree) -> Iterator[Leaf]:
    """Yield every leaf from left to right, with repetitions."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for arg in tree.args:
            yield from leaves_in(arg)


def matrix_of(tree: Tree) -> Leaf:
    """Return the matrix of edges in a product with one, or in another matrix with its entries."""
    return tree if isinstance(tree, Leaf) else next(map(matrix_of, filter(is_sparse, tree.args)))


def nodes_of(tree: Tree) -> Iterator[Node]:
    """Yield every distinct node once, arguments before their users."""
    seen: set[Node] = set()

    def walk(item: Tree) -> Iterator[Node]:
        if not isinstance(item, Node) or item in seen:
            return
        seen.add(item)
        for arg in item.args:
            yield from walk(arg)
        yield item

    return walk(tree)


def static_nodes(tree: Tree, leaves: frozenset[str]) -> set[Node]:
    """Return the nodes whose values are the same in every call with the same graph.

    Attention (it draws dropout), maps (any function) and products with weights are never static.

    Args:
        tree: an association.
        leaves: names of the static leaves.
    """
    static: set[Node] = set()
    for node in nodes_of(tree):
        if node.op not in ("attend", "map", "gemm") and all(
            a.name in leaves if isinstance(a, Leaf) else a in static for a in node.args
        ):
            static.add(node)
    return static


def folded_nodes(tree: Tree) -> set[Tree]:
    """Return the products ``X W`` that only scores of attention read; they use ``X (W a)``."""
    by_scores: set[Tree] = set()
    by_others: set[Tree] = set()
    for node in nodes_of(tree):
        readers = by_scores if node.op == "attend" and node.folds else by_others
        readers.update(a for a in node.args if isinstance(a, Node) and a.op == "gemm")
    return by_scores - by_others


def composition_of(tree: Tree) -> str:
    """Return the paper's name for a composition (section 5), or an empty string.

    Normalisation is ``dynamic`` if it scales the rows of features, ``precompute`` if it scales the
    entries of the matrix, once per graph. Attention is ``reuse`` if it sums the product that its
    scores read, ``recompute`` if it sums the features before this product.
    """
    nodes = [*nodes_of(tree)]
    if sums := [n for n in nodes if n.op == "spmm" and getattr(n.args[0], "op", "") == "attend"]:
        features = any(isinstance(n.args[1], Leaf) and n.args[1].name[0] in "XYZ" for n in sums)
        return "recompute" if features else "reuse"
    scaled = {n.op for n in nodes
              if n.op == "scale_edges" or (n.op == "scale_rows" and not _by_number(n))}  # fmt: skip
    names = {"scale_edges": "precompute", "scale_rows": "dynamic"}
    return names[scaled.pop()] if len(scaled) == 1 else "partly precompute" if scaled else ""


def _by_number(node: Node) -> bool:
    return isinstance(node.args[0], Leaf) and node.args[0].number
