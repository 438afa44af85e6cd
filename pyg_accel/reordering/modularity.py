"""Communities by modularity: the two passes over the edges of Louvain's method.

They run in C++, on the CPU. Edges are counted in integers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.runtime.native import cpu_library

__all__ = ["Level", "best_labels", "merge"]


@dataclass(frozen=True)
class Level:
    """An undirected graph without self-loops, whose nodes may be communities.

    Attributes:
        rowptr: [N + 1] int64.
        col: [E] int32 or int64; with every edge in both directions.
        weight: [E] int64, number of edges of an entry; None if all are 1.
        strength: [N] int64, edges of each node, including inner edges.
    """

    rowptr: Tensor
    col: Tensor
    weight: Tensor | None
    strength: Tensor

    @classmethod
    def of(cls, rowptr: Tensor, col: Tensor) -> "Level":
        """Return the first level of a graph."""
        rowptr = rowptr.long()
        return cls(rowptr, col, None, rowptr.diff())

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.strength.numel()

    @property
    def modularity(self) -> float:
        """The share of edges inside of nodes, minus the expected share in a random graph."""
        total = float(self.strength.sum())
        between = self.col.numel() if self.weight is None else int(self.weight.sum())
        chance = (self.strength.double() / total).square().sum()
        return 1 - between / total - float(chance)


def best_labels(level: Level, labels: Tensor, sizes: Tensor, nodes: Tensor) -> Tensor:
    """Return the best community of each of some nodes, if no other node moves.

    It has the largest gain in modularity, ``2m w(v, c) - k(v) K(c)``, among the communities of the
    node and its neighbours; ties go to the node's community, then to the smallest number. A single
    node joins another single node only if that has the smaller number: otherwise two of them could
    swap places.

    Args:
        level: the graph.
        labels: [N] int64, the community of every node, numbered below N.
        sizes: [N] int64, number of nodes in every community.
        nodes: [M] int64.

    Returns:
        [M] int64.
    """
    total = torch.zeros_like(level.strength).index_add_(0, labels, level.strength)
    result: Tensor = cpu_library().community_best(
        level.rowptr, level.col, level.weight, level.strength, labels, total, sizes, nodes
    )
    return result


def merge(level: Level, labels: Tensor, count: int) -> Level:
    """Return the graph with a node for each community, and sums of the edges between them.

    Args:
        level: the graph.
        labels: [N] int64, the community of every node, in [0, count).
        count: number of communities.
    """
    strength = level.strength.new_zeros(count).index_add_(0, labels, level.strength)
    members = torch.argsort(labels, stable=True)
    first = torch.zeros(count + 1, dtype=torch.int64)
    first[1:] = torch.bincount(labels, minlength=count).cumsum(0)
    rowptr, col, weight = cpu_library().community_merge(
        level.rowptr, level.col, level.weight, labels, first, members
    )
    return Level(rowptr, col, weight, strength)
