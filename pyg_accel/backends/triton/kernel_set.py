"""The kernels that work on the rows of one recipe, and on the pieces of those that are too long."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pyg_accel.backends.schedule import Pieces, schedule_of
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.launcher import Launcher, launch
from pyg_accel.backends.triton.recipe import Common
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
        self._rows: dict[tuple[bool, bool, bool], Launcher] = {}

    def __call__(
        self,
        csr: CSR,
        operands: list[tuple[Tensor, int]],
        stored: list[Tensor],
        sizes: tuple[int, ...],
        *,
        direct: list[Tensor],
        raw: list[tuple[int, torch.dtype]],
        before: Sequence[Any],
        after: Sequence[Any],
    ) -> None:
        """Go over a graph.

        Args:
            csr: the graph.
            operands: each with its stride.
            stored: where results go.
            sizes: what the kernels take behind the number of tasks.
            direct: those of the results that pieces store as well.
            raw: columns and dtype of what else there is of a piece.
            before: what the kernel that puts pieces together takes before them.
            after: what it takes behind them.
        """
        tile = self._kernels.recipe.tile
        schedule = schedule_of(csr, tile.split, tile.piece, ordered=tile.rows > 1)
        pieces = schedule.pieces
        self._over_rows(csr, schedule.order, operands, stored, sizes, cut=pieces is not None)
        if pieces is None:
            return
        count = pieces.row.numel()
        states: list[Tensor] = [
            csr.col.new_empty((count, columns), dtype=dtype) for columns, dtype in raw
        ]
        self._over_pieces(csr, pieces, operands, [*states, *direct], sizes)
        if states:
            arguments = [*before, pieces.rows, pieces.first, *states, *after]
            launch(self._combination, (pieces.rows.numel(), self._slices), arguments)

    @cached_property
    def _combination(self) -> Any:
        return self._kernels.combination(self._kernels.whole)

    @cached_property
    def _pieces(self) -> Any:
        kernels = self._kernels
        return kernels.entries(replace(kernels.recipe, tasks="pieces", tile=kernels.piece_tile))

    def _over_rows(
        self,
        csr: CSR,
        order: Tensor | None,
        operands: Iterable[tuple[Tensor, int]],
        stored: Sequence[Tensor],
        sizes: tuple[int, ...],
        *,
        cut: bool,
    ) -> None:
        tile, eid, rows = self._kernels.recipe.tile, self._eid(csr), csr.num_rows
        arguments: list[Any] = [csr.rowptr, csr.col, eid, order, None, None]
        tensors = [csr.rowptr, csr.col, *stored]
        for operand, stride in operands:
            arguments += (operand, stride)
            tensors.append(operand)
        tensors += [t for t in (eid, order) if t is not None]
        key = (order is None, cut, rows < 2**31)
        launcher = self._rows.get(key)
        if launcher is None:
            recipe, tasks = self._kernels.recipe, "rows" if order is None else "order"
            kernel = self._kernels.entries(replace(recipe, tasks=tasks, hubs=cut))
            launcher = self._rows[key] = Launcher(kernel, tile.warps)
        grid = (-(-rows // tile.rows), self._slices, 1)
        launcher(grid, [*arguments, *stored, rows, *sizes, tile.split], tensors)

    def _over_pieces(
        self,
        csr: CSR,
        pieces: Pieces,
        operands: Iterable[tuple[Tensor, int]],
        stored: Sequence[Tensor],
        sizes: tuple[int, ...],
    ) -> None:
        tile, count = self._kernels.piece_tile, pieces.row.numel()
        arguments: list[Any] = [csr.rowptr, csr.col, self._eid(csr)]
        arguments += [pieces.row, pieces.begin, pieces.end]
        for pair in operands:
            arguments += pair
        arguments += [*stored, count, *sizes, tile.split]
        grid = (-(-count // tile.rows), self._slices)
        launch(self._pieces, grid, arguments, warps=tile.warps)

    def _eid(self, csr: CSR) -> Tensor | None:
        return csr.eid if self._kernels.recipe.numbered else None
