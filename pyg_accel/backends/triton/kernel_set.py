"""The kernels that work on the rows of one recipe, and on the pieces of those that are too long."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.recipe import Common
from pyg_accel.backends.triton.sequence import Kernel, Sequence, Slot
from pyg_accel.graph import CSR

__all__ = ["KernelSet", "Tasks"]

R = TypeVar("R", bound=Common)


@dataclass(frozen=True, slots=True, eq=False)
class KernelSet(Generic[R]):
    """What the kernels of a call are made from.

    Attributes:
        recipe: of the rows.
        piece_tile: over the same columns, for pieces.
        whole: recipe of putting pieces together.
        entries: makes kernels that go over entries.
        combination: makes the kernel that puts pieces together.
    """

    recipe: R
    piece_tile: Tile
    whole: R
    entries: Callable[[R], Any]
    combination: Callable[[R], Any]


class Tasks(Generic[R]):
    """Launches a set of kernels: over the rows of a graph, and over the pieces of long ones.

    Args:
        kernels: to launch, on operands that agree in dtypes and strides in every call.
        slices: programs that share a row.
    """

    def __init__(self, kernels: KernelSet[R], slices: int) -> None:
        self._kernels: KernelSet[R] = kernels
        self._slices = slices
        self._rows: dict[tuple[bool, bool], Kernel] = {}

    def append_to(
        self,
        sequence: Sequence,
        csr: CSR,
        operands: list[tuple[Slot, int]],
        stored: list[Slot],
        sizes: tuple[int, ...],
        *,
        direct: list[Slot],
        raw: list[tuple[int, torch.dtype]],
        before: SequenceOf[Any],
        after: SequenceOf[Any],
    ) -> None:
        """Append the launches on a graph.

        Args:
            sequence: to append to.
            csr: the graph.
            operands: each with its stride.
            stored: where results go.
            sizes: what the kernels take behind the number of tasks.
            direct: those of the results that pieces store as well.
            raw: columns and dtype of what else there is of a piece.
            before: what the kernel that puts pieces together takes before them.
            after: what it takes behind them.
        """
        tile, piece_tile = self._kernels.recipe.tile, self._kernels.piece_tile
        schedule = schedule_of(csr, tile.split, tile.piece, ordered=tile.rows > 1)
        order, pieces = schedule.order, schedule.pieces
        eid = csr.eid if self._kernels.recipe.numbered else None
        arrays = (csr.rowptr, csr.col, eid)
        read = [argument for pair in operands for argument in pair]
        rows, last = csr.num_rows, (*sizes, tile.split)
        sequence.launch(
            self._over_rows(ordered=order is not None, cut=pieces is not None),
            (-(-rows // tile.rows), self._slices),
            (*arrays, order, None, None, *read, *stored, rows, *last),
        )
        if pieces is None:
            return
        count = pieces.row.numel()
        states = [sequence.scratch((count, columns), dtype) for columns, dtype in raw]
        sequence.launch(
            self._over_pieces, (-(-count // piece_tile.rows), self._slices),
            (*arrays, pieces.row, pieces.begin, pieces.end, *read, *states, *direct, count, *last),
        )  # fmt: skip
        if states:
            grid = (pieces.rows.numel(), self._slices)
            arguments = (*before, pieces.rows, pieces.first, *states, *after)
            sequence.launch(self._combination, grid, arguments)

    def _over_rows(self, *, ordered: bool, cut: bool) -> Kernel:
        kernel = self._rows.get((ordered, cut))
        if kernel is None:
            recipe = replace(self._kernels.recipe, tasks="order" if ordered else "rows", hubs=cut)
            kernel = Kernel(self._kernels.entries(recipe), recipe.tile.warps)
            self._rows[ordered, cut] = kernel
        return kernel

    @cached_property
    def _combination(self) -> Kernel:
        return Kernel(self._kernels.combination(self._kernels.whole))

    @cached_property
    def _over_pieces(self) -> Kernel:
        kernels = self._kernels
        recipe = replace(kernels.recipe, tasks="pieces", tile=kernels.piece_tile)
        return Kernel(kernels.entries(recipe), recipe.tile.warps)
