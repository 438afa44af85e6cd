"""Launches the gather of narrow rows."""

from torch import Tensor

from pyg_accel.backends.triton.kernels.gather import gather_kernel
from pyg_accel.backends.triton.sequence import Sequence, Slot

__all__ = ["append_to"]

ELEMENTS = 1024  # of a tile


def append_to(
    sequence: Sequence, x: Slot, stride: int, order: Tensor, out: Slot, heads: int
) -> None:
    """Append the computation of ``x[order]``.

    Args:
        sequence: to append to.
        x: [rows, H, 1] with few heads, contiguous within a row.
        stride: between its rows.
        order: [E].
        out: [E, H, 1].
        heads: H.
    """
    count = order.numel()
    block = 1 << (heads - 1).bit_length()
    tall = max(ELEMENTS // block, 1)
    if count:
        sequence.launch(gather_kernel, (-(-count // tall),), (x, order, out, count, heads, stride),
                        warps=4, ROWS=tall, COLUMNS=block)  # fmt: skip
