"""The cost of a tree: its primitives, forward and backward, and the activations that it saves.

Sizes are symbols here, so that trees can be compared for all inputs (:mod:`.prune`);
:meth:`PrimitiveCall.primitive` replaces them with numbers for a cost model.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.ir import Leaf
from pyg_accel.rewrite.tree import Node, Tree, folded_nodes, matrix_of, nodes_of, static_nodes

__all__ = ["Assumptions", "Features", "PrimitiveCall", "TreeCost", "tree_cost"]

Features = Callable[[str, bool], GraphFeatures]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The properties besides sizes that determine the cost of a tree.

    Attributes:
        train: whether the backward pass counts too.
        learned: names of leaves into which gradients flow.
        static: names of leaves that are the same in the next call; nodes that only depend on
            static leaves are computed once.
        sampled: whether products with matrices of edges take a sample of each row (``sampled()``).
        spread: whether other processes own, and send, some of the rows that these products read.
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
        inner: symbol of the inner dimension of a product; ``k`` or ``S`` if only so many columns
            or entries of each row are read; or empty.
        cols: symbol of its columns per head.
        heads: number of heads.
        graph: name of the matrix of edges, or empty.
        transposed: whether it is a product with the transposed matrix: a gradient.
        once: whether it is computed once per graph, and stored.
        shared: whether all heads multiply the same columns.
        fused: whether one kernel computes the weights of edges and this product, and reads the
            features once for both.
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
        """Return the primitive with numbers for symbols.

        Args:
            sizes: by symbol.
            graphs: returns the features of a matrix of edges by name, or of its transpose.
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
        of = f"{self.inner} of " if self.inner == "k" else ""
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
        saved: (rows, cols, heads) of the activations that the backward pass needs.
    """

    forward: tuple[PrimitiveCall, ...]
    backward: tuple[PrimitiveCall, ...]
    saved: tuple[tuple[str, str, int], ...]

    @property
    def all(self) -> tuple[PrimitiveCall, ...]:
        """Forward and backward."""
        return self.forward + self.backward

    def saved_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return the size of these activations in float32, in bytes."""
        return sum(4 * sizes[rows] * sizes[cols] * heads for rows, cols, heads in self.saved)


def tree_cost(tree: Tree, assumed: Assumptions) -> TreeCost:
    """Return the cost of a tree; equal nodes count once."""
    forward: list[PrimitiveCall] = []
    backward: list[PrimitiveCall] = []
    saved: dict[object, tuple[str, str, int]] = {}
    learned: dict[Tree, bool] = {}

    def needs(tree: Tree) -> bool:
        trained = tree.name in assumed.learned if isinstance(tree, Leaf) else learned[tree]
        return assumed.train and trained

    nodes = list(nodes_of(tree))
    accumulated = {arg for n in nodes if n.op == "add" for arg in _accumulated(n)}
    static = static_nodes(tree, assumed.static)
    folded = folded_nodes(tree)
    readers = Counter(arg for n in nodes for arg in n.args)
    sent: set[Tree] = set()
    for node in nodes:
        learned[node] = any(map(needs, node.args))
        if node in folded:
            learned[node] = True
            forward += [PrimitiveCall("gemm", node.rows, node.args[0].cols, "1", 2 * node.heads)]
            if assumed.train:
                backward += _gemm_gradients(node, needs, scores=True)
            continue
        if node.op == "map" or node.op == "attend":
            learned[node] = assumed.train
        ahead = _forward(node, sampled=assumed.sampled)
        data = node.args[-1]
        if node.op == "spmm" and not assumed.sampled and readers[node.args[0]] == 1:
            ahead = [replace(w, fused=_scores_read(node.args[0], data)) for w in ahead]
        if assumed.spread and node.op == "spmm" and data not in sent:
            sent.add(data)  # once for all matrices that multiply it
            rows = PrimitiveCall("exchange", "h", "", _width(data), data.heads)
            ahead = [rows, *ahead]
            backward += [rows] if needs(data) else []
        forward += [replace(w, once=True) for w in ahead] if node in static else ahead
        if learned[node]:
            backward += _backward(node, needs)
            if node.op == "gemm" and needs(node.args[1]) and isinstance(node.args[0], Node):
                left = node.args[0]
                saved[left] = (left.rows, left.cols, left.heads)
            reads_data = node.op == "spmm" and needs(node.args[0])
            if reads_data and isinstance(data, Node) and data not in accumulated:
                saved[data] = (data.rows, data.cols, data.heads)
    return TreeCost(tuple(forward), tuple(backward), tuple(saved.values()))


def _width(tree: Tree) -> str:
    """Return the symbol of the number of columns that a matrix stores."""
    return "k" if tree.kind == "cbsr" else tree.cols


def _scores_read(matrix: Tree, data: Tree) -> bool:
    """Whether attention computes its scores per edge from all columns of these features."""
    match matrix:
        case Node(op="attend", args=args, folds=False):
            return data in args
    return False


def _accumulated(node: Node) -> list[Tree]:
    """Return the products in a sum that are accumulated with ``addmm`` instead of added."""
    return [a for a in node.args if isinstance(a, Node) and a.op == "gemm"]


def _forward(node: Node, *, sampled: bool = False) -> list[PrimitiveCall]:
    a = node.args
    rows, cols, heads = node.rows, node.cols, node.heads
    match node.op:
        case "gemm":
            return [PrimitiveCall("gemm", rows, a[0].cols, cols, heads)]
        case "spmm":
            return [_spmm(node, sampled=sampled)]
        case "select":
            return [PrimitiveCall("maxk", rows, "k", cols)]
        case "scale_rows":
            return [PrimitiveCall("scale_rows", rows, "", _width(node), heads)]
        case "scale_edges":
            return [PrimitiveCall("scale_edges", rows, "", "1", heads, matrix_of(node).name)]
        case "add":
            others = [x for x in a if x.kind != "bias"]
            additions = len(others) - max(len(_accumulated(node)), 1)
            biases = len(a) - len(others) if not _accumulated(node) else 0
            return [PrimitiveCall("elementwise", rows, "", cols, heads)] * (additions + biases)
        case "map":
            return [] if node.free else [PrimitiveCall("elementwise", rows, "", cols, heads)]
    graph = matrix_of(a[0]).name
    return [PrimitiveCall("sddmm", rows, "", "1" if node.folds else a[1].cols, heads, graph),
            PrimitiveCall("edge_softmax", rows, "", "1", heads, graph)]  # fmt: skip


def _spmm(node: Node, *, transposed: bool = False, sampled: bool = False) -> PrimitiveCall:
    """Return the product of a matrix of edges with features, or its gradient for the features."""
    matrix, data = node.args
    rows = data.rows if transposed else node.rows
    if data.kind == "cbsr":
        name, inner = "sspmm" if transposed else "cbsr_spmm", "k"
    elif sampled:
        name, inner = "sampled_spmm", "S"
    else:
        name = "spmm_weighted" if matrix.kind == "weighted" else "spmm"
        inner = matrix.rows if transposed else matrix.cols
    shared = data.heads < node.heads and not transposed and name == "spmm_weighted"
    return PrimitiveCall(
        name, rows, inner, node.cols, node.heads, matrix_of(matrix).name, transposed, shared=shared
    )


def _backward(node: Node, needs: Callable[[Tree], bool]) -> list[PrimitiveCall]:
    a = node.args
    rows, cols, heads = node.rows, node.cols, node.heads
    match node.op:
        case "gemm":
            return _gemm_gradients(node, needs)
        case "spmm":
            matrix, data = a
            work = []
            if needs(data):
                work.append(_spmm(node, transposed=True))
            if needs(matrix):
                graph = matrix_of(matrix).name
                work.append(PrimitiveCall("sddmm", rows, "", _width(data), heads, graph))
            return work
        case "scale_rows":
            return _forward(node) if needs(a[1]) else []
        case "select":  # a scatter of the gradient
            return [PrimitiveCall("elementwise", rows, "", cols)] if needs(a[0]) else []
    return _forward(node)[::-1] if node.op in ("scale_edges", "map", "attend") else []


def _gemm_gradients(
    node: Node, needs: Callable[[Tree], bool], *, scores: bool = False
) -> list[PrimitiveCall]:
    data, weight = node.args
    cols, heads = ("1", 2 * node.heads) if scores else (node.cols, node.heads)
    work = []
    if needs(weight):
        work.append(PrimitiveCall("gemm_tn", data.cols, data.rows, cols, heads))
    if needs(data):
        work.append(PrimitiveCall("gemm", data.rows, cols, data.cols, heads))
    return work
