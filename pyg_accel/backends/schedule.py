"""Schedules by the lengths of rows: an order of the rows, and pieces of long rows.

Built on the device and stored with the graph, so that later calls neither wait for the device nor
allocate for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.graph import CSR
from pyg_accel.graph.facts import cache_of, facts_of
from pyg_accel.runtime.machine import is_captured

__all__ = ["Pieces", "Schedule", "schedule_of"]

# Rows are ordered by length, longest first, among so many neighbours: then rows of a tile have one
# length, and neighbours, which often share sources, still run at about the same time.
NEIGHBOURS = 4096


@dataclass(frozen=True)
class Pieces:
    """Long rows, cut.

    Attributes:
        rows: [L], the long rows.
        first: [L + 1], where the pieces of each begin.
        row: [P], of every piece.
        begin: [P], its first entry.
        end: [P], one past its last.
    """

    rows: Tensor
    first: Tensor
    row: Tensor
    begin: Tensor
    end: Tensor


@dataclass(frozen=True)
class Schedule:
    """The order of the rows, and pieces of long rows; None for the stored order or no pieces."""

    order: Tensor | None
    pieces: Pieces | None


_UNSCHEDULED = Schedule(None, None)
# The longest row of a graph with fewer entries is only measured if the graph stays: waiting for the
# device costs a batch more than a long row does.
_FEW = 2**20


def schedule_of(csr: CSR, split: int, piece: int, *, ordered: bool) -> Schedule:
    """Return the schedule of a graph.

    Waits for the device once per graph, for the length of its longest row, and once for each way to
    cut its long rows. Rows stay in order and whole in the first uses of a graph that is not large,
    unless torch is deterministic, and of a new graph while a CUDA graph is captured.

    Args:
        csr: the graph.
        split: rows longer than this are cut into pieces.
        piece: entries of a piece.
        ordered: sort rows by length.
    """
    rowptr, entries = csr.rowptr, csr.col.numel()
    cache, key = cache_of(csr), ("schedule", split, piece, ordered)
    schedule: Schedule | None = cache.get(key)
    if schedule is not None:
        return schedule
    facts = facts_of(csr)
    if rowptr.is_cuda:
        new = entries < _FEW and not facts.stays
        if new and not torch.are_deterministic_algorithms_enabled():
            return _UNSCHEDULED
        if is_captured(rowptr):
            return _UNSCHEDULED
    if facts.longest is None:
        facts.longest = int(rowptr.diff().max()) if entries else 0
    longest, rows = facts.longest, rowptr.numel() - 1
    uneven = longest * rows > 2 * entries + 4 * rows
    schedule = Schedule(
        _order(rowptr, split, longest) if ordered and uneven else None,
        _cut(rowptr, split, piece) if longest > split else None,
    )
    cache[key] = schedule
    return schedule


def _order(rowptr: Tensor, split: int, longest: int) -> Tensor:
    degree = rowptr.diff()
    rows = torch.arange(degree.numel(), device=degree.device)
    short = degree.masked_fill(degree > split, 0)
    key = (rows // NEIGHBOURS) * (longest + 1) + (longest - short)
    return torch.argsort(key, stable=True).to(degree.dtype)


def _cut(rowptr: Tensor, split: int, piece: int) -> Pieces:
    degree = rowptr.diff()
    counts = torch.where(degree > split, (degree + piece - 1) // piece, 0)
    number_of_rows, number_of_pieces = torch.stack([(counts > 0).sum(), counts.sum()]).tolist()
    rows = counts.argsort(descending=True, stable=True)[:number_of_rows].sort().values
    counts = counts[rows]
    first = counts.new_zeros(number_of_rows + 1)
    first[1:] = counts.cumsum(0)
    long_rows = torch.arange(number_of_rows, device=rowptr.device)
    owner = torch.repeat_interleave(long_rows, counts.long(), output_size=number_of_pieces)
    number = torch.arange(number_of_pieces, device=rowptr.device) - first[owner]
    begin = rowptr[rows][owner] + number * piece
    end = torch.minimum(begin + piece, rowptr[rows + 1][owner])
    parts = (rows, first, rows[owner], begin, end)
    return Pieces(*(t.to(rowptr.dtype).contiguous() for t in parts))
