"""Which message formulas are sparse products that the kernels have."""

from dataclasses import dataclass
from functools import lru_cache

from pyg_accel.formula import Formula, dot_ends, weighted_source

__all__ = ["Product", "product_of"]


@dataclass(frozen=True, slots=True)
class Product:
    """Operands by index: a sum of weighted sources, or dots of targets and sources."""

    source: int
    weight: int | None = None
    target: int = -1
    dot: bool = False


@lru_cache(maxsize=1024)
def product_of(
    formula: Formula, shapes: tuple[tuple[int, int], ...], reduces: tuple[str, ...]
) -> Product | None:
    """Return how a formula is a product, or None.

    Args:
        formula: the message.
        shapes: (heads, width) of the operands; nothing if they are all of full size.
        reduces: reductions.
    """

    def full(index: int) -> bool:
        return not shapes or shapes[index] == (
            max(h for h, _ in shapes), max(f for _, f in shapes)
        )  # fmt: skip

    if reduces == ("none",):
        ends = dot_ends(formula)
        if ends is not None and full(ends[0]) and full(ends[1]):
            return Product(ends[1], target=ends[0], dot=True)
    elif reduces in (("sum",), ("mean",)) and (pair := weighted_source(formula)) is not None:
        source, weight = pair
        narrow = weight is None or (bool(shapes) and shapes[weight][1] == 1 and full(source))
        return Product(source, weight) if narrow else None
    return None
