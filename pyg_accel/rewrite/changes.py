"""Changes in place in a recorded graph: which nodes may be computed later than they were."""

from torch import fx

from pyg_accel.record.about import WRITES
from pyg_accel.rewrite.nodes import facts_of

__all__ = ["Changes"]


class Changes:
    """Where the memory of nodes is written to, by the order of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._last = {memory: place for node, place in self._places.items()
                      for memory in node.meta.get(WRITES, ())}  # fmt: skip

    def follow(self, node: fx.Node) -> bool:
        """Return whether what a node reads, or makes, is changed behind it."""
        place = self._places[node]
        known = [facts_of(n) for n in (node, *node.all_input_nodes)]
        return any(self._last.get(about.memory, -1) > place for about in known if about)
