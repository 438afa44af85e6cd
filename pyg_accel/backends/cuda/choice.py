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

from pyg_accel.tiles import HEIGHTS

__all__ = ["Launch", "attention_ratio", "choose_launch"]

WARP_BYTES, MOST_WARPS = 128, 4  # of a row that a warp has; of a block
MOST_SLICE = 1024  # bytes of the rows that fit a block's shared memory (dots)

# TB/s of fetched rows by height of the window, rows of 512 bytes or more.
_SUM = {"exact": (4.3, 2.9, 1.4), "tf32": (6.0, 4.7, 3.5), "16 bit": (5.3, 4.7, 2.9)}
_DOT = {"exact": (4.5, 3.0, 1.1), "tf32": (6.2, 4.6, 1.5), "16 bit": (6.2, 4.5, 2.0)}
_SIMPLE, _SIMPLE_DOT = 10.0, {"exact": 8.0, "tf32": 8.0, "16 bit": 7.0}  # on CUDA cores
# Entries a column at which attention over tiles is as fast as in one kernel on CUDA cores, for
# heads of 256 bytes.
_ATTENTION, _WIDE_HEAD = 2.5, 256
# Shorter rows leave more of the time to the entries: per halving of a row below 512 bytes.
_SHORT_ROW, _SHORT = 512, 1.38
# Features of many times the L2 are fetched from farther away.
_LARGE, _FAR = 480e6, 1.25
_DOUBT = 1.05  # a win within the spread of these figures is none


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is launched.

    Attributes:
        window: rows of a tile.
        warps: of a block, side by side along the features (sums).
        slice: features of a pass (dots).
        ratio: expected time over that of the kernels on CUDA cores.
    """

    window: int
    warps: int
    slice: int
    ratio: float


@lru_cache(maxsize=4096)
def choose_launch(
    dtype: torch.dtype,
    width: int,
    num_cols: int,
    sharing: tuple[float, ...],
    *,
    rounded: bool,
    dot: bool = False,
) -> Launch:
    """Return how to launch a product, and what it would cost.

    Args:
        dtype: of the features.
        width: features a row.
        num_cols: rows of the gathered features.
        sharing: entries that share a column, by height of the window; nothing if not known.
        rounded: float32 products may be rounded to tf32.
        dot: a dot of both ends of every edge instead of a sum over them.
    """
    row = width * dtype.itemsize
    mode = "16 bit" if dtype.itemsize == 2 else "tf32" if rounded else "exact"
    rates = (_DOT if dot else _SUM)[mode]
    times = [1 / (rate * shared) for rate, shared in zip(rates, sharing, strict=False)]
    ratio, best = min(zip(times, HEIGHTS, strict=False), default=(math.inf, HEIGHTS[0]))
    ratio *= (_SIMPLE_DOT[mode] if dot else _SIMPLE) * _DOUBT
    ratio *= _SHORT ** max(math.log2(_SHORT_ROW / max(row, 1)), 0)
    if num_cols * row > _LARGE:
        ratio *= _FAR
    needed = -(-row // WARP_BYTES)
    blocks = -(-needed // MOST_WARPS)
    step = 64 // dtype.itemsize
    piece = min(-(-width // step) * step, MOST_SLICE // dtype.itemsize)
    return Launch(best, max(1, -(-needed // blocks)) if blocks else 1, max(piece, step), ratio)


def attention_ratio(width: int, sharing: tuple[float, ...]) -> float:
    """Return the time of attention over tiles over that of one kernel on CUDA cores.

    Args:
        width: features of a head, of 16 bits.
        sharing: entries that share a column, by height of the window; nothing if not known.
    """
    if not sharing:
        return 1e6
    ratio = _DOUBT * _ATTENTION / sharing[-1]
    return float(ratio * _SHORT ** max(math.log2(_WIDE_HEAD / max(2 * width, 1)), 0))
