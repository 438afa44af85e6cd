"""The community ordering: multilevel modularity, nodes sorted by community at every level."""

import torch
from torch import Tensor

from pyg_accel.reordering.modularity import Level, best_labels, merge

__all__ = ["communities", "community_order"]

GROUPS = 4  # a sweep moves nodes in this many groups: few neighbours move at the same time
SWEEPS = 16
SETTLED = 0.002  # a level ends when a sweep moves at most this share of its nodes
LEVELS = 12
_HASH = 0x9E3779B1  # 2**32 over the golden ratio: maps neighbouring numbers far apart


def communities(rowptr: Tensor, col: Tensor) -> list[Tensor]:
    """Return communities of communities, by a parallel version of Louvain's method.

    A quarter of the nodes moves at a time, each by the previous communities of the others, so the
    result does not depend on the number of threads. Then each community becomes a node, and so on,
    while modularity increases.

    Args:
        rowptr: [N + 1], on the CPU.
        col: [E], undirected and without self-loops.

    Returns:
        For every level, the community of each node of the level below (first of the graph),
        numbered from 0.
    """
    level = Level.of(rowptr, col)
    levels: list[Tensor] = []
    while len(levels) < LEVELS and level.col.numel():
        names, labels = torch.unique(_local_moves(level), return_inverse=True)
        above = merge(level, labels, names.numel())
        if above.modularity <= level.modularity:
            break
        levels.append(labels)
        level = above
    return levels


def community_order(rowptr: Tensor, col: Tensor) -> Tensor:
    """Sort nodes by community, the largest first, and by falling degree within the smallest ones.

    So the hubs of a community share windows of rows, and the most frequent columns are close.

    Args:
        rowptr: [N + 1].
        col: [E], undirected and without self-loops.

    Returns:
        [N] int64: the node at every position.
    """
    device, rowptr, col = col.device, rowptr.cpu(), col.cpu()
    degree = rowptr.long().diff()
    levels = communities(rowptr, col)
    strengths = [degree]
    for labels in levels:
        above = degree.new_zeros(int(labels.max()) + 1)
        strengths.append(above.index_add_(0, labels, strengths[-1]))
    order = torch.argsort(strengths[-1], descending=True, stable=True)
    for labels, strength in zip(reversed(levels), reversed(strengths[:-1]), strict=True):
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel())
        by_strength = torch.argsort(strength, descending=True, stable=True)
        order = by_strength[torch.argsort(position[labels[by_strength]], stable=True)]
    return order.to(device)


def _local_moves(level: Level) -> Tensor:
    """Move nodes between communities until few of them move; at first each node is a community."""
    count = level.num_nodes
    labels = torch.arange(count)
    sizes = torch.ones_like(labels)
    group_of = (labels * _HASH >> 7) % GROUPS
    groups = [(group_of == group).nonzero().flatten() for group in range(GROUPS)]
    for _ in range(SWEEPS):
        moved = 0
        for nodes in groups:
            new = best_labels(level, labels, sizes, nodes)
            moved += int((new != labels[nodes]).sum())
            labels[nodes] = new
            sizes = torch.bincount(labels, minlength=count)
        if moved <= SETTLED * count:
            break
    return labels
