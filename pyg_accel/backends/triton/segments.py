"""Launches products of segments of rows with a matrix each."""

import torch
from torch import Tensor

from pyg_accel.backends.triton.kernels.segments import segment_matmul_kernel, segment_outer_kernel
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.graph.derived import derived

__all__ = ["matmul", "outer"]

LEAST, MOST = 16, 64  # rows, or columns, of a tile
WARPS = 4


def matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    """Multiply tiles of rows by the matrices of the segments that they overlap."""
    (rows, depth), (segments, _, width) = x.shape, weight.shape
    out = x.new_empty(rows, width)
    if out.numel():
        block = _block(width)
        launch(segment_matmul_kernel, (-(-rows // MOST), -(-width // block)),
               (x, _on(ptr, x), weight, out, rows, segments, depth, width, *x.stride(),
                *weight.stride()), warps=WARPS, ROWS=MOST, DEPTH=min(_block(depth), 32),
               WIDTH=block, ROUNDED=_rounded())  # fmt: skip
    return out


def outer(x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
    """Add the products of the rows of each segment, in their order."""
    segments, depth, width = ptr.numel() - 1, x.size(1), y.size(1)
    out = x.new_empty(segments, depth, width)
    if out.numel():
        tile = _block(depth), _block(width)
        launch(segment_outer_kernel, (segments, -(-depth // tile[0]), -(-width // tile[1])),
               (x, _on(ptr, x), y, out, depth, width, *x.stride(), *y.stride()), warps=WARPS,
               ROWS=32, DEPTH=tile[0], WIDTH=tile[1], ROUNDED=_rounded())  # fmt: skip
    return out


def _block(size: int) -> int:
    return min(max(1 << (size - 1).bit_length(), LEAST), MOST)


def _on(ptr: Tensor, x: Tensor) -> Tensor:
    """Return the bounds of segments on the device of features, stored with them."""
    return ptr if ptr.device == x.device else derived((ptr,), ("bounds", x.device),
                                                      lambda: ptr.to(x.device))  # fmt: skip


def _rounded() -> bool:
    """Whether torch allows its own float32 products to be rounded to tf32."""
    return torch.get_float32_matmul_precision() != "highest"
