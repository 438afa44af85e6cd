"""The kernels that work on the rows of one recipe, and on the pieces of those that are too long."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pyg_accel.backends.triton.attention_recipe import AttentionRecipe
from pyg_accel.backends.triton.launch import Tile
from pyg_accel.backends.triton.recipe import Recipe

__all__ = ["KernelSet"]

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
