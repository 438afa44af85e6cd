"""Lifting: the products that a recorded call computes, as expressions of the matrix IR.

The graph of a program is read node by node. Linear maps, sums, factors per node, sums and means of
messages that are linear in features, and attention become parts of an expression; any other
function ends it. A region is an expression whose value other code reads, or that the call returns.
Each of its associations computes this value, the node at the root of the region.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import fx

from pyg_accel.record.metadata import TensorFacts
from pyg_accel.rewrite.attention import Attention
from pyg_accel.rewrite.builder import Builder
from pyg_accel.rewrite.ir import Expr, Leaf, Map, Product, Sum, leaves_of
from pyg_accel.rewrite.leaves import Source, Unreadable, require
from pyg_accel.rewrite.messages import Messages
from pyg_accel.rewrite.naming import named
from pyg_accel.rewrite.nodes import called, facts_of, features_of, overwritten_nodes
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["NotLifted", "Region", "regions_of"]


class NotLifted(Exception):
    """A layer or a call cannot be rewritten; the text is the reason."""


@dataclass(frozen=True)
class Region:
    """A part of a graph that computes one expression.

    Attributes:
        expr: the expression.
        root: the node that computes it.
        sources: how to compute the value of each leaf, by name.
        attentions: how the scores of attention are computed, by name.
        sizes: numbers of columns by symbol.
        sample: arguments of :func:`~pyg_accel.ops.sampled_spmm`, if sums are over samples.
        exchange: in a distributed model, the first node that fetches rows of other processes:
            dense factors of a matrix of edges need these rows too.
    """

    expr: Expr
    root: fx.Node
    sources: Mapping[str, Source]
    attentions: Mapping[str, Attention]
    sizes: Mapping[str, int]
    sample: Mapping[str, Any] | None
    exchange: fx.Node | None = None

    @property
    def graphs(self) -> dict[str, fx.Node]:
        """The nodes of the :class:`~pyg_accel.Graph` of each matrix of edges, by name."""
        return {name: s.nodes[0] for name, s in self.sources.items() if is_sparse(s.leaf)}


def regions_of(graph: fx.Graph, constants: Mapping[str, Any], layer: str) -> list[Region]:
    """Return the regions of the graph of a program, in its order.

    Raises:
        NotLifted: with the reason, if it has none.
    """
    cuts: set[fx.Node] = set()
    while True:
        reading = _Reading(graph, constants, layer, frozenset(cuts))
        reading.read()
        if not (more := reading.shared() - cuts):
            break
        cuts |= more
    regions = [*reading.regions()]
    if not regions:
        raise NotLifted(reading.reason or f"{layer} has no sum of messages that is a product")
    return regions


class _Reading(Messages):
    """Reads a graph once, with expressions ending at the ``cuts``.

    Attributes:
        readers: for each node, the nodes whose expressions contain its expression.
    """

    def __init__(
        self, graph: fx.Graph, constants: Mapping[str, Any], layer: str, cuts: frozenset[fx.Node]
    ) -> None:
        super().__init__(constants, layer, cuts, overwritten_nodes(graph))
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self._graph = graph
        first = next((n for n in graph.nodes if _sums(n)), None)
        if first is None:
            raise NotLifted(f"{layer} has no sum of messages that is a product")
        self._ends = first.args[0].args[1:4]
        targets, sources, _ = self._ends
        self._bipartite = targets != sources
        self._num_rows, self._num_cols = facts_of(first).shape[0], _size(sources)
        self._exchanges = [n for n in graph.nodes if called(n) == "exchanged"]
        if self._exchanges:
            self._num_cols = facts_of(features_of(self._exchanges[0])).shape[0]
            self._bipartite = self._num_rows != self._num_cols
        if self._bipartite and self._num_rows == self._num_cols:
            raise NotLifted("two sets of nodes of one size")

    def read(self) -> None:
        """Read the nodes in order."""
        for node in self._graph.nodes:
            handler = _HANDLERS.get(called(node)) if node.op[:4] == "call" else None
            if handler is None or node in self._overwritten:
                continue
            self._read.clear()
            try:
                arguments = signature(handler).bind(self, node, *node.args, **node.kwargs)
            except TypeError:  # an unsupported argument
                continue
            try:
                self.exprs[node] = handler(*arguments.args, **arguments.kwargs)
            except Unreadable as why:
                self.reason = self.reason or str(why)
                continue
            for inner, outer in self._read:
                self.readers[inner].add(outer)

    def shared(self) -> set[fx.Node]:
        """Return the nodes that expressions and other code read: expressions end there."""
        return {
            node
            for node, expr in self.exprs.items()
            if not isinstance(expr, Leaf) and 0 < len(self.readers[node]) < len(node.users)
        }

    def regions(self) -> Iterator[Region]:
        """Yield the regions that may have more than one association."""
        order = [source.leaf for source in self._sources.values()]
        sources = {source.leaf.name: source for source in self._sources.values()}
        for node, expr in self.exprs.items():
            leaves = dict.fromkeys(leaves_of(expr))
            sparse = any(map(is_sparse, leaves))
            others = any(leaf.kind in ("weight", "diagonal") for leaf in leaves)
            inner = node not in self._cuts and self.readers[node] & node.users.keys()
            if not sparse or inner:
                continue
            if not others:
                reason = f"{self._layer} has no linear layer beside its aggregation"
                self.reason = self.reason or reason
                continue
            renamed, names, symbols = named(expr, order, self._root)
            widths = {self._root(s): n for s, n in self._widths.items()}
            sizes = {new: widths[old] for old, new in symbols.items() if old in widths}
            yield Region(
                expr=renamed,
                root=node,
                sources={new: sources[old] for new, old in names.items()},
                attentions=self._attentions,
                sizes=sizes,
                sample=self._sampling,
                exchange=next(iter(self._exchanges), None),
            )

    def _linear(
        self, node: fx.Node, input: Any, weight: Any, bias: Any = None, *, transposed: bool = True
    ) -> Expr:
        facts = facts_of(weight)
        require(facts is not None and len(facts.shape) == 2 and weight not in self.exprs)
        expr, shape = self.expr_of(input, node), facts_of(input).shape
        inner, outer = facts.shape[::-1] if transposed else facts.shape
        require(shape[1:] == (inner,) and (bias is None or facts_of(bias).shape == (outer,)))

        def emit(b: Builder) -> fx.Node:
            return b.call(torch.Tensor.t, weight) if transposed else weight

        w = self.leaf(("weight", weight, transposed), "W", expr.cols, outer, "weight", emit,
                      weight)  # fmt: skip
        self._equate(w.rows, expr.cols)
        out: Expr = self._with_bias_as_product(expr) @ w
        if bias is None:
            return out
        return self._sum_of(out, self._bias(bias, w.cols))

    def _bias(self, bias: fx.Node, cols: str) -> Leaf:
        return self.leaf(("bias", bias), "b", "1", cols, "bias", lambda b: bias, bias)

    def _add(self, node: fx.Node, a: Any, b: Any, *, sign: float = 1.0) -> Expr:
        require(self._is_open(a) or self._is_open(b))
        first, second = facts_of(a), facts_of(b)
        require(first is not None and second is not None and first.dtype == second.dtype)
        if first.shape == second.shape:
            left, right = self.expr_of(a, node), self.expr_of(b, node)
            require(left.rows == right.rows)
            return self._sum_of(left, self._scaled(sign, right))
        if len(first.shape) < len(second.shape):
            a, b, first, second = b, a, second, first
        require(second.shape == first.shape[1:] and len(first.shape) == 2 and sign == 1)
        expr = self.expr_of(a, node)
        return self._sum_of(expr, self._bias(b, expr.cols))

    def _multiply(self, node: fx.Node, a: Any, b: Any, *, inverse: bool = False) -> Expr:
        if not self._is_open(a):
            require(not inverse and self._is_open(b))
            a, b = b, a
        if isinstance(b, (int, float)):
            require(b or not inverse)
            return self._scaled(1 / b if inverse else float(b), self.expr_of(a, node))
        of_a, of_b = facts_of(a), facts_of(b)
        require(of_b is not None and b not in self.exprs)
        require(len(of_a.shape) == 2 and of_a.dtype == of_b.dtype)
        return self._rows_scaled(b, self.expr_of(a, node), inverse=inverse)

    def _view(self, node: fx.Node, value: Any, *shape: Any) -> Expr:
        require(self._is_open(value))
        old, new = facts_of(value).shape, facts_of(node).shape
        if old == new and len(old) == 2:
            return self.expr_of(value, node)
        require(value in self.exprs)
        if len(old) == 3 and new == (old[0], old[1] * old[2]):
            return self._joined(node, value, "concat")
        require(value not in self._cuts)
        self._read.append((value, node))
        if old == new:
            return self.exprs[value]
        require(len(old) == 2 and len(new) == 3 and new[0] == old[0])
        return self._in_heads(self._with_bias_as_product(self.exprs[value]), *new[1:])

    def _in_heads(self, expr: Expr, heads: int, width: int) -> Expr:
        """Return [N, heads x width] as [N, heads, width], by the same change of the last weight."""
        match expr:
            case Sum(terms=terms):
                return self._sum_of(*(self._in_heads(t, heads, width) for t in terms))
            case Product(factors=(*first, Leaf(kind="weight") as last)):
                source, base = self._source_of(last), last.name.partition("#")[0]
                leaf = self.leaf(("heads", last.name, heads), base, last.rows, width, "weight",
                                 source.emit, *source.nodes, heads=heads)  # fmt: skip
                return Product((*first, leaf))
        raise Unreadable

    def _joined(self, node: fx.Node, value: fx.Node, name: str) -> Expr:
        """Return [N, heads, width] with its heads concatenated or averaged."""
        require(value not in self._cuts)
        self._read.append((value, node))
        self._widths[symbol := f"w{len(self._widths)}#"] = facts_of(node).shape[1]
        return Map("mean_heads" if name == "mean" else "concat", self.exprs[value], symbol,
                   free=name != "mean")  # fmt: skip

    def _mean(self, node: fx.Node, value: Any, dim: Any = None) -> Expr:
        require(value in self.exprs and dim == 1 and len(facts_of(value).shape) == 3)
        return self._joined(node, value, "mean")

    def _flatten(self, node: fx.Node, value: Any, start_dim: Any = 0) -> Expr:
        require(start_dim == 1)
        return self._view(node, value)

    def _maxk(self, node: fx.Node, x: Any, k: int) -> Expr:
        expr = self.expr_of(x, node)
        require(self._widths.setdefault("k", k) == k)
        return Map("maxk", expr, keeps=True)

    def _exchanged(self, node: fx.Node, halo: Any, name: Any, features: Any) -> Expr:
        return self.expr_of(features, node)


def _size(number: Any) -> int:
    """Return a number of nodes, which the graph may read from a shape of an argument."""
    if isinstance(number, int):
        return number
    placeholder, dim = number.args
    return int(facts_of(placeholder).shape[dim])


def _sums(node: fx.Node) -> bool:
    """Whether a node is a sum of messages over the edges of a graph."""
    if node.op != "call_function" or called(node) not in ("gspmm", "sampled_spmm", "attention"):
        return False
    graph = node.args[0]
    is_graph = isinstance(graph, fx.Node) and called(graph) == "graph_of"
    return is_graph and isinstance(facts_of(node), TensorFacts)


_MATMUL = partial(_Reading._linear, bias=None, transposed=False)
_DIVIDE = partial(_Reading._multiply, inverse=True)
_HANDLERS: dict[str, Callable[..., Expr]] = {
    "linear": _Reading._linear, "matmul": _MATMUL, "mm": _MATMUL, "__matmul__": _MATMUL,
    "add": _Reading._add, "__add__": _Reading._add, "__radd__": _Reading._add,
    "sub": partial(_Reading._add, sign=-1.0), "neg": partial(_Reading._multiply, b=-1.0),
    "mul": _Reading._multiply, "__rmul__": _Reading._multiply,
    "div": _DIVIDE, "__truediv__": _DIVIDE,
    "gspmm": _Reading._gspmm, "sampled_spmm": _Reading._sampled_spmm,
    "attention": _Reading._attention, "dense_maxk": _Reading._maxk,
    "view": _Reading._view, "reshape": _Reading._view, "flatten": _Reading._flatten,
    "mean": _Reading._mean, "exchanged": _Reading._exchanged,
}  # fmt: skip
