"""What a tree costs: its primitives, forward and backward, and the activations that it keeps.

Symbols stand for sizes here, so that trees can be compared before any input is seen
(:mod:`.prune`); :meth:`PrimitiveCall.primitive` puts numbers in for a cost model.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.ir import Leaf
from pyg_accel.rewrite.tree import Node, Tree, folded_nodes, nodes_of, static_nodes

__all__ = ["Assumptions", "Features", "PrimitiveCall", "TreeCost", "tree_cost"]

Features = Callable[[str, bool], GraphFeatures]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a cost assumes of the leaves of a tree.

    Attributes:
        train: gradients are computed, and count.
        learned: names of leaves that gradients flow into.
        static: names of leaves that are the same in the next call; what is computed from them
            alone is computed once.
        sampled: products with matrices of edges take a sample of each row (``sampled()``).
        spread: other processes own some of the rows that they read, and send them.
    """

    train: bool = False
    learned: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    sampled: bool = False
    spread: bool = False


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """One primitive with symbolic sizes.

    Attributes:
        name: as in :class:`~pyg_accel.rewrite.cost.base.Primitive`.
        rows: symbol of the rows of the result.
        inner: symbol of the inner dimension of a product, of the columns or entries of each row
            that are read where that is a part of them (``k``, ``S``), or empty.
        cols: symbol of its columns (a head).
        heads: heads.
        graph: name of the matrix of edges, or empty.
        transposed: its transpose is walked: a gradient.
        once: computed when a graph is first seen, and stored.
        shared: all heads weigh the same columns.
        fused: one kernel computes the weights and this product, of features that it reads for both.
    """

    name: str
    rows: str
    inner: str
    cols: str
    heads: int = 1
    graph: str = ""
    transposed: bool = False
    once: bool = False
    shared: bool = False
    fused: bool = False

    def primitive(self, sizes: Mapping[str, int], graphs: Features) -> Primitive:
        """Return it with numbers in place of symbols.

        Args:
            sizes: by symbol.
            graphs: features of a matrix of edges by name, or of its transpose.
        """
        graph = graphs(self.graph, self.transposed) if self.graph else None
        return Primitive(
            self.name, sizes[self.rows], sizes[self.inner] if self.inner else 0,
            sizes[self.cols] * self.heads, self.heads, graph,
            permuted=self.transposed and self.name == "spmm_weighted", shared=self.shared,
            fused=self.fused,
        )  # fmt: skip

    def __str__(self) -> str:
        heads = f"·{self.heads}" if self.heads > 1 else ""
        graph = f" {self.graph}{'ᵀ' if self.transposed else ''}" if self.graph else ""
        of = f"{self.inner} of " if self.inner == "k" and self.name != "cbsr_mm" else ""
        cols = "" if self.name in ("scale_edges", "edge_softmax") else f" {of}{self.cols}{heads}"
        inner = f"x{self.inner}" if self.inner and not of else ""
        rows = "" if self.graph else f" {self.rows}{inner}x{of}{self.cols}{heads}"
        fused = " (fused)" if self.fused else ""
        return f"{self.name}{graph}{cols if self.graph else rows}{fused}"


@dataclass(frozen=True)
class TreeCost:
    """The primitives of a tree.

    Attributes:
        forward: of the forward pass, in order.
        backward: of the backward pass; empty for inference.
        kept: (rows, cols, heads) of the activations that the backward pass needs.
    """

    forward: tuple[PrimitiveCall, ...]
    backward: tuple[PrimitiveCall, ...]
    kept: tuple[tuple[str, str, int], ...]

    @property
    def all(self) -> tuple[PrimitiveCall, ...]:
        """Forward and backward."""
        return self.forward + self.backward

    def bytes_kept(self, sizes: Mapping[str, int], itemsize: int = 4) -> int:
        """Return how much memory the activations take."""
        return sum(sizes[rows] * sizes[cols] * heads * itemsize for rows, cols, heads in self.kept)


def tree_cost(tree: Tree, given: Assumptions) -> TreeCost:
    """Return what a tree costs; equal nodes are paid for once."""
    forward: list[PrimitiveCall] = []
    backward: list[PrimitiveCall] = []
    kept: dict[object, tuple[str, str, int]] = {}
    learned: dict[Tree, bool] = {}

    def needs(tree: Tree | None) -> bool:
        if tree is None or not given.train:
            return False
        return tree.name in given.learned if isinstance(tree, Leaf) else learned[tree]

    nodes = list(nodes_of(tree))
    fused = {arg for n in nodes if n.op == "add" for arg in _addends(n)}
    static = static_nodes(tree, given.static, sampled=given.sampled)
    folded = folded_nodes(tree)
    readers = Counter(arg for n in nodes for arg in n.args)
    sent: set[Tree] = set()
    for node in nodes:
        learned[node] = any(map(needs, node.args))
        if node in folded:
            learned[node] = True
            forward += [PrimitiveCall("gemm", node.rows, node.args[0].cols, "1", 2 * node.heads)]  # type: ignore[union-attr]
            if given.train:
                backward += _gemm_gradients(node, needs, scores=True)
            continue
        if node.op == "map" or node.op == "attend":
            learned[node] = given.train
        ahead = _forward(node, sampled=given.sampled)
        data = node.args[-1]
        if node.op == "spmm" and not given.sampled and readers[node.args[0]] == 1:
            ahead = [replace(w, fused=_reads(node.args[0], data)) for w in ahead]
        if given.spread and node.op == "spmm" and data is not None and data not in sent:
            sent.add(data)  # once, however many matrices read it
            rows = PrimitiveCall(
                "exchange", "h", "", "k" if data.kind == "cbsr" else data.cols, data.heads
            )
            ahead = [rows, *ahead]
            backward += [rows] if needs(data) else []
        forward += [replace(w, once=True) for w in ahead] if node in static else ahead
        if learned[node]:
            backward += _backward(node, needs, sampled=given.sampled)
            if node.op == "gemm" and needs(node.args[1]) and isinstance(node.args[0], Node):
                left = node.args[0]
                kept[left] = (left.rows, "k" if left.kind == "cbsr" else left.cols, left.heads)
            if node.op == "spmm" and needs(node.args[0]) and node.args[1] not in fused:
                data_ = node.args[1]
                if isinstance(data_, Node):
                    kept[data_] = (data_.rows, data_.cols, data_.heads)
    return TreeCost(tuple(forward), tuple(backward), tuple(kept.values()))


def _reads(matrix: Tree | None, data: Tree | None) -> bool:
    """Whether the scores of attention are made of all columns of these features, edge by edge."""
    attends = isinstance(matrix, Node) and matrix.op == "attend" and not matrix.folds
    return attends and data in matrix.args  # type: ignore[union-attr]


def _addends(node: Node) -> list[Tree]:
    """The last products of a sum: they are accumulated, not added."""
    gemms = [a for a in node.args if isinstance(a, Node) and a.op == "gemm"]
    return [a for a in gemms if a.args[0] is not None and a.args[0].kind != "cbsr"]


def _forward(node: Node, *, sampled: bool = False) -> list[PrimitiveCall]:
    a = node.args
    rows, cols, heads = node.rows, node.cols, node.heads
    match node.op:
        case "gemm":
            assert a[0] is not None
            if a[0].kind == "cbsr":
                return [PrimitiveCall("cbsr_mm", rows, "k", cols, heads)]
            return [PrimitiveCall("gemm", rows, a[0].cols, cols, heads)]
        case "spmm":
            return [_spmm(node, sampled=sampled)]
        case "select":
            return [PrimitiveCall("maxk", rows, "k", cols)]
        case "scale_rows":
            return [
                PrimitiveCall("scale_rows", rows, "", "k" if node.kind == "cbsr" else cols, heads)
            ]
        case "scale_edges":
            return [PrimitiveCall("scale_edges", rows, "", "1", heads, _graph(a[1]))]
        case "add":
            others = [x for x in a if x is not None and x.kind != "bias"]
            additions = len(others) - max(len(_addends(node)), 1)
            biases = len(a) - len(others) if not _addends(node) else 0
            return [PrimitiveCall("elementwise", rows, "", cols, heads)] * (additions + biases)
        case "map":
            return [] if node.free else [PrimitiveCall("elementwise", rows, "", cols, heads)]
    graph = _graph(a[0])
    return [PrimitiveCall("sddmm", rows, "", "1" if node.folds else a[1].cols, heads, graph),  # type: ignore[union-attr]
            PrimitiveCall("edge_softmax", rows, "", "1", heads, graph)]  # fmt: skip


def _spmm(node: Node, *, turned: bool = False, sampled: bool = False) -> PrimitiveCall:
    """The product of a matrix of edges with features, or its gradient for the features."""
    matrix, data = node.args
    assert matrix is not None and data is not None
    rows = data.rows if turned else node.rows
    if data.kind == "cbsr":
        name, inner = "sspmm" if turned else "cbsr_spmm", "k"
    elif sampled:
        name, inner = "sampled_spmm", "S"
    else:
        name = "spmm_weighted" if matrix.kind == "weighted" else "spmm"
        inner = matrix.rows if turned else matrix.cols
    shared = data.heads < node.heads and not turned and name == "spmm_weighted"
    return PrimitiveCall(
        name, rows, inner, node.cols, node.heads, _graph(matrix), turned, shared=shared
    )


def _graph(tree: Tree | None) -> str:
    """The matrix of edges in which a sparse tree has its entries."""
    if isinstance(tree, Leaf):
        return tree.name
    assert tree is not None
    return next(_graph(a) for a in tree.args if a is not None and a.kind in ("sparse", "weighted"))


def _backward(
    node: Node, needs: Callable[[Tree | None], bool], *, sampled: bool = False
) -> list[PrimitiveCall]:
    a = node.args
    rows, cols, heads = node.rows, node.cols, node.heads
    match node.op:
        case "gemm":
            return _gemm_gradients(node, needs)
        case "spmm":
            matrix, data = a
            assert matrix is not None and data is not None
            work = []
            if needs(data):
                work.append(_spmm(node, turned=True, sampled=sampled))
            if needs(matrix):
                read = "k" if data.kind == "cbsr" else cols
                work.append(PrimitiveCall("sddmm", rows, "", read, heads, _graph(matrix)))
            return work
        case "scale_rows":
            return _forward(node) if needs(a[1]) else []
        case "select":  # a scatter of what came back
            return [PrimitiveCall("elementwise", rows, "", cols)] if needs(a[0]) else []
        case "scale_edges":
            return [PrimitiveCall("scale_edges", rows, "", "1", heads, _graph(a[1]))]
        case "map":
            return _forward(node)
        case "attend":
            graph = _graph(a[0])
            features = "1" if node.folds else a[1].cols  # type: ignore[union-attr]
            return [PrimitiveCall("edge_softmax", rows, "", "1", heads, graph),
                    PrimitiveCall("sddmm", rows, "", features, heads, graph)]  # fmt: skip
    return []


def _gemm_gradients(
    node: Node, needs: Callable[[Tree | None], bool], *, scores: bool = False
) -> list[PrimitiveCall]:
    data, weight = node.args
    assert data is not None
    cols, heads = ("1", 2 * node.heads) if scores else (node.cols, node.heads)
    if data.kind == "cbsr":  # as many multiplications each as forward
        return _forward(node) * (needs(weight) + needs(data))
    work = []
    if needs(weight):
        work.append(PrimitiveCall("gemm_tn", data.cols, data.rows, cols, heads))
    if needs(data):
        work.append(PrimitiveCall("gemm", data.rows, cols, data.cols, heads))
    return work
