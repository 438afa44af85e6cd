"""What depends on the rows' lengths: an order of rows, and the pieces of those that are too long.

Built on the device when a graph is first used and kept for as long as its ``rowptr`` lives, so
that later calls neither wait for the device nor allocate for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.kept import Kept

__all__ = ["Pieces", "Schedule", "schedule_of"]

# Rows are ordered by length, longest first, among so many neighbours: rows of a tile are of one
# length then, and neighbours, which often share sources, still run at about the same time.
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
    """How the rows of a graph are worked on; None where they are taken as they come."""

    order: Tensor | None
    pieces: Pieces | None


_schedules = Kept()


def schedule_of(rowptr: Tensor, split: int, piece: int, *, ordered: bool) -> Schedule:
    """Return the schedule of a graph.

    Args:
        rowptr: [num_rows + 1].
        split: rows longer than this are cut into pieces.
        piece: entries of a piece.
        ordered: bring rows of like length together.
    """
    key = (split, piece, ordered)
    return _schedules.get(rowptr, key, lambda: _build(rowptr, *key))


def _build(rowptr: Tensor, split: int, piece: int, ordered: bool) -> Schedule:
    degree = rowptr.diff()
    if degree.numel() == 0:
        return Schedule(None, None)
    longest = int(degree.max())  # waits for the device, once a graph
    order = None
    mean = float(rowptr.numel() and degree.double().mean())
    if ordered and longest > 2 * mean + 4:
        order = _order(degree.masked_fill(degree > split, 0))
    return Schedule(order, _cut(rowptr, degree, split, piece) if longest > split else None)


def _order(degree: Tensor) -> Tensor:
    rows = torch.arange(degree.numel(), device=degree.device)
    longest = degree.max()
    key = (rows // NEIGHBOURS) * (longest + 1) + (longest - degree)
    return torch.argsort(key, stable=True).to(degree.dtype)


def _cut(rowptr: Tensor, degree: Tensor, split: int, piece: int) -> Pieces:
    rows = (degree > split).nonzero().flatten()
    counts = (degree[rows] + piece - 1) // piece
    first = counts.new_zeros(rows.numel() + 1)
    first[1:] = counts.cumsum(0)
    owner = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), counts.long())
    number = torch.arange(owner.numel(), device=rows.device) - first[owner]
    begin = rowptr[rows][owner] + number * piece
    end = torch.minimum(begin + piece, rowptr[rows + 1][owner])
    dtype = rowptr.dtype
    parts = (rows, first, rows[owner], begin, end)
    return Pieces(*(t.to(dtype).contiguous() for t in parts))
