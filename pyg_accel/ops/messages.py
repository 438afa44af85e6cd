"""Written messages of formulas with inner sums over the width."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from pyg_accel.formula import Formula, Operand, Sum, map_children, renumbered
from pyg_accel.graph import Graph
from pyg_accel.ops.gspmm import gspmm

__all__ = ["message_calls", "messages"]


# A call of gspmm whose result is a new operand: its formula and operands.
MessageCall = tuple[str, tuple[int, ...]]


@lru_cache(maxsize=1024)
def message_calls(formula: Formula, count: int) -> tuple[tuple[MessageCall, ...], int]:
    """Return the calls that compute a formula, and the operand with its result.

    Inner sums are computed first, E x H each, so that a kernel has one width.
    """
    calls: list[MessageCall] = []

    def written(plain: Formula) -> int:
        (text,), used = renumbered(plain)
        calls.append((str(text), used))
        return count + len(calls) - 1

    def change(part: Formula) -> Formula:
        changed = map_children(part, change)
        return Operand("e", written(changed)) if isinstance(changed, Sum) else changed

    formula = change(formula)
    if isinstance(formula, Operand) and formula.side == "e":
        return tuple(calls), formula.index
    last = written(formula)
    return tuple(calls), last


def messages(
    graph: Graph, formula: Formula, operands: Sequence[Tensor], *, edge_order: bool
) -> Tensor:
    """Compute [E, H, F] of a formula over operands [rows, H | 1, F | 1]."""
    operands = list(operands)
    calls, last = message_calls(formula, len(operands))
    for text, used in calls:
        out = gspmm(graph, text, [operands[i] for i in used], reduce="none", edge_order=edge_order)
        operands.append(out if out.dim() == 3 else out.unsqueeze(-1))
    return operands[last]
