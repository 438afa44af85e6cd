"""The community ordering: multilevel modularity, nodes sorted by community at every level."""

import torch
from torch import Tensor

from pyg_accel.reordering.modularity import Level, best_labels, merge

__all__ = ["communities", "community_order"]

GROUPS = 4  # a sweep moves the nodes in this many turns: neighbours rarely move at once
SWEEPS = 16
SETTLED = 0.002  # a level ends when a sweep moves no more than this share of its nodes
LEVELS = 12
_HASH = 0x9E3779B1  # 2**32 over the golden ratio: neighbouring numbers land far apart


def communities(rowptr: Tensor, col: Tensor) -> list[Tensor]:
    """Find communities of communities, by Louvain's method with moves made in turns.

    Nodes move in turns, a quarter at a time, each seeing where the others were before the turn:
    that is parallel and gives the same result for any number of threads. Then each community
    becomes a node, and again, until that gains nothing.

    Args:
        rowptr: [N + 1].
        col: [E], undirected and without self-loops.

    Returns:
        For every level, the community of the nodes of the one below (the first level's nodes are
        those of the graph), numbered from 0.
    """
    level = Level.of(rowptr, col)
    found: list[Tensor] = []
    while len(found) < LEVELS and level.col.numel():
        names, labels = torch.unique(_settle(level), return_inverse=True)
        above = merge(level, labels, names.numel())
        if above.modularity <= level.modularity:
            break
        found.append(labels)
        level = above
    return found


def community_order(rowptr: Tensor, col: Tensor) -> Tensor:
    """Return nodes by community, the largest first, and by falling degree within the smallest ones.

    Hubs of a community so share windows of rows, and the columns that most rows have are close.

    Args:
        rowptr: [N + 1].
        col: [E], undirected and without self-loops.

    Returns:
        [N] int64: the node at every place.
    """
    degree = rowptr.long().diff()
    levels = communities(rowptr, col)
    strengths = [degree]
    for labels in levels:
        above = degree.new_zeros(int(labels.max()) + 1)
        strengths.append(above.index_add_(0, labels, strengths[-1]))
    order = torch.argsort(strengths[-1], descending=True, stable=True)
    for labels, strength in zip(reversed(levels), reversed(strengths[:-1]), strict=True):
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        by_strength = torch.argsort(strength, descending=True, stable=True)
        order = by_strength[torch.argsort(place[labels[by_strength]], stable=True)]
    return order


def _settle(level: Level) -> Tensor:
    """Move nodes between communities until few gain by it; at first each is one of its own."""
    count = level.num_nodes
    labels = torch.arange(count, device=level.col.device)
    sizes = torch.ones_like(labels)
    group_of = (labels * _HASH >> 7) % GROUPS
    turns = [(group_of == group).nonzero().flatten() for group in range(GROUPS)]
    for _ in range(SWEEPS):
        moved = torch.zeros((), dtype=torch.int64, device=labels.device)
        for nodes in turns:
            new = best_labels(level, labels, sizes, nodes)
            moved += (new != labels[nodes]).sum()
            labels[nodes] = new
            sizes = torch.bincount(labels, minlength=count)
        if int(moved) <= SETTLED * count:
            break
    return labels
