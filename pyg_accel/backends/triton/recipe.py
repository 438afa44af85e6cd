"""What a generated kernel depends on, as data."""

from dataclasses import dataclass

from pyg_accel.backends.triton.launch import Tile
from pyg_accel.formula import Formula

__all__ = ["ACCUMULATORS", "START", "Recipe", "states_of", "winning"]

# What a program keeps for each reduction; a sum and a mean share theirs.
ACCUMULATORS = {
    "sum": "total",
    "mean": "total",
    "sqsum": "squares",
    "prod": "product",
    "max": "most",
    "min": "least",
}
START = {"total": "0.0", "squares": "0.0", "product": "1.0",
          "most": 'float("-inf")', "least": 'float("inf")'}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the text of a kernel depends on.

    Attributes:
        formula: the message, without sums; summed over the width if ``dot``.
        kinds: of each operand: ``full``, ``head`` [rows, H, 1], ``feature`` [rows, 1, F] or
            ``number`` [rows, 1, 1].
        aligned: of each operand: row strides are counted in units of so many elements; 0 means a
            stride of one element.
        near: of each operand: offsets fit 32 bits.
        reduces: as in the backend's ``gspmm``.
        winners: positions (``at``), source ids (``col``) or none (``""``) of maxima and minima.
        tile: of a program.
        tasks: ``rows``, ``order`` (rows in a given order) or ``pieces`` (of long rows, whose
            results stay raw).
        hubs: rows above the limit are left to others.
        numbered: entries have edge numbers of their own.
        heads: a tile has ``one`` head, several whole ones (``whole``), or parts (``mixed``).
        columns: columns are counted in units of so many elements.
        even: the last tile of columns is full.
        dot: messages are summed over the width.
        adds: results are added to what is there (``dot``).
        accumulate: dtype of sums.
        position: dtype of positions in ``col``.
    """

    formula: Formula
    kinds: tuple[str, ...]
    aligned: tuple[int, ...]
    near: tuple[bool, ...]
    reduces: tuple[str, ...]
    winners: str
    tile: Tile
    tasks: str
    hubs: bool
    numbered: bool
    heads: str
    columns: int
    even: bool
    dot: bool
    adds: bool
    accumulate: str
    position: str


def states_of(reduces: tuple[str, ...], winners: str) -> tuple[str, ...]:
    """Return what a program keeps: accumulators, and positions of winners."""
    kept = tuple(dict.fromkeys(ACCUMULATORS[r] for r in reduces if r != "none"))
    at = tuple(f"{name}_at" for name in kept if winners and name in ("most", "least"))
    return kept + at


def winning(recipe: Recipe) -> list[tuple[int, str]]:
    """Reductions that have winners: (index, accumulator)."""
    if not recipe.winners:
        return []
    return [(i, ACCUMULATORS[r]) for i, r in enumerate(recipe.reduces) if r in ("max", "min")]
