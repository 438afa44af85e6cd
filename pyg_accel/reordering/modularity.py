"""Communities by modularity: the two passes over the edges that Louvain's method is made of.

Each exists once in C++ for the CPU and once in plain torch for everything else. Both count in
integers and compare floats that come from the same single operations, so they agree to the bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.native import cpu_library, cpu_unavailable_reasons

__all__ = ["Level", "best_labels", "merge"]


@dataclass(frozen=True)
class Level:
    """An undirected graph without self-loops, whose nodes may stand for many.

    Attributes:
        rowptr: [N + 1] int64.
        col: [E] int32 or int64; every edge is there in both directions.
        weight: [E] int64, how many edges an entry stands for; None where each is one.
        strength: [N] int64, edges of each node, those inside of it included.
    """

    rowptr: Tensor
    col: Tensor
    weight: Tensor | None
    strength: Tensor

    @classmethod
    def of(cls, rowptr: Tensor, col: Tensor) -> "Level":
        """Return the level of a graph, where every node stands for itself."""
        rowptr = rowptr.long()
        return cls(rowptr, col, None, rowptr.diff())

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.strength.numel()

    @property
    def modularity(self) -> float:
        """Share of the edges inside of nodes, less what it would be by chance."""
        total = float(self.strength.sum())
        between = self.col.numel() if self.weight is None else int(self.weight.sum())
        chance = (self.strength.double() / total).square().sum()
        return 1 - between / total - float(chance)

    @property
    def native(self) -> bool:
        """Whether the passes run in C++."""
        return self.col.device.type == "cpu" and not cpu_unavailable_reasons()


def best_labels(level: Level, labels: Tensor, sizes: Tensor, nodes: Tensor) -> Tensor:
    """Return the community that each of some nodes should be in, all others staying where they are.

    It is the one of largest gain in modularity, ``2m w(v, c) - k(v) K(c)``, among those of the
    neighbours and its own; of equal ones the own, then the one of smallest number. A node that is
    alone moves to another that is alone only if that has the smaller number: of two that want to
    join each other at once, one stays.

    Args:
        level: the graph.
        labels: [N] int64, the community of every node, numbered below N.
        sizes: [N] int64, nodes in every community.
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
    local, entry = _entries(level.rowptr, nodes)
    # One key a pair of node and neighbouring community; local ids keep it far below 2**63.
    keys = local * level.num_nodes + labels[level.col[entry].long()]
    keys, weight = _count(keys, None if level.weight is None else level.weight[entry])
    local, label = keys // level.num_nodes, keys % level.num_nodes
    mine = label == own[local]
    rest = total[label] - torch.where(mine, strength[local], 0)
    gain = edges * weight.double() - strength[local].double() * rest.double()
    alone = sizes[own] == 1
    barred = alone[local] & (sizes[label] == 1) & (label > own[local])
    gain = gain.masked_fill(barred, -torch.inf)
    stay = -(strength.double() * (total[own] - strength).double())
    stay = stay.index_put((local[mine],), gain[mine])
    best = torch.full_like(stay, -torch.inf).scatter_reduce_(0, local, gain, "amax")
    first = torch.where(gain == best[local], label, level.num_nodes)
    winner = torch.full_like(own, level.num_nodes).scatter_reduce_(0, local, first, "amin")
    return torch.where(best > stay, winner, own)


def merge(level: Level, labels: Tensor, count: int) -> Level:
    """Return the graph of communities: one node each, the edges between them added up.

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


def _entries(rowptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place in ``nodes`` and in ``col`` of all entries of some rows."""
    degree = rowptr[nodes + 1] - rowptr[nodes]
    places = torch.arange(nodes.numel(), device=nodes.device)
    local = torch.repeat_interleave(places, degree)
    shift = rowptr[nodes] - (degree.cumsum(0) - degree)
    return local, torch.arange(local.numel(), device=nodes.device) + shift[local]


def _count(keys: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return every different key once, ascending, and the weights of each added up."""
    if weight is None:
        unique, counts = torch.unique_consecutive(keys.sort().values, return_counts=True)
        return unique, counts
    keys, order = keys.sort()
    unique, counts = torch.unique_consecutive(keys, return_counts=True)
    sums = torch.cat([weight.new_zeros(1), weight[order].cumsum(0)])
    ends = counts.cumsum(0)
    return unique, sums[ends] - sums[ends - counts]
