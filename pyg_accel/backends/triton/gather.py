"""Launches the gather of narrow rows."""

from torch import Tensor

from pyg_accel.backends.triton.kernels.gather import gather_kernel
from pyg_accel.backends.triton.sequence import Kernel, Sequence, Slot

__all__ = ["append_to", "gather_of"]

ELEMENTS = 1024  # of a tile


def gather_of(heads: int) -> Kernel:
    """Return the kernel for rows of so many heads."""
    block = 1 << (heads - 1).bit_length()
    return Kernel(gather_kernel, 4, ROWS=max(ELEMENTS // block, 1), COLUMNS=block)


def append_to(
    sequence: Sequence, kernel: Kernel, x: Slot, stride: int, order: Tensor, out: Slot, heads: int
) -> None:
    """Append the computation of ``x[order]``.

    Args:
        sequence: to append to.
        kernel: of :func:`gather_of`.
        x: [rows, H, 1] with few heads, contiguous within a row.
        stride: between its rows.
        order: [E].
        out: [E, H, 1].
        heads: H.
    """
    count = order.numel()
    if count:
        grid = (-(-count // kernel.constants["ROWS"]),)
        sequence.launch(kernel, grid, (x, order, out, count, heads, stride))
