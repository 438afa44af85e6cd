"""Evaluates the messages of formulas, with a row per edge."""

import torch
from torch import Tensor

from pyg_accel.formula import Const, Formula, Operand, Sum, Unary
from pyg_accel.formula.functions import FUNCTIONS
from pyg_accel.graph import CSR, ptr2index

__all__ = ["evaluate", "places_of"]


def places_of(csr: CSR) -> dict[str, Tensor]:
    """Return, for each side, the rows of operands that the entries read."""
    col = csr.col.long()
    eid = torch.arange(col.numel(), device=col.device) if csr.eid is None else csr.eid.long()
    return {"u": col, "v": ptr2index(csr.rowptr, csr.col.numel()), "e": eid}


def evaluate(formula: Formula, operands: list[Tensor], place: dict[str, Tensor]) -> Tensor:
    """Return the messages [E, H, F] of a formula."""
    match formula:
        case Operand(side=side, index=index):
            return operands[index].index_select(0, place[side])
        case Const(value=value):
            like = next(t for t in operands if t.is_floating_point())
            return torch.full((1, 1, 1), value, dtype=like.dtype, device=like.device)
        case Sum(arg=arg):
            return evaluate(arg, operands, place).sum(-1, keepdim=True)
        case Unary(op=op, arg=arg, value=value):
            args = (evaluate(arg, operands, place), value)
            function = FUNCTIONS[op]
            result: Tensor = function.torch(*args[: 1 + function.parameter])
            return result
    left = evaluate(formula.left, operands, place)
    right = evaluate(formula.right, operands, place)
    if formula.op == "sel":
        return torch.where(right == place["e"].view(-1, 1, 1), left, 0)
    combined: Tensor = FUNCTIONS[formula.op].torch(left, right)
    return combined
