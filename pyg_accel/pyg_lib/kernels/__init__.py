"""Launches the kernels over points: chooses kernels, tiles and cells."""

import math
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph.csr import csr_of_edges
from pyg_accel.runtime.native import library_of

__all__ = ["farthest_points", "fits", "nearest_points", "samples", "square"]

_MOST, _MOST_DIMS = 256, 1024  # of the kernel: neighbours of a query, and dimensions
_IN_CELLS = 2048  # points of an example, from which on cells pay
_PER_CELL = 8
_ONE_TILE = 8192  # points of an example that a program holds
_LARGEST = 2**31 - 2**16  # elements: kernels count in 32 bits


def fits(x: Tensor, most: int) -> bool:
    """Return whether the kernel can search these points for so many neighbours."""
    small = most <= _MOST and x.size(-1) <= _MOST_DIMS and x.numel() < _LARGEST
    return small and library_of(x.device) is not None


def samples(src: Tensor) -> bool:
    """Return whether there is a kernel that samples these points."""
    return find_spec("triton") is not None and src.numel() < _LARGEST


def square(radius: float, dtype: torch.dtype) -> float:
    """Return an exclusive bound of squared distances, above 0."""
    info = torch.finfo(dtype)
    return float(torch.tensor(radius, dtype=dtype).square()) or info.tiny * info.eps


def nearest_points(
    x: Tensor, y: Tensor, ptr_x: Tensor, ptr_y: Tensor, most: int, radius: float, skip_same: bool
) -> Tensor:
    """Find the nearest points of every query: :func:`pyg_accel.pyg_lib.ops.blocks.nearest_points`.

    In up to three dimensions and large examples, points are sorted into the cells of a grid, and
    each query reads neighbouring cells; otherwise it reads all points of its example.
    """
    if 0 in (x.size(0), y.size(0)):
        return torch.empty(2, 0, dtype=torch.int64, device=x.device)
    x, y = x.float(), y.float()
    limit = square(radius, torch.float32)
    cells: tuple[object, ...] = ()
    if x.size(1) <= 3 and x.size(0) >= _IN_CELLS * (ptr_x.numel() - 1):
        grid = _Grid.of(_in_space(x), ptr_x, math.sqrt(limit))
        if grid is not None:
            same = (x.data_ptr(), x.shape) == (y.data_ptr(), y.shape)
            x, y = _in_space(x), _in_space(y)
            ptr, points = grid.sort(x, ptr_x)
            queries = points if same else grid.sort(y, ptr_y)[1]
            x = x[points]
            cells = ptr, points, queries, torch.tensor([*grid.numbers, *grid.sizes])
    out: Tensor = library_of(x.device).nearest_points(
        x.t().contiguous(), y.contiguous(), ptr_x, ptr_y, most, limit, skip_same, *cells
    )
    return out


class _Grid(NamedTuple):
    """Cells of one size, the same for every example.

    Attributes:
        origin: [3], the smallest coordinates.
        sizes: numbers of cells along x, y and z.
        numbers: the smallest coordinates, the size of a cell, and by how much rounding may move a
            point out of its cell.
    """

    origin: Tensor
    sizes: list[int]
    numbers: list[float]

    @classmethod
    def of(cls, x: Tensor, ptr: Tensor, radius: float) -> "_Grid | None":
        """Choose cells; None for points that are all at one place, or not finite."""
        origin, examples = x.amin(0), ptr.numel() - 1
        low, high = torch.stack([origin, x.amax(0)]).tolist()
        extent = [b - a for a, b in zip(low, high, strict=True)]
        if not all(map(math.isfinite, extent)) or max(extent) == 0:
            return None
        most = max(x.size(0) // _PER_CELL, 1)

        def count(size: float) -> float:
            cells: float = math.prod(math.floor(e / size) + 1.0 for e in extent)
            return examples * cells

        size = max(extent) / 1024
        step = 2.0
        while count(size) > most:
            size *= step
        for _ in range(8):  # the smallest cells within the limit
            step = math.sqrt(step)
            size = size / step if count(size / step) <= most else size
        if math.isfinite(radius):
            size = max(size, radius) if count(radius) <= 4 * x.size(0) else size
        slack = 2.0**-20 * (max(map(abs, low + high)) + size)
        return cls(origin, [math.floor(e / size) + 1 for e in extent], [*low, size, slack])

    def sort(self, points: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the points of each cell begin, and the points in the order of cells."""
        place = ((points - self.origin) / self.numbers[3]).nan_to_num_()
        cell = torch.arange(points.size(0), device=points.device)
        cell = (torch.searchsorted(ptr, cell, right=True) - 1).clamp_(0, ptr.numel() - 2)
        for d in (2, 1, 0):
            cell.mul_(self.sizes[d]).add_(place[:, d].clamp(0, self.sizes[d] - 1).long())
        cells = math.prod(self.sizes) * (ptr.numel() - 1)
        starts, _, order = csr_of_edges(torch.stack([cell, torch.zeros_like(cell)]), 0, cells, 1)
        return starts, order


def _in_space(points: Tensor) -> Tensor:
    """Return points of up to three dimensions in three."""
    return torch.nn.functional.pad(points, (0, 3 - points.size(1)))


def farthest_points(src: Tensor, ptr: Tensor, ptr_out: Tensor, first: Tensor) -> Tensor:
    """Sample points of every example, each the farthest from the sampled ones.

    Args:
        src: [N, D] float32.
        ptr: [B + 1], where examples begin.
        ptr_out: [B + 1], where their samples begin.
        first: [B], the place of the first sample in its example.
    """
    from pyg_accel.pyg_lib.kernels import points

    largest, total = torch.stack([ptr.diff().max(), ptr_out[-1]]).tolist()
    out = torch.empty(total, dtype=torch.int64, device=src.device)
    registers = src.size(1) if largest <= _ONE_TILE and src.size(1) <= 3 else 0
    width = max(1 << max(largest - 1, 0).bit_length(), 128) if registers else 4096
    distance = torch.full((0 if registers else src.size(0),), torch.inf, device=src.device)
    if total:
        points.sample_farthest[(first.numel(),)](
            src, ptr, ptr_out, first, distance, out, src.size(1), POINTS=width, REGISTERS=registers,
            num_warps=min(max(width // 256, 1), 16),
        )  # fmt: skip
    return out
