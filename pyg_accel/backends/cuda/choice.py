"""Chooses window, entries and warps, and whether tiles pay, by measurements on an H200.

A window of more rows fetches fewer columns and multiplies more zeros. Tensor Cores take time for
every column of a tile and for every entry in it, CUDA cores for every entry. ``choice.json`` has
both prices relative to CUDA cores alone; ``python -m benchmarks.kernels.tensor_cores --fit`` writes
it.
"""

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from pyg_accel.graph.column_reuse import HEIGHTS, Shared

__all__ = ["FILE", "Launch", "choose_launch", "mode_of", "terms"]

FILE = Path(__file__).with_name("choice.json")
WARP_BYTES, MOST_WARPS = 128, 4  # of a row that a warp has; of a block
MOST_SLICE = 1024  # bytes of the rows that fit a block's shared memory (dots)
_FULL_ROW = 512  # bytes: shorter rows take longer per byte, because of fixed costs
_SLICE, _L2 = 256, 60e6  # bytes of a row per pass of CUDA cores; of features that the L2 holds
# A sum by both kinds of cores reads and writes the output once more: 10 TB/s over the HBM's 4.2.
_ADD = 2 * 10 / 4.2


@dataclass(frozen=True, slots=True)
class _Costs:
    """Factors that were fitted by hand, for sums and for dots.

    Attributes:
        remainder: price of an entry on CUDA cores beside tiles, relative to CUDA cores alone.
        far_remainder: addition to it for features outside of the L2.
        far_column: addition to the price of a column for features outside of the L2.
        short_column: exponent of the loss by short rows, for columns.
        short_entry: the same for entries.
        doubt: the margin that an expected gain must exceed.
    """

    remainder: float
    far_remainder: float
    far_column: float
    short_column: float
    short_entry: float
    doubt: float


_SUM, _DOT = _Costs(1.05, 0.8, 0.1, 0.1, 0.7, 1.05), _Costs(1.1, 0.5, 0.5, 0.0, 0.6, 1.2)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a product is launched.

    Attributes:
        window: rows of a tile.
        least: the fewest entries of a column in a window that go to Tensor Cores.
        warps: of a block, side by side along the features (sums).
        slice: features of a pass (dots).
        ratio: expected time relative to the kernels on CUDA cores.
    """

    window: int
    least: int
    warps: int
    slice: int
    ratio: float


def mode_of(dtype: torch.dtype, *, rounded: bool) -> str:
    """Return the name of the kernel for features of a dtype."""
    return "16 bit" if dtype.itemsize == 2 else "tf32" if rounded else "exact"


def terms(
    shared: Shared, row: int, num_cols: int, mean: float, *, dot: bool
) -> tuple[float, float, float]:
    """Return the coefficients of the expected ratio: of a column's price, an entry's, and 1.

    Args:
        shared: the columns that go to Tensor Cores.
        row: bytes of the features of a node.
        num_cols: rows of the gathered features.
        mean: entries a row of the graph.
        dot: a dot of both ends of every edge instead of a sum over them.
    """
    costs = _DOT if dot else _SUM
    short = max(_FULL_ROW / max(row, 1), 1.0)
    far = max(0.0, 1 - _L2 / max(num_cols * min(row, _SLICE), 1))
    columns = shared.columns * (1 + costs.far_column * far) * short**costs.short_column
    remainder = 0.0
    if shared.least > 1:
        remainder = (1 - shared.entries) * (costs.remainder + costs.far_remainder * far)
        remainder += 0.0 if dot else _ADD / max(mean, 1.0)
    return columns, shared.entries * short**costs.short_entry, remainder


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
    """Return how to launch a product, and its expected cost.

    Args:
        dtype: of the features.
        width: features a row.
        num_cols: rows of the gathered features.
        sharing: the columns that rows share; empty if they were not measured.
        mean: entries a row.
        rounded: float32 products may be rounded to tf32.
        dot: a dot of both ends of every edge instead of a sum over them.
        alone: all entries must go to Tensor Cores.
    """
    row = width * dtype.itemsize
    prices = _prices()["dot" if dot else "sum"][mode_of(dtype, rounded=rounded)]

    def ratio_of(shared: Shared) -> float:
        columns, entries, remainder = terms(shared, row, num_cols, mean, dot=dot)
        column, entry = prices[str(shared.window)]
        return columns * column + entries * entry + remainder

    able = [shared for shared in sharing if shared.least == 1 or not alone]
    best = min(able, key=ratio_of, default=None)
    window, least = (best.window, best.least) if best else (HEIGHTS[0], 1)
    ratio = ratio_of(best) * (_DOT if dot else _SUM).doubt if best else math.inf
    needed = -(-row // WARP_BYTES)
    blocks = -(-needed // MOST_WARPS)
    step = 64 // dtype.itemsize
    piece = min(-(-width // step) * step, MOST_SLICE // dtype.itemsize)
    warps = max(1, -(-needed // blocks)) if blocks else 1
    return Launch(window, least, warps, max(piece, step), ratio)


@cache
def _prices() -> dict[str, dict[str, dict[str, tuple[float, float]]]]:
    """Prices of a column and of an entry, by product, mode and window."""
    prices: dict[str, dict[str, dict[str, tuple[float, float]]]] = json.loads(FILE.read_text())
    return prices
