"""The leaves of expressions: features, weights and vectors, and the nodes that compute them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from pyg_accel.rewrite.builder import Builder, Value
from pyg_accel.rewrite.ir import Expr, Leaf, Sum, is_bias, leaves_of
from pyg_accel.rewrite.nodes import facts_of, features_of
from pyg_accel.rewrite.sources import has_edges, ones_like
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["Emit", "Leaves", "Source", "Unreadable", "require"]

Emit = Callable[[Builder], Value]


class Unreadable(Exception):
    """A node is no part of an expression; the text is the reason, if users should see it."""


def require(condition: object, reason: str = "") -> None:
    """Check a condition on nodes that are a part of an expression.

    Raises:
        Unreadable: if it does not hold.
    """
    if not condition:
        raise Unreadable(reason)


class Source(NamedTuple):
    """A leaf and how to compute its value.

    Attributes:
        leaf: the leaf.
        emit: adds nodes that compute it to a new graph, and returns the last.
        nodes: nodes of the recorded graph from which it is computed; for a matrix of edges, the
            first is its :class:`~pyg_accel.Graph`.
    """

    leaf: Leaf
    emit: Emit
    nodes: tuple[fx.Node, ...]


class Leaves:
    """The leaves of the expressions of a graph, each once.

    Attributes:
        exprs: the expressions of the nodes with features [N, F] or [N, heads, F].
    """

    def __init__(self, cuts: frozenset[fx.Node]) -> None:
        self.exprs: dict[fx.Node, Expr] = {}
        self._cuts = cuts
        self._sources: dict[Any, Source] = {}
        self._widths: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        self._read: list[tuple[fx.Node, fx.Node]] = []
        self._dtype = torch.float32
        self._bipartite = False
        self._num_rows = self._num_cols = 0
        self._exchanges: list[fx.Node] = []  # append rows of other processes to features

    def leaf(
        self,
        key: Any,
        base: str,
        rows: str,
        cols: "str | int",
        kind: Any,
        emit: Emit,
        *nodes: fx.Node,
        **more: Any,
    ) -> Leaf:
        """Return the leaf of a key; ``cols`` is a symbol, or the number of columns."""
        if key not in self._sources:
            if isinstance(cols, int):
                self._widths[symbol := f"w{len(self._widths)}#"] = cols
                cols = symbol
            leaf = Leaf(f"{base}#{len(self._sources)}", rows, cols, kind, **more)
            self._sources[key] = Source(leaf, emit, nodes)
        return self._sources[key].leaf

    def _equate(self, first: str, second: str) -> None:
        """Note that two symbols are the same number of columns."""
        first, second = self._root(first), self._root(second)
        if first != second:
            self._aliases[second] = first

    def _root(self, symbol: str) -> str:
        while symbol in self._aliases:
            symbol = self._aliases[symbol]
        return symbol

    def _source_of(self, leaf: Leaf) -> Source:
        return next(s for s in self._sources.values() if s.leaf is leaf)

    def expr_of(self, node: Any, reader: fx.Node, *, exchanged: bool = False) -> Expr:
        """Return the expression of features [N, F] for a node that reads them.

        Args:
            node: the features.
            reader: the node that reads them.
            exchanged: whether they end with rows of other processes, which the expression omits.

        Raises:
            Unreadable: if they are no such features.
        """
        facts = facts_of(node)
        require(facts is not None and exchanged == (node in self._exchanges))
        if node in self.exprs:
            self._read.append((node, reader))
            if node not in self._cuts:
                return self.exprs[node]
        if exchanged:
            node = features_of(node)
            facts = facts_of(node)
        require(len(facts.shape) == 2 and facts.dtype.is_floating_point)
        require(facts.shape[0] in (self._num_rows, self._num_cols))
        rows = "M" if self._bipartite and facts.shape[0] == self._num_cols else "N"
        target = self._bipartite and rows == "N"
        base = "Z" if node.op != "placeholder" else "Y" if target else "X"
        return self.leaf(("data", node), base, rows, facts.shape[1], "data", lambda b: node, node)

    def _is_open(self, node: Any) -> bool:
        """Whether a node is features [N, F], to which any function of torch may be applied."""
        if node in self.exprs:
            return True
        facts = facts_of(node)
        return facts is not None and node.op == "placeholder" and len(facts.shape) == 2 and (
            facts.dtype.is_floating_point and facts.shape[0] in (self._num_rows, self._num_cols)
            and facts.shape[1] > 1
        )  # fmt: skip

    def _with_bias_as_product(self, expr: Expr) -> Expr:
        """Return a sum with each bias as ``ones @ row``, so that products distribute over it."""
        if not isinstance(expr, Sum):
            return expr
        terms: list[Expr] = []
        for term in expr.terms:
            if is_bias(term):
                (bias,) = self._source_of(term).nodes
                term = self._ones(expr) @ self._row(bias, term.cols)
            terms.append(term)
        return Sum(tuple(terms))

    def _row(self, bias: fx.Node, cols: str) -> Leaf:
        def emit(b: Builder) -> fx.Node:
            return b.call(torch.Tensor.unsqueeze, bias, 0)

        return self.leaf(("row", bias), "w", "1", cols, "weight", emit, bias)

    def _ones(self, like: Expr) -> Leaf:
        """Return a column of ones with as many rows as an expression has."""
        rows = like.rows
        data = next((x for x in leaves_of(like) if x.kind == "data" and x.rows == rows), None)
        key: tuple[Any, ...] = ("ones", rows)
        if data is not None:
            (node,), dtype = self._source_of(data).nodes, None
            key = (*key, node)
        else:
            matrix = next(x for x in leaves_of(like) if is_sparse(x))
            node, dtype = self._source_of(matrix).nodes[0], self._dtype
        return self.leaf(key, f"e{rows}", rows, "1", "data",
                         lambda b: b.call(ones_like, node, dtype), node)  # fmt: skip

    def _sum_of(self, *parts: Expr) -> Expr:
        """Return a sum, biases last."""
        terms = [t for p in parts for t in (p.terms if isinstance(p, Sum) else (p,))]
        terms.sort(key=is_bias)
        for term in terms[1:]:
            self._equate(terms[0].cols, term.cols)
        return Sum(tuple(terms))

    def _scaled(self, value: float, expr: Expr) -> Expr:
        """Return a multiple of an expression."""
        if value == 1:
            return expr
        rows = expr.rows
        leaf = self.leaf(("number", value.hex(), rows), f"{value:.4g}", rows, rows, "diagonal",
                         lambda b: value, number=True)  # fmt: skip
        return leaf @ self._with_bias_as_product(expr)

    def _rows_scaled(
        self,
        node: fx.Node,
        expr: Expr,
        *,
        inverse: bool = False,
        graph: fx.Node | None = None,
        side: str = "",
    ) -> Expr:
        """Return an expression with its rows multiplied or divided by the elements of a vector.

        With a graph, elements of nodes without an edge on ``side`` are replaced by 1: no message
        reads them, and they may be infinite or NaN.
        """
        facts, rows = facts_of(node), expr.rows

        def emit(b: Builder) -> fx.Node:
            flat = b.call(torch.Tensor.reshape, node, -1)
            if graph is not None:
                reached = b.call(has_edges, graph, side, derived=True)
                flat = b.call(torch.where, reached, flat, 1.0)
            return b.call(torch.Tensor.reciprocal, flat) if inverse else flat

        key: tuple[Any, ...] = ("vector", node, inverse, rows, graph, side)
        size = self._num_cols if rows == "M" else self._num_rows
        number = facts.shape in ((), (1,), (1, 1))
        require(number or facts.shape == (size, 1))
        if number:
            key, graph = key[:4], None
        base = "c" if number else "d"
        leaf = self.leaf(key, base, rows, rows, "diagonal", emit, node, number=number)
        return leaf @ self._with_bias_as_product(expr)
