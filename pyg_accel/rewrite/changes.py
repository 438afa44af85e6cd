"""Changes in place in a recorded graph: which nodes may be computed later than they were."""

from torch import fx

from pyg_accel.rewrite.nodes import called

__all__ = ["Changes"]

_VIEWS = frozenset((
    "view", "reshape", "view_as", "reshape_as", "__getitem__", "getitem", "t", "transpose",
    "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "unbind", "chunk", "split", "narrow",
    "select", "permute", "movedim", "detach", "contiguous",
))  # fmt: skip


class Changes:
    """Where the memory of nodes is written to, by the order of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._owners: dict[fx.Node, fx.Node] = {}  # of the memory of views
        self._last: dict[fx.Node, int] = {}
        for node, place in self._places.items():
            if node.op[:4] != "call":
                continue
            name = called(node)
            writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            out = node.kwargs.get("out")
            changed = out if isinstance(out, fx.Node) else node.args[0] if writes else None
            if isinstance(changed, fx.Node):
                self._last[self._owner(changed)] = place
            if (writes or name in _VIEWS) and isinstance(node.args[0], fx.Node):
                self._owners[node] = self._owner(node.args[0])

    def _owner(self, node: fx.Node) -> fx.Node:
        return self._owners.get(node, node)

    def follow(self, node: fx.Node) -> bool:
        """Return whether what a node reads, or makes, is changed behind it."""
        place = self._places[node]
        return any(
            self._last.get(self._owner(n), -1) > place for n in (node, *node.all_input_nodes)
        )
