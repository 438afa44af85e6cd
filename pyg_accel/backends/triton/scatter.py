"""The gradient of a lone maximum, deterministic without sorting.

Gradients become 64-bit integers, scaled so that sums of a column cannot overflow for any number of
winners: with R rows an element is rounded to 2 ** (log2(R) - 62) of the largest, which for a
million rows is 20 bits finer than float32 needs. Infinities and NaN are stored separately.
"""

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.triton.kernels.scatter import (
    column_max_kernel,
    scatter_finish_kernel,
    scatter_kernel,
)
from pyg_accel.backends.triton.launcher import launch, type_of

__all__ = ["run"]

ELEMENTS = 512  # of a tile
PARTS = 256  # programs that search for the largest, at most


def run(grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
    """Sum integers by atomics."""
    rows, columns = grad.shape
    if rows == 0 or columns == 0 or num_cols == 0:
        return grad.new_zeros(num_cols, columns)
    grad, arg = grad.contiguous(), arg.contiguous()
    block = min(1 << (columns - 1).bit_length(), 128)
    tall = ELEMENTS // block
    slices = -(-columns // block)

    wide = accumulate(grad.dtype)
    share = max(-(-rows // PARTS), tall)
    parts = -(-rows // share)
    most = torch.empty(parts, columns, dtype=wide, device=grad.device)
    launch(column_max_kernel, (parts, slices), (grad, most, rows, columns, share), ROWS=tall,
           COLUMNS=block, ACC=type_of(wide), warps=4)  # fmt: skip
    exponent = torch.frexp(most.amax(0)).exponent
    scale = torch.exp2(62 - rows.bit_length() - exponent.double())

    total = torch.zeros(num_cols, columns, dtype=torch.int64, device=grad.device)
    strange = torch.zeros(num_cols, columns, dtype=torch.int32, device=grad.device)
    launch(scatter_kernel, (-(-rows // tall), slices),
           (grad, arg, scale, total, strange, rows, columns), ROWS=tall, COLUMNS=block,
           warps=4)  # fmt: skip
    out = torch.empty(num_cols, columns, dtype=grad.dtype, device=grad.device)
    launch(scatter_finish_kernel, (-(-out.numel() // 1024),),
           (total, strange, scale, out, out.numel(), columns), ELEMENTS=1024, warps=4)  # fmt: skip
    return out
