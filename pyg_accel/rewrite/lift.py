"""Lifting: the products that a recorded call computes, as expressions of the matrix IR.

The graph of a program is read node by node. Linear maps, sums, factors per node, sums and means of
messages that are linear in features, and attention are a part of an expression; any other function
ends one. A region is an expression that other code reads, or that the call returns: all of its
associations compute the node at its root.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from math import inf
from typing import Any, NamedTuple

import torch
from torch import fx

from pyg_accel import ops
from pyg_accel.cbsr import CBSR
from pyg_accel.formula import Binary, Formula, Operand, operands_of
from pyg_accel.record.edge_tensors import name_of
from pyg_accel.record.recorder import ABOUT, About
from pyg_accel.rewrite.attention import Attention, read_attention
from pyg_accel.rewrite.builder import Builder, Edges, Value
from pyg_accel.rewrite.changes import Changes
from pyg_accel.rewrite.ir import (
    Attend,
    Broadcast,
    Expr,
    Leaf,
    Map,
    Product,
    Sum,
    is_bias,
    leaves_of,
)
from pyg_accel.rewrite.naming import named
from pyg_accel.rewrite.sources import (
    Normalisation,
    base_of,
    degrees,
    edges_of,
    inverse_counts,
    inverse_roots,
    normalisation_of,
    ones_like,
)
from pyg_accel.rewrite.terms import MOST, Term, terms_of
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["NotLifted", "Region", "Source", "regions_of"]

Emit = Callable[[Builder], Value]
_VIEWS = ("view", "reshape")
_PRODUCTS = ("gspmm", "sampled_spmm")


class NotLifted(Exception):
    """A layer, or a call of it, that is left as it is; the text says why."""


class Source(NamedTuple):
    """Where the value of a leaf comes from.

    Attributes:
        emit: writes nodes that compute it.
        nodes: of the graph that it is computed of.
    """

    emit: Emit
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Region:
    """Products that are one expression.

    Attributes:
        expr: the expression.
        root: the node that computes it.
        sources: of its leaves, by name.
        graphs: the nodes of the graphs of its matrices of edges, by name.
        attentions: how the scores of attention are computed, by name.
        maps: functions of features, by name.
        sizes: of the symbols of columns.
        ones: names of columns of ones.
        sample: arguments of :func:`~pyg_accel.ops.sampled_spmm`, if sums are over samples.
    """

    expr: Expr
    root: fx.Node
    sources: Mapping[str, Source]
    graphs: Mapping[str, fx.Node]
    attentions: Mapping[str, Attention]
    maps: Mapping[str, Callable[..., Any]]
    sizes: Mapping[str, int]
    ones: frozenset[str]
    sample: Mapping[str, Any] | None


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


class _Entry(NamedTuple):
    leaf: Leaf
    source: Source
    graph: fx.Node | None


class _Reading:
    """One reading of a graph.

    Attributes:
        exprs: what nodes with features [N, F] or [N, heads, F] are.
        readers: of a node, those whose expressions it is a part of.
        reason: the first reason why a sum of messages is no product.
    """

    def __init__(
        self, graph: fx.Graph, constants: Mapping[str, Any], layer: str, cuts: frozenset[fx.Node]
    ) -> None:
        self.exprs: dict[fx.Node, Expr] = {}
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self.reason = ""
        self._graph, self._constants, self._layer, self._cuts = graph, constants, layer, cuts
        self._entries: dict[Any, _Entry] = {}
        self._widths: dict[str, int] = {}
        self._same: dict[str, str] = {}
        self._attentions: dict[str, Attention] = {}
        self._maps: dict[str, Callable[..., Any]] = {}
        self._sample: dict[str, Any] | None = None
        self._read: list[tuple[fx.Node, fx.Node]] = []
        self._dtype = torch.float32
        first = next((n for n in graph.nodes if _sums(n)), None)
        if first is None:
            raise NotLifted(f"{layer} has no sum of messages that is a product")
        _, self._rows, self._cols, self._target, *_ = _first_argument(first).args
        self._bipartite = self._rows != self._cols
        self._num_rows, self._num_cols = _about(first).shape[0], self._columns_of(first)
        if self._bipartite and self._num_rows == self._num_cols:
            raise NotLifted("two sets of nodes of one size")

    def read(self) -> None:
        """Read the nodes in order."""
        changes = Changes(self._graph)
        for node in self._graph.nodes:
            handler = _HANDLERS.get(name_of(node.target)) if node.op[:4] == "call" else None
            if handler is None or changes.follow(node):
                continue
            self._read.clear()
            # An argument that a handler does not know changes what the function does.
            known = _PARAMETERS[handler]
            if len(node.args) >= known.most or not node.kwargs.keys() <= known.names:
                continue
            made = handler(self, node, *node.args, **node.kwargs)
            if made is not None:
                self.exprs[node] = made
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
        """Yield the regions that have more than one association, or may have."""
        order = [entry.leaf for entry in self._entries.values()]
        entries = {entry.leaf.name: entry for entry in self._entries.values()}
        for node, expr in self.exprs.items():
            leaves = dict.fromkeys(leaves_of(expr))
            sparse = any(map(is_sparse, leaves))
            others = any(leaf.kind in ("weight", "diagonal") for leaf in leaves)
            if not sparse or self.readers[node] & node.users.keys() - self._ends(node):
                continue
            if not others:
                self._note(f"{self._layer} has no linear layer beside its aggregation")
                continue
            found = named(expr, order, self._same)
            known = {new: entries[old] for new, old in found.names.items() if old in entries}
            widths = {self._root(s): n for s, n in self._widths.items()}
            yield Region(
                found.expr, node, {new: e.source for new, e in known.items()},
                {new: e.graph for new, e in known.items() if e.graph is not None},
                self._attentions, self._maps,
                {new: widths[old] for old, new in found.sizes.items() if old in widths}
                | {s: n for s, n in self._widths.items() if s == "k"},
                frozenset(n for n, e in known.items() if e.leaf.name[0] == "e"), self._sample,
            )  # fmt: skip

    def _ends(self, node: fx.Node) -> set[fx.Node]:
        """The readers of a node that take it for data."""
        return self.readers[node] if node in self._cuts else set()

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    # -- leaves ------------------------------------------------------------------------------------

    def leaf(
        self,
        key: Any,
        base: str,
        rows: str,
        cols: "str | int",
        kind: Any,
        emit: Emit,
        *nodes: fx.Node,
        graph: fx.Node | None = None,
        **more: Any,
    ) -> Leaf:
        """Return the leaf of a key; a new one may have a number of columns in place of a symbol."""
        if key not in self._entries:
            if isinstance(cols, int):
                self._widths[symbol := f"w{len(self._widths)}#"] = cols
                cols = symbol
            leaf = Leaf(f"{base}#{len(self._entries)}", rows, cols, kind, **more)
            self._entries[key] = _Entry(leaf, Source(emit, nodes), graph)
        return self._entries[key].leaf

    def _unite(self, first: str, second: str) -> None:
        first, second = self._root(first), self._root(second)
        if first != second:
            self._same[second] = first

    def _root(self, symbol: str) -> str:
        while symbol in self._same:
            symbol = self._same[symbol]
        return symbol

    def _emitted(self, leaf: Leaf) -> Source:
        return next(e.source for e in self._entries.values() if e.leaf is leaf)

    def expr_of(self, node: Any, reader: fx.Node) -> Expr | None:
        """Return features [N, F] as an expression that another node reads."""
        if not isinstance(node, fx.Node) or (about := node.meta.get(ABOUT)) is None:
            return None
        if node in self.exprs:
            self._read.append((node, reader))
            if node not in self._cuts:
                return self.exprs[node]
        if len(about.shape) != 2 or not about.dtype.is_floating_point:
            return None
        if about.shape[0] not in (self._num_rows, self._num_cols):
            return None
        rows = "M" if self._bipartite and about.shape[0] == self._num_cols else "N"
        base = (
            ("Y" if self._bipartite and rows == "N" else "X") if node.op == "placeholder" else "Z"
        )
        return self.leaf(("data", node), base, rows, about.shape[1], "data", lambda b: node, node)

    def _is_open(self, node: Any) -> bool:
        """Whether a node is features that functions of torch may be followed on."""
        if node in self.exprs:
            return True
        about = _about(node)
        return about is not None and node.op == "placeholder" and len(about.shape) == 2 and (
            about.dtype.is_floating_point and about.shape[0] in (self._num_rows, self._num_cols)
            and about.shape[1] > 1
        )  # fmt: skip

    def _movable(self, expr: Expr) -> Expr:
        """Return a sum whose bias is a product and a column of ones, which can be moved."""
        if not isinstance(expr, Sum):
            return expr
        terms: list[Expr] = []
        for term in expr.terms:
            if is_bias(term):
                assert isinstance(term, Leaf)
                (bias,) = self._emitted(term).nodes
                term = self._ones(expr) @ self._row(bias, term.cols)
            terms.append(term)
        return Sum(tuple(terms))

    def _row(self, bias: fx.Node, cols: str) -> Leaf:
        def emit(b: Builder) -> fx.Node:
            return b.call(torch.Tensor.unsqueeze, bias, 0)

        return self.leaf(("row", bias), "w", "1", cols, "weight", emit, bias)

    def _ones(self, like: Expr) -> Leaf:
        """A column of ones with a row for each of an expression's, which has features in it."""
        rows = like.rows
        data = next((x for x in leaves_of(like) if x.kind == "data" and x.rows == rows), None)
        if data is not None:
            (node,) = self._emitted(data).nodes
            emit: Emit = lambda b: b.call(ones_like, node)  # noqa: E731
            return self.leaf(("ones", rows), f"e{rows}", rows, "1", "data", emit, node)
        matrix = next(x for x in leaves_of(like) if is_sparse(x))
        graph = next(e.graph for e in self._entries.values() if e.leaf is matrix)
        assert graph is not None
        dtype = self._dtype
        emit = lambda b: b.call(ones_like, graph, dtype)  # noqa: E731
        return self.leaf(("ones", rows), f"e{rows}", rows, "1", "data", emit, graph)

    def _total(self, *parts: Expr) -> Expr:
        """Return a sum, biases last."""
        terms = [t for p in parts for t in (p.terms if isinstance(p, Sum) else (p,))]
        terms.sort(key=is_bias)
        for term in terms[1:]:
            self._unite(terms[0].cols, term.cols)
        return Sum(tuple(terms))

    def _number(self, value: float, expr: Expr) -> Expr:
        """Return an expression times a number."""
        if value == 1:
            return expr
        rows = expr.rows
        leaf = self.leaf(("number", value, rows), f"{value:.4g}", rows, rows, "diagonal",
                         lambda b: value, number=True)  # fmt: skip
        return leaf @ self._movable(expr)

    def _vector(self, node: fx.Node, expr: Expr, *, inverse: bool = False) -> Expr | None:
        """Return an expression with its rows multiplied by a vector, or divided."""
        about, rows = _about(node), expr.rows

        def emit(b: Builder) -> fx.Node:
            flat = b.call(torch.Tensor.reshape, node, -1)
            return b.call(torch.Tensor.reciprocal, flat) if inverse else flat

        key, size = (
            ("vector", node, inverse, rows),
            self._num_cols if rows == "M" else self._num_rows,
        )
        if about.shape in ((), (1,), (1, 1)):
            return self.leaf(key, "c", rows, rows, "diagonal", emit, node, number=True) @ (
                self._movable(expr)
            )
        if about.shape != (size, 1):
            return None
        return Broadcast(self.leaf(key, "d", rows, rows, "diagonal", emit, node),
                         self._movable(expr))  # fmt: skip

    # -- functions of features ---------------------------------------------------------------------

    def _linear(self, node: fx.Node, input: Any, weight: Any, bias: Any = None) -> Expr | None:
        return self._mapped(node, input, weight, bias, transposed=True)

    def _mapped(
        self, node: fx.Node, input: Any, weight: Any, bias: Any, *, transposed: bool
    ) -> Expr | None:
        about = _about(weight)
        if about is None or len(about.shape) != 2:
            return None
        if weight in self.exprs or (expr := self.expr_of(input, node)) is None:
            return None
        inner, outer = about.shape[::-1] if transposed else about.shape
        if inner != _about(input).shape[1]:
            return None

        def emit(b: Builder) -> fx.Node:
            return b.call(torch.Tensor.t, weight) if transposed else weight

        w = self.leaf(("weight", weight, transposed), "W", expr.cols, outer, "weight", emit,
                      weight)  # fmt: skip
        self._unite(w.rows, expr.cols)
        out: Expr = self._movable(expr) @ w
        if bias is None:
            return out
        return self._total(out, self._bias(bias, w.cols))

    def _bias(self, bias: fx.Node, cols: str) -> Leaf:
        return self.leaf(("bias", bias), "b", "1", cols, "bias", lambda b: bias, bias)

    def _matmul(self, node: fx.Node, input: Any, weight: Any) -> Expr | None:
        return self._mapped(node, input, weight, None, transposed=False)

    def _add(self, node: fx.Node, a: Any, b: Any) -> Expr | None:
        return self._plus(node, a, b, 1.0)

    def _subtract(self, node: fx.Node, a: Any, b: Any) -> Expr | None:
        return self._plus(node, a, b, -1.0)

    def _plus(self, node: fx.Node, a: Any, b: Any, sign: float) -> Expr | None:
        if not (self._is_open(a) or self._is_open(b)):
            return None
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            first, second = _about(a), _about(b)
            if first is None or second is None or first.dtype != second.dtype:
                return None
            if first.shape == second.shape:
                left, right = self.expr_of(a, node), self.expr_of(b, node)
                if left is None or right is None or left.rows != right.rows:
                    return None
                return self._total(left, self._number(sign, right))
            if second.shape == first.shape[1:] and len(first.shape) == 2 and sign == 1:
                expr = self.expr_of(a, node)
                return None if expr is None else self._total(expr, self._bias(b, expr.cols))
            if first.shape == second.shape[1:] and len(second.shape) == 2 and sign == 1:
                return self._plus(node, b, a, sign)
        return None

    def _multiply(self, node: fx.Node, a: Any, b: Any) -> Expr | None:
        return self._times(node, a, b, inverse=False)

    def _divide(self, node: fx.Node, a: Any, b: Any) -> Expr | None:
        return self._times(node, a, b, inverse=True)

    def _times(self, node: fx.Node, a: Any, b: Any, *, inverse: bool) -> Expr | None:
        if not self._is_open(a):
            if inverse or not self._is_open(b):
                return None
            a, b = b, a
        if isinstance(b, (int, float)):
            if inverse and not b:
                return None
            expr = self.expr_of(a, node)
            return None if expr is None else self._number(1 / b if inverse else float(b), expr)
        if not isinstance(b, fx.Node) or (about := _about(b)) is None or b in self.exprs:
            return None
        if len(_about(a).shape) != 2 or about.dtype != _about(a).dtype:
            return None
        expr = self.expr_of(a, node)
        return None if expr is None else self._vector(b, expr, inverse=inverse)

    def _negate(self, node: fx.Node, a: Any) -> Expr | None:
        return self._times(node, a, -1.0, inverse=False)

    # -- sums of messages --------------------------------------------------------------------------

    def _gspmm(
        self, node: fx.Node, graph: fx.Node, formula: Any, operands: Any, *, reduce: Any,
        edge_order: bool = False,
    ) -> Expr | None:  # fmt: skip
        formula = self._constants[formula.target] if isinstance(formula, fx.Node) else formula
        if reduce not in ("sum", "mean"):
            if reduce != "none":
                self._note(f"aggregation by {reduce}")
            return None
        if not isinstance(formula, Formula) or not edge_order or not self._is_graph(graph):
            return None
        found = self._messages(node, graph, formula, operands, mean=reduce == "mean")
        if found is None:
            self._note(f"the message of {self._layer} is not linear in its features")
        return found

    def _sampled_spmm(
        self, node: fx.Node, graph: fx.Node, x: Any, weight: Any = None, *, reduce: str,
        edge_order: bool = False, **sample: Any,
    ) -> Expr | None:  # fmt: skip
        """A sum over a sample of each row; all of them are over the same."""
        if not edge_order or not self._is_graph(graph) or self._sample not in (None, sample):
            return None
        if weight is not None and len(_about(weight).shape) != 1:
            self._note("attention over samples of the edges")
            return None
        self._sample = sample
        source = Operand("u", 0)
        formula: Formula = source if weight is None else Binary("mul", source, Operand("e", 1))
        operands = [x] if weight is None else [x, weight]
        return self._messages(node, graph, formula, operands, mean=reduce == "mean")

    def _is_graph(self, graph: fx.Node) -> bool:
        """Whether a graph leads from and to the same nodes as the others."""
        return graph.op == "call_function" and graph.args[1:4] == (
            self._rows, self._cols, self._target,
        )  # fmt: skip

    def _messages(
        self, node: fx.Node, graph: fx.Node, formula: Formula, operands: Any, *, mean: bool
    ) -> Expr | None:
        about = _about(node)
        self._dtype = about.dtype
        if len(about.shape) != 2 or any(_about(o) is None for o in operands):
            return None
        width = about.shape[1]

        def is_wide(operand: Operand) -> bool:
            value = operands[operand.index]
            shape = _about(value).shape
            narrow = value not in self.exprs and (operand.side == "e" or value.op != "placeholder")
            return len(shape) == 2 and shape[1] == width and (width > 1 or not narrow)

        terms = terms_of(formula, is_wide)
        if terms is None or len(terms) > MOST:
            return None
        read = [operands[o.index] for o in operands_of(formula)]
        precisions = {_about(o).dtype for o in read}
        if len(precisions) > 1 and not precisions & {torch.bfloat16, torch.float16}:
            return None
        ends: dict[str, set[Any]] = {"u": set(), "v": set(), "e": set()}
        for term in terms:
            if term.features is not None:
                ends[term.features.side].add(operands[term.features.index])
        if ends["u"] & ends["v"]:  # the sum of x_i - x_j is more precise than that of each
            return None
        parts = [self._term(node, graph, term, operands, mean=mean) for term in terms]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        return whole[0] if len(whole) == 1 else self._total(*whole)

    def _term(
        self, node: fx.Node, graph: fx.Node, term: Term, operands: Any, *, mean: bool
    ) -> Expr | None:
        if term.features is None or term.features.side == "e":
            return None
        expr = self.expr_of(operands[term.features.index], node)
        sides: dict[str, list[tuple[fx.Node, bool]]] = {"u": [], "v": [], "e": []}
        for operand, inverse in term.factors:
            value = operands[operand.index]
            if value in self.exprs or _about(value).shape[1:] not in ((), (1,)):
                return None
            sides[operand.side].append((operands[operand.index], inverse))
        if expr is None:
            return None
        if term.features.side == "v":
            return None if mean else self._targets(graph, term, expr, sides)
        out: Expr | None = self._movable(expr)
        for vector, inverse in sides["u"]:
            out = None if out is None else self._vector(vector, out, inverse=inverse)
        if out is None or expr.rows != ("M" if self._bipartite else "N"):
            return None
        weights = sides["e"]
        normalised = None
        if len(weights) == 1 and not weights[0][1] and not mean:
            normalised = normalisation_of(weights[0][0], graph, self._constants)
        if normalised is not None:
            out = self._normalised(graph, normalised, out)
        else:
            matrix = self._matrix(graph, weights)
            out = matrix @ out
            if mean:
                dtype = self._dtype
                count = self.leaf(("count", matrix.name), "D⁻¹", "N", "N", "diagonal",
                                  lambda b: b.call(inverse_counts, graph, dtype, derived=True),
                                  graph, mean_of=matrix.name)  # fmt: skip
                out = Broadcast(count, out)
        for vector, inverse in sides["v"]:
            out = None if out is None else self._vector(vector, out, inverse=inverse)
        return None if out is None else self._number(term.number, out)

    def _normalised(self, graph: fx.Node, norm: Normalisation, expr: Expr) -> Expr:
        """Multiply with GCN's normalised adjacency: both sides are divided by roots of degrees."""
        dtype = self._dtype

        def edges(b: Builder) -> Edges:
            return norm.edges(b, graph)

        def roots(b: Builder) -> fx.Node:
            found = norm.edges(b, graph)
            return b.call(inverse_roots, graph, found.weight, dtype, derived=True)

        key, kind = ("normalised", graph.args[0]), "sparse" if norm.weight is None else "weighted"
        nodes = (graph,) if norm.weight is None else (graph, norm.weight)
        a = self.leaf(key, "A", "N", "N", kind, edges, *nodes, graph=graph)
        d = self.leaf(("roots", graph.args[0]), "D", "N", "N", "diagonal", roots, *nodes)
        return Broadcast(d, a @ Broadcast(d, self._movable(expr)))

    def _targets(
        self, graph: fx.Node, term: Term, expr: Expr, sides: dict[str, list[tuple[fx.Node, bool]]]
    ) -> Expr | None:
        """Features of the targets, once for each edge of theirs."""
        if sides["u"] or sides["v"] or expr.rows != "N" or self._sample is not None:
            return None
        matrix, dtype = self._matrix(graph, sides["e"]), self._dtype
        source = self._emitted(matrix)

        def emit(b: Builder) -> fx.Node:
            found = source.emit(b)
            assert isinstance(found, Edges)
            return b.call(degrees, found.graph, found.weight, found.edge_order, dtype,
                          derived=True)  # fmt: skip

        leaf = self.leaf(("degree", matrix.name), "D", "N", "N", "diagonal", emit, *source.nodes)
        return self._number(term.number, Broadcast(leaf, self._movable(expr)))

    def _matrix(self, graph: fx.Node, weights: list[tuple[fx.Node, bool]]) -> Leaf:
        """Return the matrix of the edges, with the products of weights [E, 1]."""
        columns = "M" if self._bipartite else "N"
        emit, nodes = edges_of(graph, weights)
        kind = "weighted" if weights else "sparse"
        key = ("edges", graph.args[0], *((base_of(node), inverse) for node, inverse in weights))
        return self.leaf(key, "A", "N", columns, kind, emit, graph,
                         *nodes, graph=graph)  # fmt: skip

    # -- views, heads, attention -------------------------------------------------------------------

    def _view(self, node: fx.Node, value: Any, *shape: Any) -> Expr | None:
        if not self._is_open(value):
            return None
        old, new = _about(value).shape, _about(node).shape
        if old == new and len(old) == 2:
            return self.expr_of(value, node)
        if value not in self.exprs:
            return None
        if old == new and value not in self._cuts:
            self._read.append((value, node))
            return self.exprs[value]
        if len(old) == 2 and len(new) == 3 and new[0] == old[0] and value not in self._cuts:
            if (expr := self._in_heads(self._movable(self.exprs[value]), *new[1:])) is not None:
                self._read.append((value, node))
            return expr
        if len(old) == 3 and new == (old[0], old[1] * old[2]):
            return self._joined(node, value, "concat")
        return None

    def _in_heads(self, expr: Expr, heads: int, width: int) -> Expr | None:
        """Return [N, heads x width] as [N, heads, width]: the last weight is in heads."""
        match expr:
            case Sum(terms=terms):
                parts = [self._in_heads(t, heads, width) for t in terms]
                return None if None in parts else self._total(*parts)  # type: ignore[arg-type]
            case Product(factors=(*first, Leaf(kind="weight") as last)):
                source, base = self._emitted(last), last.name.partition("#")[0]
                leaf = self.leaf(("heads", last.name, heads), base, last.rows, width, "weight",
                                 source.emit, *source.nodes, heads=heads)  # fmt: skip
                return Product((*first, leaf))
        return None

    def _joined(self, node: fx.Node, value: fx.Node, name: str) -> Expr | None:
        """Return features whose heads are side by side, or averaged."""
        if value in self._cuts:
            return None
        self._read.append((value, node))
        self._widths[symbol := f"w{len(self._widths)}#"] = _about(node).shape[1]
        self._maps["concat"], self._maps["mean_heads"] = _concat, _mean_heads
        return Map("mean_heads" if name == "mean" else "concat", self.exprs[value], symbol,
                   free=name != "mean")  # fmt: skip

    def _mean(self, node: fx.Node, value: Any, dim: Any = None) -> Expr | None:
        if value not in self.exprs or dim != 1 or len(_about(value).shape) != 3:
            return None
        return self._joined(node, value, "mean")

    def _flatten(self, node: fx.Node, value: Any, start_dim: Any = 0) -> Expr | None:
        return self._view(node, value) if start_dim == 1 else None

    def _attention(
        self, node: fx.Node, graph: fx.Node, score: Any, value: Any, operands: Any, *,
        edge_order: bool = False,
    ) -> Expr | None:  # fmt: skip
        if not edge_order or not self._is_graph(graph):
            return None
        split = {
            n for n, e in self.exprs.items() if len(_about(n).shape) == 3 and n not in self._cuts
        }
        attention = read_attention(node, score, value, operands, split)
        if attention is None:
            self._note(f"{self._layer} makes scores or messages of more than its features")
            return None
        self._dtype = _about(node).dtype
        for operand in attention.operands:
            path = [operand.origin, *operand.chain, node] if operand.origin is not None else []
            self._read += zip(path, path[1:], strict=False)
        self._read.append((attention.features, node))
        name = f"softmax{len(self._attentions) or ''}"
        self._attentions[name] = attention
        args = tuple(self.exprs[origin] for origin in attention.origins)
        attend = Attend(name, self._matrix(graph, []), args, _about(node).shape[1],
                        folds=True)  # fmt: skip
        return attend @ self.exprs[attention.features]

    def _maxk(self, node: fx.Node, x: Any, k: int) -> Expr | None:
        expr = self.expr_of(x, node)
        if expr is None:
            return None
        about = _about(x)
        self._widths["k"] = k
        self._maps["maxk"] = lambda t: ops.maxk(t, k)
        like = torch.empty((0, about.shape[1]), dtype=about.dtype)
        able = ops.multiplies_compressed(CBSR(like[:, :k], like.to(torch.int32), about.shape[1]), 1)
        return Map("maxk", expr, keeps=True, multiplies=able)

    def _columns_of(self, node: fx.Node) -> int:
        """The number of sources of a graph, by what is gathered of them."""
        size = self._cols
        if isinstance(size, int):
            return size
        placeholder, dim = size.args  # type: ignore[misc]
        return _about(placeholder).shape[dim]


def _concat(t: torch.Tensor) -> torch.Tensor:
    return t.flatten(1)


def _mean_heads(t: torch.Tensor) -> torch.Tensor:
    return t.mean(dim=1) if t.dim() == 3 else t


def _about(node: Any) -> Any:
    return node.meta.get(ABOUT) if isinstance(node, fx.Node) else None


def _first_argument(node: fx.Node) -> Any:
    return node.args[0]


def _sums(node: fx.Node) -> bool:
    """Whether a node is a sum of messages over the edges of a graph."""
    if node.op != "call_function" or name_of(node.target) not in (*_PRODUCTS, "attention"):
        return False
    graph = node.args[0]
    return isinstance(graph, fx.Node) and name_of(graph.target) == "graph_of" and (
        isinstance(node.meta.get(ABOUT), About)
    )  # fmt: skip


_HANDLERS: dict[str, Callable[..., Expr | None]] = {
    "linear": _Reading._linear, "matmul": _Reading._matmul, "mm": _Reading._matmul,
    "__matmul__": _Reading._matmul,
    "add": _Reading._add, "__add__": _Reading._add, "__radd__": _Reading._add,
    "sub": _Reading._subtract, "neg": _Reading._negate,
    "mul": _Reading._multiply, "__rmul__": _Reading._multiply,
    "div": _Reading._divide, "__truediv__": _Reading._divide,
    "gspmm": _Reading._gspmm, "sampled_spmm": _Reading._sampled_spmm,
    "attention": _Reading._attention, "dense_maxk": _Reading._maxk,
    "view": _Reading._view, "reshape": _Reading._view, "flatten": _Reading._flatten,
    "mean": _Reading._mean,
}  # fmt: skip


class _Parameters(NamedTuple):
    """Of a handler: how many arguments it takes by position at most, and the names of all."""

    most: float
    names: frozenset[str]

    @classmethod
    def of(cls, handler: Any) -> "_Parameters":
        found = [*signature(handler).parameters.values()][1:]
        kinds = [p.kind for p in found]
        most = inf if Parameter.VAR_POSITIONAL in kinds else len(found)
        names = frozenset(p.name for p in found)
        if Parameter.VAR_KEYWORD in kinds:
            names |= _SAMPLE
        return cls(most, names)


_SAMPLE = frozenset(("rescale", "width", "strategy"))
_PARAMETERS = {handler: _Parameters.of(handler) for handler in _HANDLERS.values()}
