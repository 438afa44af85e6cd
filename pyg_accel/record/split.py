"""What a program derives of a graph, such as self-loops, normalisations and the CSR form.

It depends on the graph and on sizes alone, so it is computed once for as long as the graph lives.
"""

import operator
from typing import NamedTuple

from torch import fx

__all__ = ["DERIVED", "Parts", "derives_anew", "split"]

DERIVED = "derived"  # key of the metadata of nodes


class Parts(NamedTuple):
    """A program in two.

    Attributes:
        derive: from the tensors of a call to a tuple of what is derived.
        rest: from these tensors and that tuple to the result.
        owners: places of the tensors whose numbers are read.
        constants: names of the constants that are read.
        sizes: (place, dimension) of the sizes that are read of others.
    """

    derive: fx.Graph
    rest: fx.Graph
    owners: tuple[int, ...]
    constants: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]


def derives_anew(graph: fx.Graph) -> bool:
    """Return whether a program derives something of more than the graph, in each call."""
    inside = _derived(graph)
    return any(DERIVED in node.meta and node not in inside for node in graph.nodes)


def split(graph: fx.Graph) -> Parts | None:
    """Return the parts of a graph; None if it derives nothing."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = {node: place for place, node in enumerate(inputs)}
    inside = _derived(graph)
    wanted = [n for n in inside if n.target is not operator.getitem and _is_value(n)]
    wanted += [n for n in inside if n.target is operator.getitem]
    left = [n for n in wanted if any(user not in inside for user in n.users)]
    if not left:
        return None
    needed = _ancestors(left)
    owners, sizes = dict[int, None](), dict[tuple[int, int], None]()
    constants = [str(node.target) for node in needed if node.op == "get_attr"]
    for node in needed:
        for given in node.all_input_nodes:
            if given.op != "placeholder":
                continue
            if node.op == "call_method":
                sizes[places[given], node.args[1]] = None  # type: ignore[index]
            else:
                owners[places[given]] = None
    derive, rest = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = derive.node_copy(node, copies.__getitem__)
    derive.output(tuple(copies[node] for node in left))
    copies = {node: rest.node_copy(node) for node in inputs}
    derived = rest.placeholder("derived")
    for place, node in enumerate(left):
        copies[node] = rest.call_function(operator.getitem, (derived, place))
    for node in graph.nodes:
        if node not in copies and (node not in inside or not _is_value(node)):
            copies[node] = rest.node_copy(node, copies.__getitem__)
    fewer = {key for key in sizes if key[0] in owners}
    return Parts(
        derive,
        rest,
        tuple(owners),
        tuple(constants),
        tuple(key for key in sizes if key not in fewer),
    )


def _derived(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes that are computed of the graph and of sizes."""
    inside: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_derived(node, inside):
            inside[node] = None
    return inside


def _is_derived(node: fx.Node, inside: dict[fx.Node, None]) -> bool:
    """Whether a node is computed of the graph and of sizes."""
    given = node.all_input_nodes
    if node.op == "call_method" and node.target == "size":
        return given[0].op == "placeholder" or given[0] in inside
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return given[0] in inside
    return DERIVED in node.meta and all(
        g.op in ("placeholder", "get_attr") or g in inside for g in given
    )


def _is_value(node: fx.Node) -> bool:
    """Whether a derived node is no size of an argument, which costs next to nothing."""
    return node.op == "call_function" or node.all_input_nodes[0].op != "placeholder"


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes that others are computed of, and these; no placeholders."""
    found: set[fx.Node] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            pending += node.all_input_nodes
    return found
