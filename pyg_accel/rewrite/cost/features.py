"""What a cost model knows of a graph (SENSEi, section 3.5.1), measured once on a sample."""

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyg_accel.graph import CSR, Graph

__all__ = ["GraphFeatures"]

# Degrees of this many rows, and columns of this many stretches of entries, stand for all: reading
# them takes a millisecond or two on a CPU, whatever the size of the graph.
SAMPLED_ROWS = 1 << 14
NEAR, NEAR_STRETCHES = 1 << 10, 16
# About as many entries as the rows of features that the cache holds: a GPU's is larger.
FAR = {"cpu": (1 << 14, 2), "cuda": (1 << 18, 2)}
QUANTILES = (0.5, 0.9, 0.99)

_known: "weakref.WeakKeyDictionary[Graph, dict[bool, GraphFeatures]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """Facts of a sparse matrix that decide how long its kernels take.

    From the sizes alone the rest describes a graph without locality, whose degrees are not
    known; :meth:`of` measures all of it.

    Attributes:
        num_rows: target nodes.
        num_cols: source nodes.
        num_entries: edges.
        degree_deviation: standard deviation of the entries of a row, over the mean.
        degree_median: the middle row's entries.
        degree_90: entries of the row that 90% of the rows do not exceed.
        degree_99: the same for 99%.
        degree_max: entries of the longest row.
        near: distinct columns an entry, among 1,024 entries in a row. Small where neighbouring rows
            share neighbours, or where a few columns are in every row.
        far: the same among 16,384 entries on a CPU, 262,144 on a GPU.
        row_gap: mean distance of an entry from the diagonal, over the size of the matrix: 1/3 where
            columns are random.
        col_gap: mean log2 of the distance between one entry's column and the next entry's.
    """

    num_rows: int
    num_cols: int
    num_entries: int
    degree_deviation: float = 0.0
    degree_median: float = 0.0
    degree_90: float = 0.0
    degree_99: float = 0.0
    degree_max: float = 0.0
    near: float = 1.0
    far: float = 1.0
    row_gap: float = 1 / 3
    col_gap: float = 0.0

    @property
    def degree_mean(self) -> float:
        """Entries a row."""
        return self.num_entries / max(self.num_rows, 1)

    @property
    def density(self) -> float:
        """Share of the matrix that is stored."""
        return self.num_entries / max(self.num_rows * self.num_cols, 1)

    @classmethod
    def sizes_of(
        cls, graph: Graph, *, transposed: bool = False, far: float = 1.0
    ) -> "GraphFeatures":
        """Return the sizes of a graph, without looking at its edges; else like :meth:`of`."""
        rows, cols = graph.num_rows, graph.num_cols
        return cls(*((cols, rows) if transposed else (rows, cols)), graph.num_edges, far=far)

    @classmethod
    def of(cls, graph: Graph, *, transposed: bool = False) -> "GraphFeatures":
        """Measure a graph once; the result is kept for as long as the graph lives.

        Args:
            graph: the graph.
            transposed: of the transposed matrix, which gradients of features walk.
        """
        kept = _known.setdefault(graph, {})
        if transposed not in kept:
            kept[transposed] = _measure(graph.transposed() if transposed else graph.csr())
        return kept[transposed]


@torch.no_grad()
def _measure(csr: CSR) -> GraphFeatures:
    rows, entries = csr.num_rows, csr.col.numel()
    if entries == 0:
        return GraphFeatures(rows, csr.num_cols, 0)
    degree = csr.rowptr.diff()
    sample = degree[:: -(-rows // SAMPLED_ROWS)].to(torch.float64)
    ranks = [round(share * (sample.numel() - 1)) for share in QUANTILES]
    parts = [
        torch.stack([sample.std(unbiased=False) * rows / entries, degree.max()]),
        sample.sort()[0][ranks],
        _locality(csr, entries),
    ]
    # One transfer: on a GPU, the host waits for the device once.
    deviation, most, median, q90, q99, near, far, row_gap, col_gap = torch.cat(parts).tolist()
    return GraphFeatures(rows, csr.num_cols, entries, deviation, median, q90, q99, most,
                         near, far, row_gap, col_gap)  # fmt: skip


def _locality(csr: CSR, entries: int) -> Tensor:
    """[4] float64: ``near``, ``far``, ``row_gap`` and ``col_gap``."""
    near, apart = _stretches(csr.col, NEAR, NEAR_STRETCHES)
    far, _ = _stretches(csr.col, *FAR.get(csr.col.device.type, FAR["cuda"]))
    starts = torch.arange(near.size(0), device=near.device).unsqueeze(1) * apart
    places = starts + torch.arange(near.size(1), device=near.device)
    row = torch.searchsorted(csr.rowptr, places.to(csr.rowptr.dtype), right=True) - 1
    off = near.to(torch.float64) / csr.num_cols - row.to(torch.float64) / csr.num_rows
    steps = (near.diff(dim=1).abs() + 1).to(torch.float64).log2()
    gap = steps.mean() if steps.numel() else off.new_zeros(())
    return torch.stack([_distinct(near), _distinct(far), off.abs().mean(), gap])


def _stretches(col: Tensor, length: int, count: int) -> tuple[Tensor, int]:
    """Columns [count, length] of entries that follow one another, and how far they lie apart."""
    entries = col.numel()
    length = min(length, entries)
    count = min(count, entries // length)
    apart = (entries - length) // max(count - 1, 1)
    return col.as_strided((count, length), (apart, 1)), apart


def _distinct(columns: Tensor) -> Tensor:
    """Distinct values of each row of [count, length], over its length; the mean of the rows."""
    if columns.is_cuda:
        ordered = columns.sort(dim=1)[0]
    else:  # numpy sorts integers with vector instructions: 0.1 ms instead of 1.7
        ordered = torch.from_numpy(np.sort(columns.numpy(), axis=1))
    changes = ordered.diff(dim=1) != 0
    return (changes.sum(dtype=torch.float64) + columns.size(0)) / columns.numel()
