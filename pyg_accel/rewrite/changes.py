"""Writes in place in a recorded graph: they decide which nodes may be computed later."""

from torch import fx

from pyg_accel.record.about import WRITES
from pyg_accel.rewrite.nodes import facts_of

__all__ = ["Changes"]


class Changes:
    """The position of every node of a graph, and of the last write to every storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self._positions = {node: position for position, node in enumerate(graph.nodes)}
        self._last_write = {
            memory: position
            for node, position in self._positions.items()
            for memory in node.meta.get(WRITES, ())
        }

    def overwritten_after(self, node: fx.Node) -> bool:
        """Return whether an input or the result of a node is written to by a later node."""
        position = self._positions[node]
        facts = [facts_of(n) for n in (node, *node.all_input_nodes)]
        return any(self._last_write.get(f.memory, -1) > position for f in facts if f)
