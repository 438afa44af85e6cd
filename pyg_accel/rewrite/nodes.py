"""Facts of the nodes of a recorded graph, such as shapes and gradients."""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import fx

from pyg_accel.record.edge_tensors import name_of
from pyg_accel.record.metadata import FACTS, WRITES
from pyg_accel.record.split import DERIVED

__all__ = ["called", "facts_of", "features_of", "lasts", "learning", "overwritten_nodes"]


def called(node: fx.Node) -> str:
    """Return the name of the function that a node calls, or an empty string."""
    if node.op == "call_method":
        return str(node.target)
    return name_of(node.target) if callable(node.target) else ""


def facts_of(node: Any) -> Any:
    """Return the recorded facts of a tensor, such as its shape; None for other nodes."""
    return node.meta.get(FACTS) if isinstance(node, fx.Node) else None


def features_of(exchange: fx.Node) -> fx.Node:
    """Return the local features to which an exchange appends rows of other processes."""
    _, _, features = exchange.args
    assert isinstance(features, fx.Node)
    return features


def overwritten_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes with an input or a result that a later node writes to."""
    overwritten: set[fx.Node] = set()
    written: set[int] = set()
    for node in reversed(graph.nodes):
        facts = [facts_of(n) for n in (node, *node.all_input_nodes)]
        if any(f.memory in written for f in facts if f):
            overwritten.add(node)
        written.update(node.meta.get(WRITES, ()))
    return frozenset(overwritten)


def learning() -> Callable[[fx.Node], bool]:
    """Return a function that tells whether gradients flow into a node; its results are cached."""

    @cache
    def learns(node: fx.Node) -> bool:
        if node.all_input_nodes:
            return any(map(learns, node.all_input_nodes))
        return FACTS in node.meta and bool(node.meta[FACTS].learns)

    return learns


def lasts(node: fx.Node) -> bool:
    """Return whether a node is an argument, a constant, or computed from these once per graph."""
    if node.op in ("placeholder", "get_attr"):
        return True
    derived = DERIVED in node.meta or called(node) in ("getitem", "size")
    return derived and all(map(lasts, node.all_input_nodes))
