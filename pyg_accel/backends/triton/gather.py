"""Launches the gather of narrow rows."""

from torch import Tensor

from pyg_accel.backends.triton.kernels.gather import gather_kernel
from pyg_accel.backends.triton.launcher import launch

__all__ = ["run"]

ELEMENTS = 1024  # of a tile


def run(x: Tensor, order: Tensor) -> Tensor:
    """Return ``x[order]``.

    Args:
        x: [rows, H, 1] with few heads, contiguous within a row.
        order: [E].
    """
    heads = x.size(1)
    out = x.new_empty(order.numel(), heads, 1)
    block = 1 << (heads - 1).bit_length()
    tall = max(ELEMENTS // block, 1)
    if out.numel():
        arguments = (x, order, out, order.numel(), heads, x.stride(0))
        launch(gather_kernel, (-(-order.numel() // tall),), arguments, warps=4, ROWS=tall,
               COLUMNS=block)  # fmt: skip
    return out
