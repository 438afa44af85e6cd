"""Everything that the text of a generated kernel depends on, as data."""

from dataclasses import dataclass

from pyg_accel.backends.triton.launch import Tile
from pyg_accel.formula import Formula

__all__ = ["ACCUMULATORS", "START", "AttentionRecipe", "Common", "Recipe", "states_of", "winning"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all kernels depend on.

    Attributes:
        kinds: of each operand: ``full``, ``head`` [rows, H, 1], ``feature`` [rows, 1, F] or
            ``number`` [rows, 1, 1].
        aligned: of each operand: row strides are counted in units of so many elements; 0 means a
            stride of one element.
        near: of each operand: offsets fit 32 bits.
        tile: of a program.
        tasks: ``rows``, ``order`` (rows in a given order) or ``pieces`` (of long rows, whose
            results stay raw).
        hubs: rows above the limit are left to others.
        numbered: entries have edge numbers of their own.
        accumulate: dtype of sums.
        position: dtype of positions in ``col``.
    """

    kinds: tuple[str, ...]
    aligned: tuple[int, ...]
    near: tuple[bool, ...]
    tile: Tile
    tasks: str
    hubs: bool
    numbered: bool
    accumulate: str
    position: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Common):
    """Of a kernel that reduces messages.

    Attributes:
        formula: the message, without sums; summed over the width if ``dot``.
        reduces: as in the backend's ``gspmm``.
        winners: positions (``at``), source ids (``col``) or none (``""``) of maxima and minima.
        heads: a tile has ``one`` head, several whole ones (``whole``), or parts (``mixed``).
        columns: columns are counted in units of so many elements.
        even: the last tile of columns is full.
        dot: messages are summed over the width.
        adds: results are added to what is there (``dot``).
    """

    formula: Formula
    reduces: tuple[str, ...]
    winners: str
    heads: str
    columns: int
    even: bool
    dot: bool
    adds: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecipe(Common):
    """Of a kernel that holds whole heads.

    Attributes:
        score: of attention, one number per edge and head; None in a pass of several formulas.
        value: of attention, what is added up.
        sums: formulas to add up.
        widths: of each, whether it has columns.
        stores: formulas of one number per edge and head to store where their edges lie. Sums over
            the width, in all formulas, are of more than one column.
        infinite: operand that entries which are not there read as infinity: by their formulas the
            messages of such entries are 0 then. -1 if there is none.
        tile: rows, lanes, unroll; ``columns`` is the width of a head, rounded up.
        heads: of a program.
        unit: columns are counted in units of so many elements.
        even_heads: the last program has all its heads.
        even_width: a head fills its columns.
    """

    score: Formula | None
    value: Formula
    sums: tuple[Formula, ...]
    widths: tuple[bool, ...]
    stores: tuple[Formula, ...]
    infinite: int
    heads: int
    unit: int
    even_heads: bool
    even_width: bool

    @property
    def states(self) -> tuple[tuple[str, bool], ...]:
        """What a program keeps for each row: (name, whether it has columns)."""
        if self.score is not None:
            return ("acc", True), ("most", False), ("total", False)
        return tuple((f"acc{k}", wide) for k, wide in enumerate(self.widths))
