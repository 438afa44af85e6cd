"""Builds a new graph of a program, from nodes of the recorded one and others."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx

from pyg_accel.record.split import DERIVED
from pyg_accel.rewrite.nodes import learning

__all__ = ["Builder", "Edges", "Value"]


class Edges(NamedTuple):
    """A matrix of edges.

    Attributes:
        graph: the node of its :class:`~pyg_accel.Graph`.
        weight: values [E] or [E, heads] of its entries; None if all are 1.
        edge_order: True if the values are in edge list order, False if they are in CSR order.
    """

    graph: fx.Node
    weight: fx.Node | None = None
    edge_order: bool = False


Value = fx.Node | float | Edges


class Builder:
    """Copies nodes to a new graph, and adds others between them.

    Attributes:
        graph: the new graph.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._learns = learning()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._calls: dict[Any, fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        """Copy the next node of the old graph."""
        self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)

    def replace(self, node: fx.Node, value: fx.Node) -> None:
        """Let a node of the new graph take the place of the next node of the old one."""
        self._copies[node] = value

    def call(
        self, function: Callable[..., Any], *args: Any, derived: bool = False, **kwargs: Any
    ) -> fx.Node:
        """Add a call and return its node, or the node of an equal call.

        Args:
            function: the function to call.
            args: its arguments, with nodes of either graph.
            derived: store the result with the graph, unless gradients flow into it.
            kwargs: its keyword arguments.
        """
        args, kwargs = fx.map_arg((args, kwargs), lambda n: self._copies.get(n, n))
        key = (function, _hashable(args), _hashable(tuple(kwargs.items())))
        node = self._calls.get(key)
        if node is None:
            node = self._calls[key] = self.graph.call_function(function, args, kwargs)
        if derived and not self._learns(node):
            node.meta[DERIVED] = True
        return node

    def finish(self, old: fx.Graph) -> fx.Graph:
        """Return the new graph without dead code; calls for their effects stay."""
        effects = {self._copies[n] for n in old.nodes if n in self._copies and not n.users}
        self.graph.eliminate_dead_code(lambda n: n in effects or n.op in ("placeholder", "output"))
        return self.graph


def _hashable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return (type(value), value.hex() if isinstance(value, float) else value)
