"""Splits a program into derivations from a graph, and the remainder.

Self-loops, normalisations, the CSR form and the like only depend on the graph and on sizes, so they
are computed once and stored while the graph lives.
"""

import operator
from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from pyg_accel.ops.csr import graph_of, idle_rows_of
from pyg_accel.ops.relations import graph_of_pairs, pairs_of
from pyg_accel.record.metadata import FACTS, WRITES

__all__ = ["DERIVED", "INPUTS", "STORED", "Parts", "derives_anew", "is_derived", "split"]

INPUTS = ("placeholder", "get_attr")  # operations of nodes
DERIVED = "derived"  # key of the metadata of nodes
STORED = (graph_of, idle_rows_of, pairs_of, graph_of_pairs)  # functions that store their results


class Parts(NamedTuple):
    """A program in two parts.

    Attributes:
        derive: takes the tensors of a call and returns a tuple of derived values.
        remainder: takes these tensors and that tuple and returns the result.
        owners: positions of the tensors that ``derive`` reads.
        constants: names of the constants that ``derive`` reads.
        sizes: (position, dimension) of the sizes of other tensors that ``derive`` reads.
    """

    derive: fx.Graph
    remainder: fx.Graph
    owners: tuple[int, ...]
    constants: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]


def derives_anew(graph: fx.Graph) -> bool:
    """Return whether a program has a derivation that also reads other values, in each call."""
    inside = _derived(graph)
    return any(DERIVED in node.meta and node not in inside for node in graph.nodes)


def split(graph: fx.Graph) -> Parts | None:
    """Return the parts of a graph; None if it derives nothing that is not stored elsewhere."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    positions = {node: position for position, node in enumerate(inputs)}
    inside = _derived(graph)
    candidates = [n for n in inside if n.target is not operator.getitem and _is_value(n)]
    candidates += [n for n in inside if n.target is operator.getitem]
    results = [n for n in candidates if any(user not in inside for user in n.users)]
    needed = _ancestors(results)
    if all(node.target in STORED for node in needed if DERIVED in node.meta):
        return None
    owners, sizes = dict[int, None](), dict[tuple[int, int], None]()
    constants = [str(node.target) for node in needed if node.op == "get_attr"]
    for node in needed:
        for argument in node.all_input_nodes:
            if argument.op != "placeholder":
                continue
            if node.op == "call_method":
                sizes[positions[argument], node.args[1]] = None  # type: ignore[index]
            else:
                owners[positions[argument]] = None
    derive, remainder = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = derive.node_copy(node, copies.__getitem__)
    derive.output(tuple(copies[node] for node in results))
    copies = {node: remainder.node_copy(node) for node in inputs}
    derived = remainder.placeholder("derived")
    for index, node in enumerate(results):
        copies[node] = remainder.call_function(operator.getitem, (derived, index))
    for node in graph.nodes:
        if node not in copies and (node not in inside or not _is_value(node)):
            copies[node] = remainder.node_copy(node, copies.__getitem__)
    sizes_of_others = tuple(key for key in sizes if key[0] not in owners)
    return Parts(derive, remainder, tuple(owners), tuple(constants), sizes_of_others)


def _derived(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes that are computed from the graph and sizes only."""
    ready = dict.fromkeys(node for node in graph.nodes if node.op in INPUTS)
    written = {memory for node in graph.nodes for memory in node.meta.get(WRITES, ())}
    for node in graph.nodes:
        if is_derived(node, ready, written):
            ready[node] = None
    return {node: None for node in ready if node.op not in INPUTS}


def is_derived(node: fx.Node, ready: Mapping[fx.Node, None], written: set[int]) -> bool:
    """Whether a node is a size of nodes that are ready, or derived from them while unwritten."""
    inputs = node.all_input_nodes
    if not ready.keys() >= {*inputs}:
        return False
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        return inputs[0].op == "call_function"
    unchanged = all(n.meta[FACTS].memory not in written for n in inputs if FACTS in n.meta)
    return DERIVED in node.meta and unchanged


def _is_value(node: fx.Node) -> bool:
    """Whether a derived node is not the size of an argument, which is not worth storing."""
    return node.op == "call_function" or node.all_input_nodes[0].op != "placeholder"


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return nodes and their ancestors, without placeholders."""
    ancestors: set[fx.Node] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node not in ancestors and node.op != "placeholder":
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors
