"""Moves checks of sizes ahead of effects, which must not run twice, and drops unused functions.

A program with unexpected sizes stops, and the code of the layer makes the call. So all checks of
sizes precede random numbers and changes of tensors.
"""

from torch import fx

from pyg_accel.record.dims import SIZES, expect
from pyg_accel.record.edge_tensors import name_of
from pyg_accel.record.metadata import EFFECT, FACTS, WRITES
from pyg_accel.record.split import DERIVED, INPUTS, is_derived

__all__ = ["checks_first", "drop_unused"]

# Functions that are removed from the graph if nothing reads their result, e.g. unused arguments of
# a message.
_WITHOUT_EFFECT = frozenset({
    "__getitem__", "getitem", "index_select", "unbind", "view", "reshape", "expand", "expand_as",
    "squeeze", "unsqueeze", "select", "narrow", "graph_of", "size", "add", "sub", "mul", "floordiv",
    "empty",
})  # fmt: skip


def checks_first(graph: fx.Graph) -> fx.Graph | None:
    """Return the graph with the checks ahead of all effects; None if one cannot be.

    Checks are comparisons of sizes, and derivations from an edge list, with indices out of range.
    """
    written = {memory for node in graph.nodes for memory in node.meta.get(WRITES, ())}
    inputs = {n.meta[FACTS].memory for n in graph.nodes if n.op in INPUTS and FACTS in n.meta}
    early, late, moves = dict[fx.Node, None](), list[fx.Node](), False
    for node in graph.nodes:
        has_effect = EFFECT in node.meta or not inputs.isdisjoint(node.meta.get(WRITES, ()))
        if not late and not has_effect:
            early[node] = None
        elif (
            node.op in INPUTS
            or (node.target in SIZES and early.keys() >= {*node.all_input_nodes})
            or is_derived(node, early, written)
        ):
            early[node], moves = None, True
        elif node.target is expect or DERIVED in node.meta:
            return None
        else:
            late.append(node)
    if not moves:
        return graph
    ordered, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*early, *late):
        copies[node] = ordered.node_copy(node, copies.__getitem__)
    return ordered


def drop_unused(graph: fx.Graph) -> None:
    """Remove functions with unused results and without effects."""
    for node in reversed(graph.nodes):
        name = node.target if node.op == "call_method" else name_of(node.target)
        if not node.users and node.op.startswith("call") and name in _WITHOUT_EFFECT:
            graph.erase_node(node)
