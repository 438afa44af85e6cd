"""Products with CBSR features.

Triton has no scatter into shared memory. Substitutes were measured on an H200, summing neighbours
of the reddit-like graph (115 million edges, F = 256, k = 32; 13.3 ms for dense rows): columns in
registers that fetch their values by rank 16.8 ms, dense rows without their empty sectors 23 ms,
gathering the stored columns of a gradient 21 ms. So sums read dense rows; atomic additions of a
gradient and products along edges use the format. Sums, and gradients in graphs of long rows, are
faster in CUDA C++ (:mod:`pyg_accel.backends.cuda.cbsr`).
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import atomics_allowed, weighted_sum
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.triton import gspmm
from pyg_accel.backends.triton.kernels.cbsr import row_kernel
from pyg_accel.backends.triton.launcher import launch, type_of
from pyg_accel.costs import H200
from pyg_accel.graph import CSR
from pyg_accel.graph.cbsr import CBSR, scattered

__all__ = ["dot", "spmm", "sspmm"]

GATHERS = 4  # features that a thread has in flight
SPLIT, PIECE = 2048, 1024  # entries: longer rows are cut into pieces


def spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """Aggregate dense rows."""
    return weighted_sum(gspmm.run, csr, scattered(CBSR(values, indices, width)), weight, reduce)


def sspmm(csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Gather whole rows, or push to few stored columns where atomic additions are allowed."""
    if atomics_allowed() and indices.size(1) * H200.entry <= x.size(1):
        return _push(csr, x, indices, weight)
    return weighted_sum(gspmm.run, transposed, x, weight, "sum").gather(1, indices.long())


def _push(csr: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Add atomically: faster, with last bits that differ from run to run."""
    out = torch.zeros(indices.shape, dtype=accumulate(x.dtype), device=x.device)
    eid = None if weight is None else csr.eid
    _over_rows(csr, eid, (weight, None), indices, x, out, dot=False)
    return out.to(x.dtype)


def dot(csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Multiply the rows of both ends of every edge."""
    out = values.new_empty(csr.col.numel())
    _over_rows(csr, csr.eid, (None, values), indices, x, out, dot=True)
    return out


def _over_rows(
    csr: CSR,
    eid: Tensor | None,
    values: tuple[Tensor | None, Tensor | None],
    indices: Tensor,
    x: Tensor,
    out: Tensor,
    *,
    dot: bool,
) -> None:
    """Launch the kernel over rows and pieces; ``values`` are edge weights and stored values."""
    if csr.col.numel() == 0:
        return
    k = indices.size(1)
    slots = min(1 << (k - 1).bit_length(), 32)
    for tasks, where, longest in _tasks(csr):
        arguments = (csr.rowptr, *where, csr.col, eid, *values, indices, x, out, longest, k,
                     x.size(1))  # fmt: skip
        launch(row_kernel, (tasks,), arguments, EDGES=GATHERS * 32 // slots, SLOTS=slots,
               PIECES=where[0] is not None, DOT=dot, ACC=type_of(accumulate(x.dtype)))  # fmt: skip


def _tasks(csr: CSR) -> list[tuple[int, tuple[Any, Any, Any], int]]:
    """Return numbers of programs, their pieces (None for rows), and the longest row of each."""
    pieces = schedule_of(csr, SPLIT, PIECE, ordered=False).pieces
    if pieces is None:
        return [(csr.num_rows, (None, None, None), csr.col.numel())]
    where = (pieces.row, pieces.begin, pieces.end)
    return [(csr.num_rows, (None, None, None), SPLIT), (pieces.row.numel(), where, SPLIT)]
