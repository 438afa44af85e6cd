"""Neighbours in periodic cells: crystals, and liquids in a box."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_accel.pyg_lib.ops.points import radius, real

__all__ = ["radius_graph"]


def radius_graph(
    x: Tensor, r: float, batch: Tensor | None = None, loop: bool = False,
    max_num_neighbors: int = 32, flow: str = "source_to_target", *, cell: Tensor,
    pbc: bool | Sequence[bool] = True, batch_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Connect points that are nearer than ``r``, also through the sides of a cell.

    ``x[source] + offset.to(x.dtype) @ cell - x[target]`` is the vector of an edge. A point may be a
    neighbour several times, and of itself, by different images.

    Args:
        x: [N, 3], inside of the cell or not.
        r: the distance.
        batch: [N], the example of every point, ascending.
        loop: also connect every point with itself, in the same image.
        max_num_neighbors: most neighbours of a point, the nearest ones.
        flow: ``"source_to_target"``, or ``"target_to_source"`` for the other order of rows.
        cell: [3, 3], or [B, 3, 3] for every example; rows are the vectors.
        pbc: which of them points repeat along.
        batch_size: the number of examples.

    Returns:
        [2, E] int64, by target and then distance, and the offset of each source, [E, 3] int64.

    Raises:
        ValueError: for shapes, examples or a distance that do not fit, or a cell without volume.
    """
    if x.dim() != 2 or x.size(1) != 3:
        raise ValueError(f"expected 'x' [N, 3] (got {list(x.shape)})")
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(f"unknown flow '{flow}'")
    if not 0 <= r < math.inf:
        raise ValueError(f"expected 'r' to be finite and not negative (got {r})")
    if max_num_neighbors < 0:
        raise ValueError(f"expected 'max_num_neighbors' of at least 0 (got {max_num_neighbors})")
    if batch is None:
        batch = torch.zeros(x.size(0), dtype=torch.int64, device=x.device)
    if batch.shape != x.shape[:1] or batch.is_floating_point():
        raise ValueError(f"expected 'batch' to be {x.size(0)} integers (got {batch.dtype} "
                         f"{list(batch.shape)})")  # fmt: skip
    if bool((batch.diff() < 0).any()):
        raise ValueError("expected 'batch' to ascend")
    low, high = (int(batch[0]), int(batch[-1])) if batch.numel() else (0, -1)
    batch_size = high + 1 if batch_size is None else batch_size
    if low < 0 or high >= batch_size:
        raise ValueError(f"expected 'batch' from 0 to {batch_size - 1} (got {low} to {high})")
    if cell.shape not in ((3, 3), (batch_size, 3, 3)):
        raise ValueError(f"expected 'cell' [3, 3] or [{batch_size}, 3, 3] (got {list(cell.shape)})")
    repeats = torch.tensor([pbc] * 3 if isinstance(pbc, bool) else list(pbc), device=x.device)
    if repeats.shape != (3,):
        raise ValueError(f"expected 'pbc' to be a bool, or three (got {pbc!r})")
    points = real("x", x.detach())
    cells = cell.detach().to(points).expand(batch_size, 3, 3)
    if batch_size == 0 or not bool((cells.det().abs() > 0).all()):
        if batch_size:
            raise ValueError("expected 'cell' to have a volume")
        none = torch.empty(2, 0, dtype=torch.int64, device=x.device)
        return none, none.new_empty(0, 3)
    inverse = cells.inverse()
    # How far the distance reaches along each vector: the sides are 1 / |column| apart.
    reach = r * inverse.norm(dim=1)
    fraction = torch.einsum("ni,nij->nj", points, inverse[batch])
    home = (fraction.floor() * repeats).long()  # the image of the cell that a point is in
    inside = points - torch.einsum("ni,nij->nj", home.to(points.dtype), cells[batch])
    fraction = fraction - home
    most = [int(n) for n in (reach.ceil() * repeats).amax(0).tolist()]
    shifts = torch.cartesian_prod(*[torch.arange(-n, n + 1, device=x.device) for n in most])
    moved = fraction.unsqueeze(1) + shifts
    margin = reach[batch].unsqueeze(1) * (1 + 1e-5)
    near = ((moved >= -margin) & (moved <= 1 + margin) | ~repeats).all(-1)
    point, image = near.nonzero().unbind(1)  # by point, and so by example
    step = torch.einsum("ni,nij->nj", shifts[image].to(points.dtype), cells[batch[point]])
    ends = torch.arange(batch_size + 1, device=x.device)
    target, candidate = radius(
        inside[point] + step, inside, r, torch.searchsorted(batch[point].contiguous(), ends),
        torch.searchsorted(batch.contiguous(), ends), max_num_neighbors + (not loop),
    )  # fmt: skip
    source, shift = point[candidate], shifts[image[candidate]]
    if not loop:
        other = (source != target) | (shift != 0).any(1)
        source, target, shift = source[other], target[other], shift[other]
        first = torch.searchsorted(target.contiguous(), target.contiguous())
        rank = torch.arange(target.numel(), device=x.device) - first
        few = rank < max_num_neighbors  # without itself, if that was not among the nearest
        source, target, shift = source[few], target[few], shift[few]
    offset = shift - home[source] + home[target]
    rows = (source, target) if flow == "source_to_target" else (target, source)
    return torch.stack(rows), offset
