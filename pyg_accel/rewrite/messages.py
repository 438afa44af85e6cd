"""Sums of messages over edges as products with matrices, and attention."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from pyg_accel.formula import Binary, Formula, Operand, operands_of
from pyg_accel.rewrite.attention import Attention, read_attention
from pyg_accel.rewrite.builder import Builder, Edges
from pyg_accel.rewrite.ir import Attend, Expr, Leaf
from pyg_accel.rewrite.leaves import Leaves, Unreadable, require
from pyg_accel.rewrite.nodes import facts_of
from pyg_accel.rewrite.sources import Normalisation, degrees, edges_of, inverse_roots, views_of
from pyg_accel.rewrite.terms import Term, terms_of

__all__ = ["Messages"]

_HALVES = {torch.bfloat16, torch.float16}


class Messages(Leaves):
    """Reads sums of messages over edges as products.

    Attributes:
        reason: why a sum of messages is not a product; empty if all are products.
    """

    def __init__(
        self,
        constants: Mapping[str, Any],
        layer: str,
        cuts: frozenset[fx.Node],
        overwritten: frozenset[fx.Node],
    ) -> None:
        super().__init__(cuts)
        self._overwritten = overwritten
        self.reason = ""
        self._constants, self._layer = constants, layer
        self._ends: tuple[Any, ...] = ()  # numbers of targets and sources, and the target's row
        self._attentions: dict[str, Attention] = {}
        self._sampling: dict[str, Any] | None = None

    def _gspmm(
        self, node: fx.Node, graph: fx.Node, formula: Any, operands: Any, *, reduce: Any,
        edge_order: bool = False,
    ) -> Expr:  # fmt: skip
        formula = self._constants[str(formula.target)] if isinstance(formula, fx.Node) else formula
        reason = "" if reduce == "none" else f"aggregation by {reduce}"
        require(reduce in ("sum", "mean"), reason)
        require(isinstance(formula, Formula) and edge_order and self._is_graph(graph))
        try:
            return self._messages(node, graph, formula, operands, mean=reduce == "mean")
        except Unreadable as why:
            reason = f"the message of {self._layer} is not linear in its features"
            raise Unreadable(reason) from why

    def _sampled_spmm(
        self, node: fx.Node, graph: fx.Node, x: Any, weight: Any = None, *, reduce: str,
        width: Any, strategy: Any, rescale: Any, edge_order: bool = False,
    ) -> Expr:  # fmt: skip
        """A sum over a sample of the edges of each row; all sums of a layer use one sample."""
        sample = {"width": width, "strategy": strategy, "rescale": rescale}
        require(edge_order and self._is_graph(graph) and self._sampling in (None, sample))
        scalar = weight is None or len(facts_of(weight).shape) == 1
        require(scalar, "attention over samples of the edges")
        self._sampling = sample
        source = Operand("u", 0)
        formula: Formula = source if weight is None else Binary("mul", source, Operand("e", 1))
        operands = [x] if weight is None else [x, weight]
        return self._messages(node, graph, formula, operands, mean=reduce == "mean")

    def _is_graph(self, graph: fx.Node) -> bool:
        """Whether a graph has the sources and targets of the other graphs."""
        return graph.op == "call_function" and graph.args[1:4] == self._ends

    def _messages(
        self, node: fx.Node, graph: fx.Node, formula: Formula, operands: Any, *, mean: bool
    ) -> Expr:
        facts = facts_of(node)
        self._dtype = facts.dtype
        require(len(facts.shape) == 2 and None not in map(facts_of, operands))
        width = facts.shape[1]

        def is_wide(operand: Operand) -> bool:
            value = operands[operand.index]
            shape = facts_of(value).shape
            narrow = value not in self.exprs and (operand.side == "e" or value.op != "placeholder")
            return len(shape) == 2 and shape[1] == width and (width > 1 or not narrow)

        terms = terms_of(formula, is_wide)
        read = [operands[o.index] for o in operands_of(formula)]
        precisions = {facts_of(o).dtype for o in read}
        require(len(precisions) <= 1 or precisions & _HALVES)
        wide = [term.features for term in terms if term.features is not None]
        sources, targets = ({operands[o.index] for o in wide if o.side == s} for s in "uv")
        require(not sources & targets)  # x_i - x_j: a difference of two sums is less precise
        parts = [self._term(node, graph, term, operands, mean=mean) for term in terms]
        return parts[0] if len(parts) == 1 else self._sum_of(*parts)

    def _term(
        self, node: fx.Node, graph: fx.Node, term: Term, operands: Any, *, mean: bool
    ) -> Expr:
        if term.features is None or term.features.side == "e":
            raise Unreadable
        exchanged = bool(self._exchanges) and term.features.side == "u"
        expr = self.expr_of(operands[term.features.index], node, exchanged=exchanged)
        sides: dict[str, list[tuple[fx.Node, bool]]] = {"u": [], "v": [], "e": []}
        for operand, inverse in term.factors:
            value = operands[operand.index]
            require(value not in self.exprs and facts_of(value).shape[1:] in ((), (1,)))
            sides[operand.side].append((value, inverse))
        if term.features.side == "v":
            require(not mean)
            return self._targets(graph, term, expr, sides)
        out = self._with_bias_as_product(expr)
        require(not any(self._is_stale_copy(value) for value, _ in sides["e"]))
        for vector, inverse in sides["u"]:
            out = self._rows_scaled(vector, out, inverse=inverse, graph=graph, side="u")
        require(expr.rows == ("M" if self._bipartite else "N"))
        weights = sides["e"]
        normalised = None
        if len(weights) == 1 and not weights[0][1] and not mean:
            normalised = Normalisation.of(weights[0][0], graph, self._constants, self._overwritten)
        if normalised is not None:
            out = self._normalised(graph, normalised, out)
        else:
            out = self._matrix(graph, weights, mean=mean) @ out
        for vector, inverse in sides["v"]:
            out = self._rows_scaled(vector, out, inverse=inverse, graph=graph, side="v")
        return self._scaled(term.number, out)

    def _is_stale_copy(self, weights: fx.Node) -> bool:
        """Whether weights [E, 1] are a copy of a tensor that was written to after the copy."""
        return any(
            facts_of(view).memory != facts_of(base).memory and view in self._overwritten
            for view, base in pairwise(views_of(weights))
        )

    def _normalised(self, graph: fx.Node, norm: Normalisation, expr: Expr) -> Expr:
        """Multiply with GCN's normalised adjacency, ``D^(-1/2) A D^(-1/2)``."""
        dtype = self._dtype

        def edges(b: Builder) -> Edges:
            return norm.edges(b, graph)

        def roots(b: Builder) -> fx.Node:
            weight = norm.edges(b, graph).weight
            return b.call(inverse_roots, graph, weight, dtype, derived=True)

        key, kind = ("normalised", graph.args[0]), "sparse" if norm.weight is None else "weighted"
        nodes = (graph,) if norm.weight is None else (graph, norm.weight)
        a = self.leaf(key, "A", "N", "N", kind, edges, *nodes)
        d = self.leaf(("roots", graph.args[0]), "D", "N", "N", "diagonal", roots, *nodes)
        return d @ a @ d @ self._with_bias_as_product(expr)

    def _targets(
        self, graph: fx.Node, term: Term, expr: Expr, sides: dict[str, list[tuple[fx.Node, bool]]]
    ) -> Expr:
        """Return the sum of target features over edges: the degree times the features."""
        require(not (sides["u"] or sides["v"] or self._sampling) and expr.rows == "N")
        matrix, dtype = self._matrix(graph, sides["e"]), self._dtype
        source = self._source_of(matrix)

        def emit(b: Builder) -> fx.Node:
            edges = source.emit(b)
            assert isinstance(edges, Edges)
            return b.call(degrees, edges.graph, edges.weight, edges.edge_order, dtype,
                          derived=True)  # fmt: skip

        leaf = self.leaf(("degree", matrix.name), "D", "N", "N", "diagonal", emit, *source.nodes)
        return self._scaled(term.number, leaf @ self._with_bias_as_product(expr))

    def _matrix(
        self, graph: fx.Node, weights: list[tuple[fx.Node, bool]], *, mean: bool = False
    ) -> Leaf:
        """Return the matrix of the edges; its values are the product of weights [E, 1]."""
        columns = "M" if self._bipartite else "N"
        emit, nodes = edges_of(graph, weights)
        kind = "weighted" if weights else "sparse"
        key = ("edges", graph.args[0], mean, *nodes, *(inverse for _, inverse in weights))
        return self.leaf(key, "A", "N", columns, kind, emit, graph, *nodes, mean=mean)

    def _attention(
        self, node: fx.Node, graph: fx.Node, score: Any, value: Any, operands: Any, *,
        edge_order: bool = False,
    ) -> Expr:  # fmt: skip
        require(edge_order and self._is_graph(graph))
        reason = f"on several ranks {self._layer} exchanges halos before its products"
        require(not self._exchanges, reason)
        split = {
            n for n, e in self.exprs.items() if len(facts_of(n).shape) == 3 and n not in self._cuts
        }
        attention = read_attention(node, score, value, operands, split)
        if attention is None:
            raise Unreadable(f"{self._layer} makes scores or messages of more than its features")
        self._dtype = facts_of(node).dtype
        for operand in attention.operands:
            path = [operand.origin, *operand.chain, node] if operand.origin is not None else []
            self._read += pairwise(path)
        self._read.append((attention.features, node))
        name = f"softmax{len(self._attentions) or ''}"
        self._attentions[name] = attention
        args = tuple(self.exprs[origin] for origin in attention.origins)
        # Scores that use the features directly are computed in the kernel that sums them.
        folds = all(o.chain for o in attention.operands if o.origin is not None)
        heads = facts_of(node).shape[1]
        attend = Attend(name, self._matrix(graph, []), args, heads, folds)
        return attend @ self.exprs[attention.features]
