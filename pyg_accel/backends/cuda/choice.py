"""Which window, how many warps, and whether it pays: what was measured on an H200.

A window of more rows shares more of what it fetches and multiplies more zeros, so the bytes that it
fetches a second fall as it grows. The kernels on CUDA cores fetch every entry's row, at ``_SIMPLE``
TB/s. The ratio of both times follows from the entries that share a column.
``benchmarks/tc_kernels.py`` measures again.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from pyg_accel.sharing import HEIGHTS, Shared

__all__ = ["Launch", "choose_launch"]

WARP_BYTES, MOST_WARPS = 128, 4  # of a row that a warp has; of a block
MOST_SLICE = 1024  # bytes of the rows that fit a block's shared memory (dots)

# TB/s of fetched rows by height of the window, rows of 512 bytes or more.
_SUM = {"exact": (4.3, 2.9, 1.4), "tf32": (6.0, 4.7, 3.5), "16 bit": (5.3, 4.7, 2.9)}
_DOT = {"exact": (4.5, 3.0, 1.1), "tf32": (6.2, 4.6, 1.5), "16 bit": (6.2, 4.5, 2.0)}
_SIMPLE, _SIMPLE_DOT = 10.0, {"exact": 8.0, "tf32": 8.0, "16 bit": 7.0}  # on CUDA cores
# Shorter rows leave more of the time to the entries: per halving of a row below 512 bytes.
_SHORT_ROW, _SHORT = 512, 1.38
# Features of many times the L2 are fetched from farther away.
_LARGE, _FAR = 480e6, 1.25
# A sum that is done by both reads and writes the output once more, at the HBM's rate.
_ADD = 2 * 10 / 4.2
_DOUBT = 1.05  # a win within the spread of these figures is none


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is launched.

    Attributes:
        window: rows of a tile.
        least: entries of a column in a window for which they go to Tensor Cores.
        warps: of a block, side by side along the features (sums).
        slice: features of a pass (dots).
        ratio: expected time over that of the kernels on CUDA cores.
    """

    window: int
    least: int
    warps: int
    slice: int
    ratio: float


@lru_cache(maxsize=4096)
def choose_launch(
    dtype: torch.dtype,
    width: int,
    num_cols: int,
    sharing: tuple[Shared, ...],
    *,
    mean: float,
    rounded: bool,
    dot: bool = False,
    alone: bool = False,
) -> Launch:
    """Return how to launch a product, and what it would cost.

    Args:
        dtype: of the features.
        width: features a row.
        num_cols: rows of the gathered features.
        sharing: what rows share; nothing if not known.
        mean: entries a row.
        rounded: float32 products may be rounded to tf32.
        dot: a dot of both ends of every edge instead of a sum over them.
        alone: all entries must go to Tensor Cores.
    """
    row = width * dtype.itemsize
    mode = "16 bit" if dtype.itemsize == 2 else "tf32" if rounded else "exact"
    rates = dict(zip(HEIGHTS, (_DOT if dot else _SUM)[mode], strict=True))
    simple = _SIMPLE_DOT[mode] if dot else _SIMPLE
    slower: float = _SHORT ** max(math.log2(_SHORT_ROW / max(row, 1)), 0)
    slower *= _FAR if num_cols * row > _LARGE else 1.0

    def ratio_of(shared: Shared) -> float:
        ours = shared.columns * simple / rates[shared.window] * slower
        both = 0.0 if dot else _ADD / max(mean, 1.0)
        return ours if shared.least == 1 else ours + 1 - shared.entries + both

    able = [shared for shared in sharing if shared.least == 1 or not alone]
    best = min(able, key=ratio_of, default=Shared(HEIGHTS[0], 1, 1.0, math.inf))
    needed = -(-row // WARP_BYTES)
    blocks = -(-needed // MOST_WARPS)
    step = 64 // dtype.itemsize
    piece = min(-(-width // step) * step, MOST_SLICE // dtype.itemsize)
    warps = max(1, -(-needed // blocks)) if blocks else 1
    return Launch(best.window, best.least, warps, max(piece, step), ratio_of(best) * _DOUBT)
