"""The tiles of a graph for kernels: 32-bit arrays, and the work of each block.

Entries whose column few other rows of the window share gain nothing
from a tile. They stay a CSR matrix, for kernels on CUDA cores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.graph import CSR
from pyg_accel.graph.derived import derived
from pyg_accel.graph.facts import of_matrix
from pyg_accel.graph.tiles import tiles_of

__all__ = ["TILE", "TileSchedule", "in_32_bits", "plan_of"]

TILE = 32  # columns of the kernels' tiles: kTileColumns in csrc/cuda/kernels.h
# Windows with more tiles than this, and than BLOCKS blocks would have on average, are divided.
SHORTEST, BLOCKS = 64, 2048


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Tiles, and the items of work they are divided into.

    Attributes:
        window: rows of a tile.
        tile_ptr: [T + 1] int32.
        tile_col: [T * TILE] int32.
        slot: [S] int16.
        entry: [S] int32, the CSR entry of every slot.
        items: [I * 4] int32: window, first tile, one past the last, place of the partial sum or -1.
        splits: [S * 3] int32, divided windows: window, first partial sum, how many.
        num_partials: partial sums.
        num_columns: rows of the features that one pass over all tiles fetches.
        remainder: the entries outside of tiles, renumbered; None if all are in tiles.
        remainder_entry: [E - S] int32, the CSR entry of each entry of the remainder.
    """

    window: int
    tile_ptr: Tensor
    tile_col: Tensor
    slot: Tensor
    entry: Tensor
    items: Tensor
    splits: Tensor
    num_partials: int
    num_columns: int
    remainder: CSR | None
    remainder_entry: Tensor | None


def in_32_bits(csr: CSR) -> CSR:
    """Return a matrix with int32 arrays: itself, or a stored copy."""
    if csr.col.dtype == torch.int32:
        return csr

    def make() -> CSR:
        rowptr, col, eid = (None if t is None else t.to(torch.int32) for t in csr[:3])
        assert rowptr is not None and col is not None
        return csr._replace(rowptr=rowptr, col=col, eid=eid, cache={})

    owners = [t for t in csr[:3] if t is not None]
    return derived(owners, ("32 bits", csr.num_cols, csr.sorted), make, lasting=True)


def plan_of(csr: CSR, window: int, least: int = 1) -> TileSchedule:
    """Return the plan of a graph, made once and stored for as long as its arrays live.

    Args:
        csr: the graph.
        window: rows of a tile.
        least: entries of a column in a window for which it is in a tile.
    """
    key = "Tensor-Core plan", window, least
    return of_matrix(csr, key, lambda: _build(csr, window, least))


def _build(csr: CSR, window: int, least: int) -> TileSchedule:
    tiles = tiles_of(csr, window, TILE, least)
    remainder, remainder_entry = _remainder(csr, tiles.entry) if least > 1 else (None, None)
    items, splits, partials = divide(tiles.window_ptr.long(), SHORTEST, BLOCKS)
    return TileSchedule(
        window=window,
        tile_ptr=tiles.tile_ptr.to(torch.int32),
        tile_col=tiles.col.to(torch.int32),
        slot=tiles.slot,
        entry=tiles.entry.to(torch.int32),
        items=items.flatten(),
        splits=splits.flatten(),
        num_partials=partials,
        num_columns=tiles.num_columns,
        remainder=remainder,
        remainder_entry=remainder_entry,
    )


def _remainder(csr: CSR, entry: Tensor) -> tuple[CSR | None, Tensor | None]:
    """The matrix without some of its entries, and which entries it still has."""
    if entry.numel() == csr.col.numel():
        return None, None
    stays = torch.ones_like(csr.col, dtype=torch.bool)
    stays[entry.long()] = False
    before = torch.zeros(stays.numel() + 1, dtype=csr.rowptr.dtype, device=stays.device)
    torch.cumsum(stays, 0, out=before[1:])
    remainder = CSR(before[csr.rowptr.long()], csr.col[stays], None, csr.num_cols, csr.sorted)
    return remainder, stays.nonzero().flatten().to(torch.int32)


def divide(window_ptr: Tensor, shortest: int, blocks: int) -> tuple[Tensor, Tensor, int]:
    """Divide the tiles of long windows evenly.

    Args:
        window_ptr: [W + 1] int64.
        shortest: tiles of an item below which it is not worth it.
        blocks: items that there should be at least, if the graph has that many tiles.

    Returns:
        Items [I, 4] and divided windows [S, 3] as in :class:`TileSchedule`, and the partial sums.
    """
    counts, device = window_ptr.diff(), window_ptr.device
    total = int(window_ptr[-1])
    most = max(shortest, -(-total // blocks))
    parts = ((counts + most - 1) // most).clamp(min=1)
    window = torch.repeat_interleave(torch.arange(counts.numel(), device=device), parts)
    first = parts.cumsum(0) - parts
    number = torch.arange(window.numel(), device=device) - first[window]
    begin = window_ptr[window] + number * counts[window] // parts[window]
    end = window_ptr[window] + (number + 1) * counts[window] // parts[window]
    divided = parts[window] > 1
    place = torch.where(divided, divided.cumsum(0) - 1, -1)
    long = (parts > 1).nonzero().flatten()
    splits = torch.stack([long, place[first[long]], parts[long]], 1)
    items = torch.stack([window, begin, end, place], 1)
    return items.to(torch.int32), splits.to(torch.int32), int(divided.sum())
