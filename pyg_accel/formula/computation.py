"""What a call computes for its messages: what reports show, and cost models read."""

from collections.abc import Iterable
from dataclasses import dataclass

from pyg_accel.formula.language import Formula

__all__ = ["NETWORK", "OUTER", "Computation", "text_of"]

# Operators that no formula expresses, as reports show them.
NETWORK, OUTER = "network(edges)", "outer(u0,e1) @ weight"


@dataclass(frozen=True, slots=True)
class Computation:
    """A reduction of messages over the edges of each target, or messages that are written out.

    ``str`` is what the report shows, e.g. ``mean_j u0``.

    Attributes:
        formula: of the messages, or of the values of attention; None of weights alone.
        reduces: the reductions; none if messages are written out.
        score: formula of scores; messages are weighted by their softmax over the edges of a target.
        operator: an operator in place of a formula, such as :data:`NETWORK`.
        relations: number of graphs that are stacked, if they are.
        in_blocks: the operator runs on the edges of one block after another.
        columns: number of features that are read of each source, if those are compressed.
        linear_bytes: bytes of a row of what PyG's path makes of every edge by linear layers of
            both ends, which run on the nodes, or of the matrix of its relation; 0 without either.
        linear_terms: number of linear layers on the nodes, beyond one for each of PyG's.
        products: number of products with the matrices of relations.
        note: on the sample that is reduced.
    """

    formula: Formula | None = None
    reduces: tuple[str, ...] = ()
    score: Formula | None = None
    operator: str = ""
    relations: int = 0
    in_blocks: bool = False
    columns: int = 0
    note: str = ""
    linear_bytes: int = 0
    linear_terms: int = 0
    products: int = 0

    def __str__(self) -> str:
        text = self.operator or ("" if self.formula is None else f"{self.formula}")
        if self.columns:
            text = text.replace("u0", f"maxk(u0,{self.columns})")
        if self.score is not None:
            weights = f"softmax_j({self.score})"
            text = f"mul({weights},{text})" if text else weights
        reduces = f"{'+'.join(self.reduces)}_j " if self.reduces else ""
        stacked = f", {self.relations} relations" if self.relations else ""
        return f"{reduces}{text}{stacked}{', in blocks' if self.in_blocks else ''}{self.note}"


def text_of(computations: Iterable[Computation]) -> str:
    """Return what the report shows of several computations, each once."""
    return "; ".join(dict.fromkeys(map(str, computations)))
