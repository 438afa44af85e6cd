"""Passes over the edges of a graph as its edge list has them, without a CSR form."""

from dataclasses import dataclass

from pyg_accel.formula import Formula, operands_of
from pyg_accel.graph.csr import Edges

__all__ = ["Edges", "Output", "Passes", "sides_of"]


@dataclass(frozen=True, slots=True)
class Output:
    """A formula of every edge, and the reduction of its values.

    Attributes:
        formula: over the operands of the call and, behind them, the results of earlier passes.
        side: owner of a row of the result: ``v`` target, ``u`` source, ``e`` edge.
        shape: (heads, width) of the result; values are summed over dimensions of size 1.
        reduce: ``sum``, ``max`` or ``min``; or ``winner``: the edge whose value is the maximum or
            minimum ``of``, or -1. Ties go to the lowest source, then to the first edge in the list.
        of: index of a result of an earlier pass (``winner``).
        trailing: shape of a row of the result, if it is not ``shape``; with as many elements.
        wide: the result has the dtype of sums instead of the dtype of the operands.
        returned: the call returns it; others are read by later passes only.
    """

    formula: Formula
    side: str
    shape: tuple[int, int]
    reduce: str = "sum"
    of: int = -1
    trailing: tuple[int, ...] = ()
    wide: bool = False
    returned: bool = True


Passes = tuple[tuple[Output, ...], ...]


def sides_of(passes: Passes) -> dict[int, str]:
    """Return the side of every operand, and of every result that a later pass reads."""
    outputs = [output for part in passes for output in part]
    sides = {o.index: o.side for output in outputs for o in operands_of(output.formula)}
    return sides | {output.of: output.side for output in outputs if output.of >= 0}
