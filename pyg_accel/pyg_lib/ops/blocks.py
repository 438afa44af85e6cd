"""The nearest points by torch's operators, block by block: the reference of the kernels.

It is what runs where there is no kernel: in many dimensions on the CPU, and for float64 or very
many neighbours on a GPU. The distances of a block are the largest array.
"""

import torch
from torch import Tensor

from pyg_accel.pyg_lib.kernels import square

__all__ = ["nearest_points"]

_BLOCK = 2**20  # distances at once
_DIRECT = "donot_use_mm_for_euclid_dist"  # products of rows would cancel


def nearest_points(
    x: Tensor, y: Tensor, ptr_x: Tensor, ptr_y: Tensor, most: int, radius: float, skip_same: bool
) -> Tensor:
    """Find the nearest points of every query, of the same example, by distance and index.

    Args:
        x: [N, D] points, float32 or float64.
        y: [M, D] queries.
        ptr_x: [B + 1] int64, where the points of each example begin.
        ptr_y: [B + 1] int64, where its queries begin.
        most: most points of a query.
        radius: points must be nearer than this; infinite for no limit.
        skip_same: leave out the point of the number of the query.

    Returns:
        [2, E] int64, queries and their points, by query.
    """
    begins_x, begins_y = ptr_x.tolist(), ptr_y.tolist()
    within = square(radius, x.dtype)
    blocks = [torch.empty(2, 0, dtype=torch.int64, device=x.device)]
    for b in range(len(begins_x) - 1):
        points = x[begins_x[b] : begins_x[b + 1]]
        step = max(_BLOCK // max(points.size(0), 1), 1)
        for begin in range(begins_y[b], begins_y[b + 1] if points.size(0) else 0, step):
            queries = y[begin : min(begin + step, begins_y[b + 1])]
            distance = _squares(queries, points)
            rows = torch.arange(begin, begin + queries.size(0), device=x.device)
            if skip_same:
                ids = torch.arange(begins_x[b], begins_x[b + 1], device=x.device)
                distance.masked_fill_(rows.view(-1, 1) == ids, torch.inf)
            near, order = _smallest(distance, min(most, points.size(0)))
            valid = near < within
            blocks.append(torch.stack([rows.view(-1, 1).expand_as(order)[valid],
                                      order[valid] + begins_x[b]]))  # fmt: skip
    return torch.cat(blocks, 1)


def _squares(queries: Tensor, points: Tensor) -> Tensor:
    """Return squared distances, added up one dimension after another as kernels do."""
    if points.size(1) > 16:  # one pass over the block, where rounding may make others equal
        return torch.cdist(queries, points, compute_mode=_DIRECT).square_()
    total = queries.new_zeros(queries.size(0), points.size(0))
    for d in range(points.size(1)):
        total += (queries[:, d, None] - points[:, d]).square_()
    return total


def _smallest(distance: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest entries of each row and their positions, equal ones by position."""
    if distance.dtype != torch.float32:
        near, order = distance.nan_to_num(nan=torch.inf, posinf=torch.inf).sort(stable=True)
        return near[:, :k], order[:, :k]
    # A float32 that is not negative has the order of its bits: with the position it is one key.
    place = torch.arange(distance.size(1), device=distance.device)
    bits = distance.nan_to_num(nan=torch.inf, posinf=torch.inf).view(torch.int32).long()
    key = (bits << 32 | place).topk(k, largest=False, sorted=True).values
    return (key >> 32).int().view(torch.float32), key & (2**32 - 1)
