"""Sparse graph translation: the adjacency matrix as tiles that Tensor Cores can multiply.

Rows are split into windows, and the columns with entries in a window are condensed in order, so
that its entries fill few tiles (TC-GNN, section 4.1, algorithm 1). ``col`` has the row of the
features for each column of a tile.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_accel.graph.csr import CSR, ptr2index
from pyg_accel.graph.facts import of_matrix
from pyg_accel.runtime.checks import whole

__all__ = ["Tiles", "build_tiles", "tiles_of"]

_MOST_SLOTS = 2**15  # slots are int16


@dataclass(frozen=True, eq=False)
class Tiles:
    """Entries of a CSR matrix in tiles of ``window`` rows and ``tile`` columns.

    They hold all entries, or entries in columns that rows of a window share. Tiles are ordered by
    window, and entries by tile, column and row. Each entry has a slot: duplicates of an edge get
    different columns.

    Attributes:
        window: rows of a tile.
        tile: columns of a tile.
        num_rows: rows of the matrix; the last window may have fewer than ``window``.
        num_cols: columns of the matrix.
        num_columns: columns of all windows after condensing.
        window_ptr: [W + 1], the first tile of every window.
        tile_ptr: [T + 1], the first entry of every tile.
        col: [T * tile], the matrix column of every tile column, ascending within a window; the
            last one of a window is repeated to fill its last tile.
        entry: [S], the CSR entry; S is E if all entries are in tiles.
        slot: [S] int16, its position in the tile: row * tile + column.
    """

    window: int
    tile: int
    num_rows: int
    num_cols: int
    num_columns: int
    window_ptr: Tensor
    tile_ptr: Tensor
    col: Tensor
    entry: Tensor
    slot: Tensor

    @property
    def num_tiles(self) -> int:
        """T, the tiles after translation."""
        return self.tile_ptr.numel() - 1

    @cached_property
    def num_tiles_without(self) -> int:
        """Tiles of the matrix before translation that have an entry (figure 7 of the paper)."""
        if not self.num_tiles:
            return 0
        block = self.col // self.tile
        window = self.window_of_tile.repeat_interleave(self.tile)
        changes = (block[1:] != block[:-1]) | (window[1:] != window[:-1])
        return 1 + int(changes.sum())

    @property
    def nonzeros_per_tile(self) -> float:
        """Entries of a tile, on average."""
        return self.entry.numel() / max(self.num_tiles, 1)

    @property
    def edges_per_column(self) -> float:
        """Entries per fetched row of the features, on average."""
        return self.entry.numel() / max(self.num_columns, 1)

    @cached_property
    def window_of_tile(self) -> Tensor:
        """[T], the window of every tile."""
        return ptr2index(self.window_ptr, self.num_tiles)

    @cached_property
    def tile_of_entry(self) -> Tensor:
        """[S], the tile of every entry."""
        return ptr2index(self.tile_ptr, self.entry.numel())

    @cached_property
    def masks(self) -> Tensor:
        """[T, window] int64, which columns of a tile each of its rows has: bit c is column c.

        Raises:
            ValueError: for tiles of more than 63 columns.
        """
        if self.tile > 63:
            raise ValueError(f"expected at most 63 columns a tile (got {self.tile})")
        slot = self.slot.long()
        at = self.tile_of_entry * self.window + slot // self.tile
        bits = torch.bitwise_left_shift(torch.ones_like(slot), slot % self.tile)
        masks = torch.zeros(self.num_tiles * self.window, dtype=torch.int64, device=slot.device)
        return masks.index_add_(0, at, bits).view(-1, self.window)  # slots are distinct: add = or

    def __repr__(self) -> str:
        return (
            f"Tiles({self.window}x{self.tile}, num_tiles={self.num_tiles}, "
            f"nonzeros_per_tile={self.nonzeros_per_tile:.1f}, "
            f"edges_per_column={self.edges_per_column:.2f})"
        )


def tiles_of(csr: CSR, window: int, tile: int, least: int = 1) -> Tiles:
    """Return the tiles of a matrix; they are built once and stored while its arrays live.

    Args:
        csr: the matrix.
        window: rows of a tile.
        tile: columns of a tile.
        least: leave out the columns in which a window has fewer entries.

    Raises:
        ValueError: for a window or tile that is not positive, or too large together.
    """
    key = "tiles", window, tile, least
    return of_matrix(csr, key, lambda: build_tiles(csr, window, tile, least))


def build_tiles(csr: CSR, window: int, tile: int, least: int = 1) -> Tiles:
    """Translate a matrix; see :func:`tiles_of`. Waits for the device: sizes depend on the data."""
    if whole("window", window) * whole("tile", tile) > _MOST_SLOTS:
        raise ValueError(
            f"expected 'window' and 'tile' of at most {_MOST_SLOTS} slots together "
            f"(got {window} x {tile})"
        )
    rows, entries, device = csr.num_rows, csr.col.numel(), csr.col.device
    windows = -(-rows // window)
    if entries == 0:
        return _no_tiles(csr, window, tile)
    group, local_row, entry = _by_window_and_column(csr, window)

    # A column for each (window, matrix column), or several if an edge occurs several times.
    new = torch.ones(entries, dtype=torch.bool, device=device)
    torch.ne(group[1:], group[:-1], out=new[1:])
    same_row = ~new[1:] & (local_row[1:] == local_row[:-1])
    column = new.cumsum(0).sub_(1)
    group_of_column = group[new]
    if bool(same_row.any()):
        column, group_of_column = _own_columns(column, group_of_column, same_row)
        column, order = torch.sort(column, stable=True)
        local_row, entry = local_row[order], entry[order]
    if least > 1:
        full = torch.bincount(column, minlength=group_of_column.numel()) >= least
        in_full = full[column]
        column = (full.cumsum(0) - 1)[column[in_full]]
        local_row, entry = local_row[in_full], entry[in_full]
        group_of_column = group_of_column[full]
        if entry.numel() == 0:
            return _no_tiles(csr, window, tile)

    starts = torch.arange(0, (windows + 1) * csr.num_cols, csr.num_cols, device=device)
    first_column = torch.searchsorted(group_of_column, starts)
    window_ptr = torch.zeros_like(first_column)
    torch.cumsum((first_column.diff() + tile - 1) // tile, 0, out=window_ptr[1:])
    num_tiles = int(window_ptr[-1])

    # The position of a column among all tile columns; unused columns are at the ends of windows.
    window_of_column = group_of_column // csr.num_cols
    position = torch.arange(group_of_column.numel(), device=device)
    position += window_ptr[window_of_column] * tile - first_column[window_of_column]
    position_of_entry = position[column]
    slot = (local_row.long() * tile + position_of_entry % tile).short()
    ends = torch.arange(0, (num_tiles + 1) * tile, tile, device=device)
    tile_ptr = torch.searchsorted(position_of_entry, ends)
    filled = torch.searchsorted(position, torch.arange(num_tiles * tile, device=device), right=True)
    col = (group_of_column % csr.num_cols)[filled - 1]
    dtype = csr.col.dtype
    return Tiles(window, tile, rows, csr.num_cols, group_of_column.numel(), window_ptr.to(dtype),
                 tile_ptr.to(dtype), col.to(dtype), entry.to(dtype), slot)  # fmt: skip


def _no_tiles(csr: CSR, window: int, tile: int) -> Tiles:
    empty, windows = csr.col.new_empty(0), -(-csr.num_rows // window)
    return Tiles(window, tile, csr.num_rows, csr.num_cols, 0, csr.rowptr.new_zeros(windows + 1),
                 csr.rowptr.new_zeros(1), empty, empty, empty.short())  # fmt: skip


def _by_window_and_column(csr: CSR, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort entries by (window, column, row).

    Returns:
        window * num_cols + column, row in the window, and index of each entry.
    """
    row = ptr2index(csr.rowptr, csr.col.numel(), torch.int32)
    key = (row // window).long().mul_(csr.num_cols).add_(csr.col).mul_(window).add_(row % window)
    key, entry = torch.sort(key, stable=True)
    return key // window, (key % window).to(torch.int32), entry


def _own_columns(
    column: Tensor, group_of_column: Tensor, same_row: Tensor
) -> tuple[Tensor, Tensor]:
    """Move duplicates of an edge to different columns.

    Args:
        column: [E], the column of every entry, ascending.
        group_of_column: [C].
        same_row: [E - 1], whether entry i + 1 is in the row and column of entry i.
    """
    position = torch.arange(column.numel(), device=column.device)
    begins = torch.ones_like(position, dtype=torch.bool)
    begins[1:] = ~same_row
    first = torch.where(begins, position, 0).cummax(0).values
    number = position - first  # of the entry among its duplicates
    copies = torch.ones_like(group_of_column)
    copies.scatter_reduce_(0, column, number + 1, "amax")
    before = copies.cumsum(0) - copies
    return before[column] + number, group_of_column.repeat_interleave(copies)
