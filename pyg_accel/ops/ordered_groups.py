"""What needs the rows of groups in order: quantiles.

The order is computed without gradients, in blocks of groups of like size; it picks rows, and that
alone is differentiated. Nothing as large as the rows is kept for the backward pass.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_accel.graph import Graph

__all__ = ["taken_at"]

_NUMBERS = 2**20  # of a block that is sorted at a time


def taken_at(graph: Graph, x: Tensor, places: Tensor) -> Tensor:
    """Return the numbers that are at certain places of each group in ascending order.

    Equal numbers stay in the order of the rows, and NaN comes last.

    Args:
        graph: from rows to their groups, see :func:`~pyg_accel.ops.groups.groups_of`.
        x: [N, F].
        places: [P, G, Q], within each group; what they say of groups without rows does not matter.

    Returns:
        [P, G, Q, F].
    """
    count, num_groups, each = places.shape
    width = x.size(1)
    with torch.no_grad():
        rows = x.new_zeros((num_groups, count * each, width), dtype=torch.long)
        wanted = places.transpose(0, 1).reshape(num_groups, count * each)
        for groups, members, valid in _blocks(graph, width):
            numbers = x.index_select(0, members.view(-1)).view(*members.shape, width)
            numbers = numbers.masked_fill(~valid.unsqueeze(2), torch.nan)
            order = numbers.transpose(1, 2).contiguous().sort(dim=2, stable=True).indices
            at = wanted[groups].clamp(0, members.size(1) - 1)
            picked = order.gather(2, at.unsqueeze(1).expand(-1, width, -1))
            found = members.gather(1, picked.flatten(1)).view_as(picked)
            rows[groups] = found.transpose(1, 2)
    taken = x.gather(0, rows.view(-1, width)).view(num_groups, count, each, width)
    return taken.transpose(0, 1)


def _blocks(graph: Graph, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Groups in blocks of like size: their ids [B], their rows [B, M], and which are theirs."""
    degree, order = graph.degree.sort()
    most = int(degree[-1]) if degree.numel() else 0
    sizes = [2**n for n in range(most.bit_length())]
    bounds = torch.searchsorted(degree, torch.tensor(sizes, dtype=degree.dtype)).tolist()
    for start, end, size in zip(bounds, [*bounds[1:], degree.numel()], sizes, strict=True):
        step = max(_NUMBERS // (size * width), 1)
        for first in range(start, end, step):
            last = min(first + step, end)
            within = torch.arange(int(degree[last - 1]))
            groups = order[first:last]
            valid = within < degree[first:last].unsqueeze(1)
            entries = graph.rowptr[groups].long().unsqueeze(1) + within
            yield groups, graph.col[entries.clamp(max=graph.num_edges - 1)].long(), valid
