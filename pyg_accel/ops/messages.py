"""Messages that are written out, of formulas with sums over the width inside."""

from collections.abc import Sequence

from torch import Tensor

from pyg_accel.formula import (
    Formula,
    Operand,
    Sum,
    has_sum,
    map_children,
    map_operands,
    operands_of,
)
from pyg_accel.graph import Graph
from pyg_accel.ops.gspmm import gspmm

__all__ = ["messages"]


def messages(
    graph: Graph, formula: Formula, operands: Sequence[Tensor], *, edge_order: bool
) -> Tensor:
    """Compute [E, H, F] of a formula over operands [rows, H | 1, F | 1].

    Sums inside the formula are computed first, E x H each: no kernel has to hold two widths.
    """
    operands = list(operands)

    def change(part: Formula) -> Formula:
        changed = map_children(part, change)
        if not isinstance(changed, Sum):
            return changed
        operands.append(written(changed))
        return Operand("e", len(operands) - 1)

    def written(plain: Formula) -> Tensor:
        used = list(dict.fromkeys(o.index for o in operands_of(plain)))
        own = map_operands(plain, lambda o: Operand(o.side, used.index(o.index)))
        given = [operands[i] for i in used]
        out: Tensor = gspmm(graph, own, given, reduce="none", edge_order=edge_order)
        return out.unsqueeze(-1) if isinstance(plain, Sum) else out

    if isinstance(formula, Sum) and not has_sum(formula.arg):
        return written(formula)
    formula = change(formula)
    if isinstance(formula, Operand) and formula.side == "e":
        return operands[formula.index]
    return written(formula)
