"""The kernels that work on the rows of one recipe, and on the pieces of those that are too long."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from pyg_accel.backends.schedule import Pieces
from pyg_accel.backends.triton.attention_recipe import AttentionRecipe
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.launcher import Launcher, launch
from pyg_accel.backends.triton.recipe import Recipe
from pyg_accel.graph import CSR

__all__ = ["KernelSet", "Tasks"]

R = TypeVar("R", Recipe, AttentionRecipe)


class KernelSet(Generic[R]):
    """Kernels, made when they are first needed.

    Attributes:
        recipe: of the rows.
        piece_tile: over the same columns, for pieces.
        whole: recipe of putting pieces together.
    """

    def __init__(
        self,
        recipe: R,
        piece_tile: Tile,
        whole: R,
        entries: Callable[[R], Any],
        combination: Callable[[R], Any],
    ) -> None:
        self.recipe: R = recipe
        self.piece_tile = piece_tile
        self.whole: R = whole
        self._entries: Callable[[R], Any] = entries
        self._combination: Callable[[R], Any] = combination
        self._made: dict[tuple[str, bool], Any] = {}

    def rows(self, tasks: str, hubs: bool) -> Any:
        """The kernel that goes over rows."""
        if (tasks, hubs) not in self._made:
            self._made[tasks, hubs] = self._entries(replace(self.recipe, tasks=tasks, hubs=hubs))
        return self._made[tasks, hubs]

    def pieces(self) -> Any:
        """The kernel that goes over pieces of long rows."""
        if ("pieces", False) not in self._made:
            cut = replace(self.recipe, tasks="pieces", tile=self.piece_tile)
            self._made["pieces", False] = self._entries(cut)
        return self._made["pieces", False]

    def combine(self) -> Any:
        """The kernel that puts pieces together."""
        if ("combine", False) not in self._made:
            self._made["combine", False] = self._combination(self.whole)
        return self._made["combine", False]


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

    def rows(
        self,
        csr: CSR,
        order: Tensor | None,
        operands: Iterable[tuple[Tensor, int]],
        stored: Sequence[Tensor],
        sizes: tuple[int, ...],
        *,
        cut: bool,
    ) -> None:
        """Go over the rows.

        Args:
            csr: the graph.
            order: of the rows; None where they are taken as they come.
            operands: each with its stride.
            stored: where results go.
            sizes: what the kernels take behind the number of tasks.
            cut: long rows are left to :meth:`pieces`.
        """
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
            kernel = self._kernels.rows("rows" if order is None else "order", cut)
            launcher = self._rows[key] = Launcher(kernel, tile.warps)
        grid = (-(-rows // tile.rows), self._slices, 1)
        launcher(grid, [*arguments, *stored, rows, *sizes, tile.split], tensors)

    def pieces(
        self,
        csr: CSR,
        pieces: Pieces,
        operands: Iterable[tuple[Tensor, int]],
        stored: Sequence[Tensor],
        sizes: tuple[int, ...],
    ) -> None:
        """Go over the pieces of long rows; arguments are like those of :meth:`rows`."""
        tile, count = self._kernels.piece_tile, pieces.row.numel()
        arguments: list[Any] = [csr.rowptr, csr.col, self._eid(csr)]
        arguments += [pieces.row, pieces.begin, pieces.end]
        for pair in operands:
            arguments += pair
        arguments += [*stored, count, *sizes, tile.split]
        grid = (-(-count // tile.rows), self._slices)
        launch(self._kernels.pieces(), grid, arguments, warps=tile.warps)

    def _eid(self, csr: CSR) -> Tensor | None:
        return csr.eid if self._kernels.recipe.numbered else None
