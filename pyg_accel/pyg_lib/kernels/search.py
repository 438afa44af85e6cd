"""Launches the kernels over points: which kernel, in which tiles, and what they read."""

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["farthest_points", "fits", "nearest_points"]

_MOST = 256  # neighbours of a query that a program holds
_IN_CELLS = 2048  # points of an example, from which on cells pay
_PER_CELL = 8
_SORTED = 64  # neighbours that a program sorts
_QUERIES = 32  # of a program: one a thread
_ONE_TILE = 8192  # points of an example that a program holds
_LARGEST = 2**31 - 2**16  # elements: kernels count in 32 bits


def fits(like: Tensor, most: int) -> bool:
    """Return whether there is a kernel for points of this shape, and so many neighbours."""
    return find_spec("triton") is not None and most <= _MOST and like.numel() < _LARGEST


class _Blocks(NamedTuple):
    """Which queries a program takes: of rows (or examples), at most a block."""

    ptr: Tensor  # [rows + 1], the first block of each row
    row: Tensor  # [number], the row of each; one too many for those without queries
    number: int


def _blocks(ptr: Tensor, queries: int) -> _Blocks:
    most = queries // _QUERIES + min(ptr.numel() - 1, queries)
    begins = torch.zeros_like(ptr)
    torch.cumsum((ptr.diff() + (_QUERIES - 1)) // _QUERIES, 0, out=begins[1:])
    row = torch.searchsorted(begins, torch.arange(most, device=ptr.device), right=True) - 1
    return _Blocks(begins.int(), row.int(), most)


def nearest_points(
    x: Tensor, y: Tensor, ptr_x: Tensor, ptr_y: Tensor, most: int, radius: float, skip_same: bool
) -> Tensor:
    """Find the nearest points of every query: :func:`pyg_accel.pyg_lib.ops.blocks.nearest_points`.

    In up to three dimensions and large examples, points are sorted into the cells of a grid, of
    which each query reads those around; else each reads all points of its example.
    """
    from pyg_accel.pyg_lib.kernels import points

    if 0 in (x.size(0), y.size(0)):
        return torch.empty(2, 0, dtype=torch.int64, device=x.device)
    x, y = x.float(), y.float()
    out = torch.empty(y.size(0), most, dtype=torch.int64, device=x.device)
    square = torch.tensor(radius, dtype=torch.float32).square()
    limit = float(square), int(square.view(torch.int32))  # keys begin with the bits
    slots = max(16, 1 << (most - 1).bit_length())
    tile: dict[str, Any] = {
        "QUERIES": _QUERIES, "POINTS": 32 if slots <= 32 else 16, "SLOTS": slots,
        "SORTS": slots <= _SORTED, "num_warps": max(slots // 64, 1),
    }  # fmt: skip
    grid = None
    if x.size(1) <= 3 and x.size(0) >= _IN_CELLS * (ptr_x.numel() - 1):
        grid = _Grid.of(x, ptr_x, radius)
    if grid is None:
        blocks = _blocks(ptr_y, y.size(0))
        points.scan_examples[(blocks.number,)](
            x, y, ptr_x.int(), ptr_y.int(), blocks.ptr, blocks.row, out, ptr_y.numel() - 1,
            x.size(1), most, *limit, skip_same, **tile,
        )  # fmt: skip
    else:
        cells, x, x_ids = grid.sort(x, ptr_x)
        asked, y, y_ids = grid.sort(y, ptr_y)
        nx, ny, nz = grid.sizes
        rows = (ptr_x.numel() - 1) * ny * nz
        cell_ptr = torch.searchsorted(cells, torch.arange(rows * nx + 1, device=x.device))
        row_ptr = torch.searchsorted(asked, torch.arange(rows + 1, device=x.device) * nx)
        blocks = _blocks(row_ptr, y.size(0))
        points.scan_cells[(blocks.number,)](
            x, x_ids.int(), y, y_ids.int(), cell_ptr.int(), grid.origin, row_ptr.int(), blocks.ptr,
            blocks.row, out, rows, nx, ny, nz, grid.size, grid.slack, most, *limit, skip_same,
            **tile,
        )  # fmt: skip
    if slots > _SORTED:
        out = out.sort(1).values
    query, place = (out < limit[1] << 32).nonzero().unbind(1)
    return torch.stack([query, out[query, place] & (2**31 - 1)])


class _Grid(NamedTuple):
    """Cells of one size, the same for every example.

    Attributes:
        origin: [3], the smallest coordinates.
        sizes: numbers of cells along x, y and z.
        size: of a cell.
        slack: by how much rounding may move a point out of its cell.
    """

    origin: Tensor
    sizes: tuple[int, int, int]
    size: float
    slack: float

    @classmethod
    def of(cls, x: Tensor, ptr: Tensor, radius: float) -> "_Grid | None":
        """Choose cells; None for points that are all at one place, or not finite."""
        wide, examples = _in_space(x), ptr.numel() - 1
        origin, end = wide.amin(0), wide.amax(0)
        *extent, reach = torch.cat([end - origin, wide.abs().max().view(1)]).tolist()
        if not math.isfinite(reach) or max(extent) == 0:
            return None
        most = max(x.size(0) // _PER_CELL, 1)

        def count(size: float) -> float:
            cells: float = math.prod(math.floor(e / size) + 1.0 for e in extent)
            return examples * cells

        size = max(extent) / 1024
        step = 2.0
        while count(size) > most:
            size *= step
        for _ in range(8):  # the smallest cells of which there are not too many
            step = math.sqrt(step)
            size = size / step if count(size / step) <= most else size
        if math.isfinite(radius):
            size = max(size, radius) if count(radius) <= 4 * x.size(0) else size
        sizes = tuple(math.floor(e / size) + 1 for e in extent)
        slack = 2.0**-20 * (reach + size)
        return cls(origin, (sizes[0], sizes[1], sizes[2]), size, slack)

    def sort(self, points: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cells of points, ascending, and the points [n, 3] and ids in that order."""
        example, (nx, ny, nz) = _example_of(ptr, points.size(0)), self.sizes
        wide = _in_space(points)
        most = torch.tensor([nx - 1, ny - 1, nz - 1], device=points.device)
        place = ((wide - self.origin) / self.size).nan_to_num().clamp(0, 2**20).long()
        place = place.minimum(most)
        cell = ((example * nz + place[:, 2]) * ny + place[:, 1]) * nx + place[:, 0]
        cell, order = cell.sort(stable=True)
        return cell, wide[order], order


def _in_space(points: Tensor) -> Tensor:
    """Return points of up to three dimensions in three."""
    return torch.nn.functional.pad(points, (0, 3 - points.size(1)))


def _example_of(ptr: Tensor, size: int) -> Tensor:
    return torch.searchsorted(ptr, torch.arange(size, device=ptr.device), right=True) - 1


def farthest_points(src: Tensor, ptr: Tensor, ptr_out: Tensor, first: Tensor) -> Tensor:
    """Sample points of every example, each the farthest from those before.

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
