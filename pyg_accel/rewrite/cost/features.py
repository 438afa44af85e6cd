"""The features of a graph that cost models read (SENSEi, section 3.5.1), measured on a sample."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.facts import of_matrix

__all__ = ["GraphFeatures"]

# Measuring reads the degrees of so many rows, and the columns of so many stretches of entries: 1 to
# 2 ms on a CPU, for graphs of any size.
SAMPLED_ROWS = 1 << 14
NEAR, NEAR_STRETCHES = 1 << 10, 16
# About as many entries as rows of features fit into the cache.
FAR = {"cpu": (1 << 14, 2), "cuda": (1 << 18, 2)}


@dataclass(frozen=True, slots=True)
class GraphFeatures:
    """Properties of a sparse matrix that decide how long its kernels take.

    The defaults assume equal degrees and no locality. :meth:`of` measures them.

    Attributes:
        num_rows: target nodes.
        num_cols: source nodes.
        num_entries: edges.
        degree_deviation: standard deviation of the entries of a row, over the mean.
        degree_max: entries of the longest row.
        near: distinct columns per entry, among 1,024 successive entries. Small where neighbouring
            rows share neighbours, or where a few columns are in every row.
        far: the same among 16,384 entries on a CPU, 262,144 on a GPU.
    """

    num_rows: int
    num_cols: int
    num_entries: int
    degree_deviation: float = 0.0
    degree_max: float = 0.0
    near: float = 1.0
    far: float = 1.0

    @property
    def degree_mean(self) -> float:
        """Entries per row."""
        return self.num_entries / max(self.num_rows, 1)

    @classmethod
    def sizes_of(
        cls, graph: Graph, *, transposed: bool = False, far: float = 1.0
    ) -> "GraphFeatures":
        """Return features with the sizes of a graph, without reading its edges."""
        rows, cols = graph.num_rows, graph.num_cols
        return cls(*((cols, rows) if transposed else (rows, cols)), graph.num_edges, far=far)

    @classmethod
    def of(cls, graph: Graph, *, transposed: bool = False) -> "GraphFeatures":
        """Measure a graph once; the result is stored for as long as the graph lives.

        Args:
            graph: the graph.
            transposed: measure the transposed matrix, which gradients multiply with.
        """
        csr = graph.transposed() if transposed else graph.csr()
        return of_matrix(csr, "features", lambda: _measure(csr))


@torch.no_grad()
def _measure(csr: CSR) -> GraphFeatures:
    rows, entries = csr.num_rows, csr.col.numel()
    if entries == 0:
        return GraphFeatures(rows, csr.num_cols, 0)
    degree = csr.rowptr.diff()
    sample = degree[:: -(-rows // SAMPLED_ROWS)].double()
    parts = [
        sample.std(unbiased=False) * rows / entries,
        degree.max(),
        _distinct(csr.col, NEAR, NEAR_STRETCHES),
        _distinct(csr.col, *FAR.get(csr.col.device.type, FAR["cuda"])),
    ]
    # One transfer: the host waits for a GPU once.
    return GraphFeatures(rows, csr.num_cols, entries, *torch.stack(parts).tolist())


def _distinct(col: Tensor, length: int, count: int) -> Tensor:
    """Distinct columns per entry, in ``count`` stretches of ``length`` entries; their mean."""
    entries = col.numel()
    length = min(length, entries)
    count = min(count, entries // length)
    columns = col.as_strided((count, length), ((entries - length) // max(count - 1, 1), 1))
    if columns.is_cuda:
        ordered = columns.sort(dim=1)[0]
    else:  # numpy sorts integers with vector instructions: 0.1 ms instead of 1.7
        ordered = torch.from_numpy(np.sort(columns.numpy(), axis=1))
    changes = ordered.diff(dim=1) != 0
    return (changes.sum(dtype=torch.float64) + count) / columns.numel()
