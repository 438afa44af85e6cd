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
from pyg_accel.rewrite.leaves import Leaves
from pyg_accel.rewrite.nodes import facts_of
from pyg_accel.rewrite.sources import (
    Normalisation,
    base_of,
    degrees,
    edges_of,
    inverse_roots,
    normalisation_of,
    views_of,
)
from pyg_accel.rewrite.terms import MOST, Term, terms_of

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

    def _set_reason(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _gspmm(
        self, node: fx.Node, graph: fx.Node, formula: Any, operands: Any, *, reduce: Any,
        edge_order: bool = False,
    ) -> Expr | None:  # fmt: skip
        formula = self._constants[str(formula.target)] if isinstance(formula, fx.Node) else formula
        if reduce not in ("sum", "mean"):
            if reduce != "none":
                self._set_reason(f"aggregation by {reduce}")
            return None
        if not isinstance(formula, Formula) or not edge_order or not self._is_graph(graph):
            return None
        expr = self._messages(node, graph, formula, operands, mean=reduce == "mean")
        if expr is None:
            self._set_reason(f"the message of {self._layer} is not linear in its features")
        return expr

    def _sampled_spmm(
        self, node: fx.Node, graph: fx.Node, x: Any, weight: Any = None, *, reduce: str,
        width: Any, strategy: Any, rescale: Any, edge_order: bool = False,
    ) -> Expr | None:  # fmt: skip
        """A sum over a sample of the edges of each row; all sums of a layer use one sample."""
        sample = {"width": width, "strategy": strategy, "rescale": rescale}
        if not edge_order or not self._is_graph(graph) or self._sampling not in (None, sample):
            return None
        if weight is not None and len(facts_of(weight).shape) != 1:
            self._set_reason("attention over samples of the edges")
            return None
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
    ) -> Expr | None:
        facts = facts_of(node)
        self._dtype = facts.dtype
        if len(facts.shape) != 2 or any(facts_of(o) is None for o in operands):
            return None
        width = facts.shape[1]

        def is_wide(operand: Operand) -> bool:
            value = operands[operand.index]
            shape = facts_of(value).shape
            narrow = value not in self.exprs and (operand.side == "e" or value.op != "placeholder")
            return len(shape) == 2 and shape[1] == width and (width > 1 or not narrow)

        terms = terms_of(formula, is_wide)
        if terms is None or len(terms) > MOST:
            return None
        read = [operands[o.index] for o in operands_of(formula)]
        precisions = {facts_of(o).dtype for o in read}
        if len(precisions) > 1 and not precisions & _HALVES:
            return None
        wide = [term.features for term in terms if term.features is not None]
        sources, targets = ({operands[o.index] for o in wide if o.side == s} for s in "uv")
        if sources & targets:  # x_i - x_j: a difference of two sums is less precise
            return None
        parts = [self._term(node, graph, term, operands, mean=mean) for term in terms]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        return whole[0] if len(whole) == 1 else self._sum_of(*whole)

    def _term(
        self, node: fx.Node, graph: fx.Node, term: Term, operands: Any, *, mean: bool
    ) -> Expr | None:
        if term.features is None or term.features.side == "e":
            return None
        exchanged = bool(self._exchanges) and term.features.side == "u"
        expr = self.expr_of(operands[term.features.index], node, exchanged=exchanged)
        sides: dict[str, list[tuple[fx.Node, bool]]] = {"u": [], "v": [], "e": []}
        for operand, inverse in term.factors:
            value = operands[operand.index]
            if value in self.exprs or facts_of(value).shape[1:] not in ((), (1,)):
                return None
            sides[operand.side].append((operands[operand.index], inverse))
        if expr is None:
            return None
        if term.features.side == "v":
            return None if mean else self._targets(graph, term, expr, sides)
        out: Expr | None = self._with_bias_as_product(expr)
        if any(self._is_stale_copy(value) for value, _ in sides["e"]):
            return None
        for vector, inverse in sides["u"]:
            out = out and self._rows_scaled(vector, out, inverse=inverse, graph=graph, side="u")
        if out is None or expr.rows != ("M" if self._bipartite else "N"):
            return None
        weights = sides["e"]
        normalised = None
        if len(weights) == 1 and not weights[0][1] and not mean:
            normalised = normalisation_of(weights[0][0], graph, self._constants, self._overwritten)
        if normalised is not None:
            out = self._normalised(graph, normalised, out)
        else:
            out = self._matrix(graph, weights, mean=mean) @ out
        for vector, inverse in sides["v"]:
            out = out and self._rows_scaled(vector, out, inverse=inverse, graph=graph, side="v")
        return None if out is None else self._scaled(term.number, out)

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
        a = self.leaf(key, "A", "N", "N", kind, edges, *nodes, graph=graph)
        d = self.leaf(("roots", graph.args[0]), "D", "N", "N", "diagonal", roots, *nodes)
        return d @ a @ d @ self._with_bias_as_product(expr)

    def _targets(
        self, graph: fx.Node, term: Term, expr: Expr, sides: dict[str, list[tuple[fx.Node, bool]]]
    ) -> Expr | None:
        """Return the sum of target features over edges: the degree times the features."""
        if sides["u"] or sides["v"] or expr.rows != "N" or self._sampling is not None:
            return None
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
        factors = ((base_of(node), inverse) for node, inverse in weights)
        key = ("edges", graph.args[0], mean, *factors)
        return self.leaf(key, "A", "N", columns, kind, emit, graph, *nodes, graph=graph, mean=mean)

    def _attention(
        self, node: fx.Node, graph: fx.Node, score: Any, value: Any, operands: Any, *,
        edge_order: bool = False,
    ) -> Expr | None:  # fmt: skip
        if not edge_order or not self._is_graph(graph):
            return None
        if self._exchanges:
            self._set_reason(f"on several ranks {self._layer} exchanges halos before its products")
            return None
        split = {
            n for n, e in self.exprs.items() if len(facts_of(n).shape) == 3 and n not in self._cuts
        }
        attention = read_attention(node, score, value, operands, split)
        if attention is None:
            self._set_reason(f"{self._layer} makes scores or messages of more than its features")
            return None
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
