"""Measures how many columns neighbouring rows share, which the order of nodes decides."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.column_reuse import entries_of
from pyg_accel.graph import Graph

__all__ = ["Locality", "locality"]

WINDOW = 16  # rows of a Tensor Core tile
BLOCK = 1024  # rows whose columns should fit into a cache together
SAMPLE = 1 << 22  # entries to read for each of the two: windows at even distances


@dataclass(frozen=True)
class Locality:
    """Measures of a graph in its present order.

    Attributes:
        reuse: edges per distinct column in windows of 16 rows: how often a kernel uses a row of X
            that it fetches once per window; 1 is worst.
        gap: mean distance between the ids of neighbouring columns in a row.
        working_set: mean number of distinct columns in 1024 consecutive rows; times the bytes of a
            row of X, the cache that they need.
    """

    reuse: float
    gap: float
    working_set: float


def locality(graph: Graph) -> Locality:
    """Measure a graph; of large ones, windows of rows at even distances with 2**22 entries."""
    entries, distinct, _ = _distinct(graph, WINDOW)
    _, block_distinct, blocks = _distinct(graph, BLOCK)
    return Locality(
        reuse=entries / distinct if distinct else 1.0,
        gap=_gap(graph),
        working_set=block_distinct / blocks if blocks else 0.0,
    )


def _distinct(graph: Graph, height: int) -> tuple[int, int, int]:
    """Return entries, the sum of distinct columns of each window, and the number of windows."""
    windows = -(-graph.num_rows // height)
    step = max(1, -(-graph.num_edges // SAMPLE))
    first = torch.arange(step // 2 if windows > step // 2 else 0, windows, step) * height
    first = first.to(graph.device)
    last = (first + height).clamp(max=graph.num_rows)
    window, entry = entries_of(graph.rowptr.long(), first, last)
    keys = window * max(graph.num_cols, 1) + graph.col[entry]
    return keys.numel(), torch.unique(keys).numel(), first.numel()


def _gap(graph: Graph) -> float:
    if graph.num_edges < 2:
        return 0.0
    steps: Tensor = graph.col.diff().abs()
    starts = graph.rowptr[1:-1].long()
    starts = starts[(starts > 0) & (starts < graph.num_edges)].unique()  # of rows after others
    within = steps.numel() - starts.numel()
    total = steps.sum(dtype=torch.int64) - steps[starts - 1].sum(dtype=torch.int64)
    return float(total) / within if within else 0.0
