"""Nearest neighbours among points: ``knn``, ``radius`` and ``nearest``."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pyg_accel.pyg_lib import kernels
from pyg_accel.pyg_lib.ops import blocks
from pyg_accel.runtime.checks import require
from pyg_accel.runtime.native import library_of

__all__ = ["knn", "nearest", "pointers", "radius", "real"]

_TREE_DIMS = 16  # above, a tree reads most points of each query


def knn(
    x: Tensor, y: Tensor, k: int = 1, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None,
    cosine: bool = False, num_workers: int = 1,
) -> Tensor:  # fmt: skip
    """Find the ``k`` nearest points of ``x`` for every point of ``y``, in its example.

    Points are sorted by distance, ties by index. Points with NaN coordinates, or at an infinite
    distance, are not neighbours. An example with fewer than ``k`` points returns all.

    Args:
        x: [N, D], or [N].
        y: [M, D] of the same dtype; integers are compared as float64, halves as float32.
        k: number of neighbours.
        ptr_x: [B + 1] int64, where the points of each example begin; by default there is one.
        ptr_y: [B + 1] int64, where its queries begin.
        cosine: compare directions; also on the CPU, where pyg-lib cannot.
        num_workers: not used; torch sets the number of threads.

    Returns:
        [2, E] int64: ids of queries, ascending, and of their neighbours.

    Raises:
        ValueError: for shapes, dtypes or pointers that do not fit, or ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"expected 'k' to be at least 1 (got {k})")
    x, y, ptr_x, ptr_y = _checked(x, y, ptr_x, ptr_y)
    if cosine:
        x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    return _search(x, y, ptr_x, ptr_y, k, math.inf, False)


def radius(
    x: Tensor, y: Tensor, r: float = 1.0, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None,
    max_num_neighbors: int = 32, num_workers: int = 1, ignore_same_index: bool = False,
) -> Tensor:  # fmt: skip
    """Find the points of ``x`` that are nearer than ``r`` to each point of ``y``, in its example.

    Points come by distance, equal distances by index. Of more than ``max_num_neighbors`` the
    nearest are taken, where pyg-lib takes any.

    Args:
        x: [N, D], or [N].
        y: [M, D] of the same dtype; integers are compared as float64, halves as float32.
        r: the distance.
        ptr_x: [B + 1] int64, where the points of each example begin; by default there is one.
        ptr_y: [B + 1] int64, where its queries begin.
        max_num_neighbors: most points of a query.
        num_workers: not used; torch sets the number of threads.
        ignore_same_index: leave out the point of the number of the query.

    Returns:
        [2, E] int64: ids of queries, ascending, and of their neighbours.

    Raises:
        ValueError: for shapes, dtypes or pointers that do not fit, a NaN as ``r``, or
            ``max_num_neighbors`` below 0.
    """
    if math.isnan(r):
        raise ValueError(f"expected 'r' to be a number (got {r})")
    if max_num_neighbors < 0:
        raise ValueError(f"expected 'max_num_neighbors' of at least 0 (got {max_num_neighbors})")
    x, y, ptr_x, ptr_y = _checked(x, y, ptr_x, ptr_y)
    most = min(max_num_neighbors, x.size(0))
    if most == 0 or r <= 0:
        return torch.empty(2, 0, dtype=torch.int64, device=x.device)
    return _search(x, y, ptr_x, ptr_y, most, float(r), ignore_same_index)


def nearest(
    x: Tensor, y: Tensor, ptr_x: Tensor | None = None, ptr_y: Tensor | None = None
) -> Tensor:
    """Find the nearest point of ``y`` for every point of ``x``, in its example; ties by index.

    Args:
        x: [N, D], or [N].
        y: [M, D] of the same dtype.
        ptr_x: [B + 1] int64, where the points of each example begin; by default there is one.
        ptr_y: [B + 1] int64.

    Returns:
        [N] int64, ids of points of ``y``.

    Raises:
        ValueError: for shapes, dtypes or pointers that do not fit, or a point without any in ``y``
            at a finite distance.
    """
    neighbours = knn(y, x, 1, ptr_y, ptr_x)[1]
    if neighbours.numel() != x.size(0):
        raise ValueError("expected 'y' to have a point at a finite distance from each of 'x'")
    return neighbours


def _checked(
    x: Tensor, y: Tensor, ptr_x: Tensor | None, ptr_y: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return arguments for kernels: matrices of float32 or float64, and pointers."""
    x, y = (t.detach().unsqueeze(-1) if t.dim() == 1 else t.detach() for t in (x, y))
    if x.dim() != 2 or y.dim() != 2 or x.size(1) != y.size(1):
        raise ValueError(f"expected 'x' [N, D] and 'y' [M, D] (got {list(x.shape)} and "
                         f"{list(y.shape)})")  # fmt: skip
    if x.dtype != y.dtype or x.device != y.device:
        raise ValueError(f"expected 'y' of the dtype and device of 'x' (got {y.dtype} on "
                         f"{y.device} and {x.dtype} on {x.device})")  # fmt: skip
    x, y = real("x", x), real("y", y)
    ptr_x, ptr_y = pointers("ptr_x", ptr_x, x), pointers("ptr_y", ptr_y, y)
    more = ptr_x.numel() - ptr_y.numel()  # examples that the others lack are empty
    if more:
        few = ptr_y if more > 0 else ptr_x
        filled = torch.cat([few, few[-1:].expand(abs(more))])
        ptr_x, ptr_y = (ptr_x, filled) if more > 0 else (filled, ptr_y)
    return x.contiguous(), y.contiguous(), ptr_x, ptr_y


def real(name: str, points: Tensor) -> Tensor:
    """Return points as float32 or float64.

    Raises:
        ValueError: for complex numbers.
    """
    if points.is_complex():
        raise ValueError(f"expected '{name}' to hold real numbers (got {points.dtype})")
    if points.dtype in (torch.float32, torch.float64):
        return points
    return points.to(torch.float32 if points.is_floating_point() else torch.float64)


def pointers(name: str, ptr: Tensor | None, points: Tensor) -> Tensor:
    """Return where the rows of each example begin, int64; by default there is one.

    Raises:
        ValueError: on the CPU, for pointers that do not ascend from 0 to the number of rows.
    """
    if ptr is None:
        return torch.tensor([0, points.size(0)], device=points.device)
    if ptr.dim() != 1 or ptr.is_floating_point() or ptr.numel() == 0:
        raise ValueError(f"expected '{name}' to be a vector of integers")
    ptr = ptr.to(points.device, torch.int64).contiguous()
    if not ptr.is_cuda:  # kernels of a GPU clamp them
        good = (ptr[0] == 0) & (ptr[-1] == points.size(0)) & (ptr.diff() >= 0).all()
        require(good, f"expected '{name}' to ascend from 0 to {points.size(0)}, as batches that "
                "are sorted do")  # fmt: skip
    return ptr


def kernel_of(x: Tensor, most: int) -> str:
    """Return the implementation of a search: ``cpu``, ``cuda``, or ``torch`` (blocks)."""
    if x.is_cuda:
        narrow = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return "cuda" if narrow and kernels.fits(x, most) else "torch"
    few = x.dim() == 1 or x.size(1) <= _TREE_DIMS
    return "cpu" if few and library_of(x.device) is not None else "torch"


def _search(
    x: Tensor, y: Tensor, ptr_x: Tensor, ptr_y: Tensor, most: int, limit: float, skip_same: bool
) -> Tensor:
    kernel = kernel_of(x, most)
    if kernel == "cpu" and bool(x.isfinite().all()):  # a tree cannot sort others
        within = _below_square(limit, x.dtype)
        tree = library_of(x.device).nearest_points
        pairs: Tensor = tree(x, y, ptr_x, ptr_y, most, within, skip_same)[0]
        return pairs
    search = kernels.nearest_points if kernel == "cuda" else blocks.nearest_points
    return search(x, y, ptr_x, ptr_y, most, limit, skip_same)


def _below_square(limit: float, dtype: torch.dtype) -> float:
    """Return the largest square of a distance below a limit; of distances that are finite."""
    square = torch.tensor(kernels.square(limit, dtype), dtype=dtype)
    return float(torch.nextafter(square, torch.zeros_like(square)))
