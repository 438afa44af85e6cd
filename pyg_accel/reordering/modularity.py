"""Communities by modularity: the two passes over the edges of Louvain's method.

Each exists in C++ for the CPU and in torch for all other devices. Both count in integers, and
compare floats that are computed by the same operations, so their results are equal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.column_reuse import entries_of
from pyg_accel.native import cpu_library, cpu_unavailable_reasons

__all__ = ["Level", "best_labels", "merge"]


@dataclass(frozen=True)
class Level:
    """An undirected graph without self-loops, whose nodes may be communities.

    Attributes:
        rowptr: [N + 1] int64.
        col: [E] int32 or int64; with every edge in both directions.
        weight: [E] int64, number of edges of an entry; None if all are 1.
        strength: [N] int64, edges of each node, including those inside of it.
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

    @property
    def native(self) -> bool:
        """Whether the passes run in C++."""
        return self.col.device.type == "cpu" and not cpu_unavailable_reasons()


def best_labels(level: Level, labels: Tensor, sizes: Tensor, nodes: Tensor) -> Tensor:
    """Return the best community of each of some nodes, if no other node moves.

    It is the one with the largest gain in modularity, ``2m w(v, c) - k(v) K(c)``, among those of
    its neighbours and its own; if several are equal its own, then the one with the smallest number.
    A node that is alone only joins another one that is alone if that has the smaller number:
    otherwise two of them could swap places.

    Args:
        level: the graph.
        labels: [N] int64, the community of every node, numbered below N.
        sizes: [N] int64, number of nodes in every community.
        nodes: [M] int64.

    Returns:
        [M] int64.
    """
    total = torch.zeros_like(level.strength).index_add_(0, labels, level.strength)
    if level.native:
        result: Tensor = cpu_library().community_best(
            level.rowptr, level.col, level.weight, level.strength, labels, total, sizes, nodes
        )
        return result
    edges = float(level.strength.sum())
    own, strength = labels[nodes], level.strength[nodes]
    local, entry = entries_of(level.rowptr, nodes, nodes + 1)
    # A key for each pair of node and neighbouring community; it is far below 2**63.
    keys = local * level.num_nodes + labels[level.col[entry].long()]
    keys, weight = _count(keys, None if level.weight is None else level.weight[entry])
    local, label = keys // level.num_nodes, keys % level.num_nodes
    is_own = label == own[local]
    rest = total[label] - torch.where(is_own, strength[local], 0)
    gain = edges * weight.double() - strength[local].double() * rest.double()
    alone = sizes[own] == 1
    forbidden = alone[local] & (sizes[label] == 1) & (label > own[local])
    gain = gain.masked_fill(forbidden, -torch.inf)
    stay = -(strength.double() * (total[own] - strength).double())
    stay = stay.index_put((local[is_own],), gain[is_own])
    best = torch.full_like(stay, -torch.inf).scatter_reduce_(0, local, gain, "amax")
    first = torch.where(gain == best[local], label, level.num_nodes)
    winner = torch.full_like(own, level.num_nodes).scatter_reduce_(0, local, first, "amin")
    return torch.where(best > stay, winner, own)


def merge(level: Level, labels: Tensor, count: int) -> Level:
    """Return the graph with a node for each community, and sums of the edges between them.

    Args:
        level: the graph.
        labels: [N] int64, the community of every node, in [0, count).
        count: number of communities.
    """
    strength = level.strength.new_zeros(count).index_add_(0, labels, level.strength)
    if level.native:
        members = torch.argsort(labels, stable=True)
        first = torch.zeros(count + 1, dtype=torch.int64)
        first[1:] = torch.bincount(labels, minlength=count).cumsum(0)
        rowptr, col, weight = cpu_library().community_merge(
            level.rowptr, level.col, level.weight, labels, first, members
        )
        return Level(rowptr, col, weight, strength)
    row = torch.repeat_interleave(labels, level.rowptr.diff(), output_size=level.col.numel())
    col = labels[level.col.long()]
    keys, weight = _count(row * count + col, level.weight)
    row, col = keys // count, keys % count
    between = row != col
    row, col, weight = row[between], col[between], weight[between]
    rowptr = level.rowptr.new_zeros(count + 1)
    rowptr[1:] = torch.bincount(row, minlength=count).cumsum(0)
    return Level(rowptr, col.to(level.col.dtype), weight, strength)


def _count(keys: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and the sum of the weights of each."""
    if weight is None:
        unique, counts = torch.unique_consecutive(keys.sort().values, return_counts=True)
        return unique, counts
    keys, order = keys.sort()
    unique, counts = torch.unique_consecutive(keys, return_counts=True)
    sums = torch.cat([weight.new_zeros(1), weight[order].cumsum(0)])
    ends = counts.cumsum(0)
    return unique, sums[ends] - sums[ends - counts]
