"""Which message formulas are sparse products that the kernels have."""

from dataclasses import dataclass
from functools import lru_cache

from pyg_accel.formula import Binary, Formula, Operand, Sum

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

    match formula:
        case Operand(side="u") if reduces in (("sum",), ("mean",)):
            return Product(formula.index)
        case Binary(op="mul", left=Operand() as a, right=Operand() as b) if reduces in (
            ("sum",), ("mean",),
        ):  # fmt: skip
            source, weight = (a, b) if a.side == "u" else (b, a)
            narrow = bool(shapes) and shapes[weight.index][1] == 1
            if (source.side, weight.side) == ("u", "e") and narrow and full(source.index):
                return Product(source.index, weight.index)
        case Sum(arg=Binary(op="mul", left=Operand() as a, right=Operand() as b)) if reduces == (
            "none",
        ):
            target, source = (a, b) if a.side == "v" else (b, a)
            if (target.side, source.side) == ("v", "u") and full(a.index) and full(b.index):
                return Product(source.index, target=target.index, dot=True)
    return None
