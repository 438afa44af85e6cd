"""What a generated kernel that holds whole heads depends on, as data."""

from dataclasses import dataclass

from pyg_accel.backends.triton.launch import Tile
from pyg_accel.formula import Formula

__all__ = ["AttentionRecipe"]


@dataclass(frozen=True, slots=True)
class AttentionRecipe:
    """Everything that the text of a kernel depends on.

    Attributes:
        score: of attention, one number an edge and head; None in a pass of several formulas.
        value: of attention, what is added up.
        sums: formulas to add up.
        widths: of each, whether it has columns.
        stores: formulas of one number an edge and head to store where their edges lie. Sums over
            the width, in all formulas, are of more than one column.
        infinite: operand that entries which are not there read as infinity: by their formulas the
            messages of such entries are 0 then. -1 if there is none.
        kinds: of each operand: ``full``, ``head`` [rows, H, 1], ``feature`` [rows, 1, F] or
            ``number`` [rows, 1, 1].
        aligned: of each operand: row strides are counted in units of so many elements; 0 means a
            stride of one element.
        near: of each operand: offsets fit 32 bits.
        tile: rows, lanes, unroll; ``columns`` is the width of a head, rounded up.
        heads: of a program.
        tasks: ``rows``, ``order`` (rows in a given order) or ``pieces`` (of long rows, whose
            results stay raw).
        hubs: rows above the limit are left to others.
        numbered: entries have edge numbers of their own.
        unit: columns are counted in units of so many elements.
        even_heads: the last program has all its heads.
        even_width: a head fills its columns.
        accumulate: dtype of sums.
        position: dtype of positions in ``col``.
    """

    score: Formula | None
    value: Formula
    sums: tuple[Formula, ...]
    widths: tuple[bool, ...]
    stores: tuple[Formula, ...]
    infinite: int
    kinds: tuple[str, ...]
    aligned: tuple[int, ...]
    near: tuple[bool, ...]
    tile: Tile
    heads: int
    tasks: str
    hubs: bool
    numbered: bool
    unit: int
    even_heads: bool
    even_width: bool
    accumulate: str
    position: str

    @property
    def states(self) -> tuple[tuple[str, bool], ...]:
        """What a program keeps for each row: (name, whether it has columns)."""
        if self.score is not None:
            return ("acc", True), ("most", False), ("total", False)
        return tuple((f"acc{k}", wide) for k, wide in enumerate(self.widths))
