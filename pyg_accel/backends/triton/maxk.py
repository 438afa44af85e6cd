"""Launches the selection of the largest features."""

import torch
import triton.language as tl
from torch import Tensor

from pyg_accel.backends.triton.kernels.maxk import maxk_kernel
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.graph.cbsr import index_dtype

__all__ = ["run"]

THREAD_FEATURES = 8  # in registers
MOST_WARPS = 32
GUESSES = 6  # steps of the search that read values; later steps halve the range
# Integer of the size of a float, integer to compare, all bits except the sign, bits of infinity.
BITS = {
    torch.float64: (tl.int64, tl.int64, 2**63 - 1, 0x7FF0 << 48),
    torch.float32: (tl.int32, tl.int32, 2**31 - 1, 0x7F80 << 16),
    torch.bfloat16: (tl.int16, tl.int32, 2**15 - 1, 0x7F80),
    torch.float16: (tl.int16, tl.int32, 2**15 - 1, 0x7C00),
}


def run(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search each row for its k-th largest feature."""
    rows, width = x.shape
    values = x.new_empty(rows, k)
    indices = x.new_empty(rows, k, dtype=index_dtype(width))
    if rows == 0:
        return values, indices
    block = 1 << (width - 1).bit_length()
    warps = min(max(block // (32 * THREAD_FEATURES), 1), MOST_WARPS)
    bits, key, most, infinity = BITS[x.dtype]
    launch(maxk_kernel, (rows,), (x, values, indices, width, k), warps=warps,
           WIDTH=block, BITS=bits, KEY=key, MOST=most, INFINITY=infinity,
           GUESSES=GUESSES)  # fmt: skip
    return values, indices
