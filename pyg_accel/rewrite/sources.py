"""The matrices of expressions, from the graph of a program: edges, degrees and weights."""

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops

from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.record.metadata import FACTS
from pyg_accel.rewrite.builder import Builder, Edges
from pyg_accel.rewrite.nodes import called, lasts

__all__ = [
    "Normalisation", "degrees", "edges_of", "has_edges", "in_order_of", "inverse_roots",
    "ones_like", "views_of",
]  # fmt: skip

# Functions of this package that call `gcn_norm`; `_formula` does in distributed models.
_NORMALISATIONS = ("remembered", "_formula")
_VIEWS = ("view", "reshape", "unsqueeze")


class Normalisation(NamedTuple):
    """A call of ``gcn_norm``.

    Attributes:
        edge_index: the argument.
        weight: [E] or None.
        num_nodes: N.
        fill: weight of self-loops.
        loops: whether self-loops are added.
    """

    edge_index: fx.Node
    weight: fx.Node | None
    num_nodes: Any
    fill: float
    loops: bool

    @classmethod
    def of(
        cls, weight: fx.Node, graph: fx.Node, constants: Mapping[str, Any],
        overwritten: Collection[fx.Node],
    ) -> "Normalisation | None":  # fmt: skip
        """Return the call that computes the edges of a graph and their weights, if there is one.

        Args:
            weight: [E] or [E, 1].
            graph: the node of the graph.
            constants: the constants of the program.
            overwritten: nodes with an input or a result that a later node writes to.
        """
        item = views_of(weight)[-1]
        if item.op != "call_function" or called(item) != "getitem":
            return None
        call, place = item.args
        edges = graph.args[0]
        if place != 1 or not isinstance(call, fx.Node) or called(call) not in _NORMALISATIONS:
            return None
        if not isinstance(edges, fx.Node) or edges.args[:2] != (call, 0) or call in overwritten:
            return None
        function = call.args[0]
        norm: Any = constants[str(function.target)] if isinstance(function, fx.Node) else function
        # patch() calls a copy of PyG's function.
        if (norm.__module__, norm.__qualname__) != (gcn_norm.__module__, gcn_norm.__qualname__):
            return None
        bound = signature(norm).bind(*call.args[1:], **call.kwargs)
        bound.apply_defaults()
        named = bound.arguments
        if (own := named["edge_weight"]) is not None and own.meta[FACTS].learns:
            return None
        if (named["flow"] == "source_to_target") != (graph.args[3] == 1):
            return None
        fill = 2.0 if named["improved"] else 1.0
        return cls(named["edge_index"], own, named["num_nodes"], fill, named["add_self_loops"])

    def edges(self, b: Builder, graph: fx.Node) -> Edges:
        """Return the edges before normalisation."""
        if self.weight is None:
            return Edges(graph)
        args = (graph, self.edge_index, self.weight, self.num_nodes, self.fill)
        if self.loops:
            return Edges(graph, b.call(looped_weights, *args, derived=True))
        return Edges(graph, b.call(in_order_of, graph, self.weight, derived=True))


def views_of(node: fx.Node) -> list[fx.Node]:
    """Return edge weights [E, 1], followed by the tensors that they are views of."""
    views = [node]
    while node.op == "call_function" and called(node) in _VIEWS:
        source: Any = node.args[0]
        shape = source.meta[FACTS].shape
        if [n for n in shape if n != 1] != [n for n in node.meta[FACTS].shape if n != 1]:
            break
        node = source
        views.append(node)
    return views


def edges_of(
    graph: fx.Node, weights: list[tuple[fx.Node, bool]]
) -> tuple[Callable[[Builder], Edges], tuple[fx.Node, ...]]:
    """Return a function that emits a matrix of edges, and the nodes that it reads.

    Args:
        graph: the node of the graph.
        weights: factors [E, 1] of the values, and whether to divide by them instead.
    """
    bases = [(views_of(node)[-1], inverse) for node, inverse in weights]

    def emit(b: Builder) -> Edges:
        if not bases:
            return Edges(graph)
        (first, inverse), *others = bases
        if not inverse and not others and lasts(first) and not first.meta[FACTS].learns:
            return Edges(graph, b.call(in_order_of, graph, first, derived=True))
        total = b.call(torch.Tensor.reshape, first, -1)
        total = b.call(torch.Tensor.reciprocal, total) if inverse else total
        for node, divides in others:
            other = b.call(torch.Tensor.reshape, node, -1)
            total = b.call(torch.Tensor.div if divides else torch.Tensor.mul, total, other)
        return Edges(graph, total, edge_order=True)

    return emit, tuple(node for node, _ in bases)


def in_order_of(graph: Graph, values: Tensor) -> Tensor:
    """Return values [E, ...] of an edge list in CSR order."""
    values = values.reshape(values.size(0), *(n for n in values.shape[1:] if n != 1))
    return values if graph.perm is None else values.index_select(0, graph.perm)


def looped_weights(
    graph: Graph, edge_index: Tensor, weight: Tensor, num_nodes: int, fill: float
) -> Tensor:
    """Return the weights of edges and self-loops in CSR order."""
    values = add_remaining_self_loops(edge_index, weight, fill, num_nodes)[1]
    assert values is not None
    return in_order_of(graph, values)


def degrees(
    graph: Graph, weight: Tensor | None, edge_order: bool, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return the row sums of a matrix, [num_rows]."""
    if weight is None:
        return graph.degree.to(dtype)
    sums: Tensor = ops.gspmm(graph, "e0", [weight.unsqueeze(-1)], edge_order=edge_order)
    return sums.squeeze(-1).to(dtype)


def inverse_roots(graph: Graph, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``degree ** -1/2``, or 0 for infinite results."""
    root = degrees(graph, weight, False, dtype).pow(-0.5)
    return root.masked_fill(root == float("inf"), 0)


def has_edges(graph: Graph, side: str) -> Tensor:
    """Return which targets (``"v"``) or sources (``"u"``) of a graph have edges."""
    if side == "v":
        return graph.degree > 0
    return torch.bincount(graph.col, minlength=graph.num_cols) > 0


def ones_like(like: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a column of ones, with as many rows as features or as a graph has."""
    if isinstance(like, Tensor):
        return like.new_ones(like.size(0), 1)
    return torch.ones(like.num_rows, 1, dtype=dtype, device=like.device)
