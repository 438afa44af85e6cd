"""The arguments of a backend's backward pass of attention."""

from typing import NamedTuple

from torch import Tensor

from pyg_accel.formula import Formula

__all__ = ["AttentionGradient"]


class AttentionGradient(NamedTuple):
    """The backward pass, over the transposed graph: several formulas, as of ``gspmm_several``.

    With n operands, operand n of the formulas is ``grad``, n + 1 is ``largest``, n + 2 ``inverse``
    and n + 3 the dot product of a target's result and gradient, [targets, H, 1]; all of side u.

    Attributes:
        score: of attention on the transposed graph: features of targets have side u.
        value: likewise.
        sums: formulas to sum over each row.
        stores: formulas of one number per edge and head, to return for every edge.
        operands: of attention.
        grad: [targets, H, F], of the result.
        out: [targets, H, F], the result.
        largest: [targets, H, 1], the second result.
        inverse: [targets, H, 1], the third result.
    """

    score: Formula
    value: Formula
    sums: tuple[Formula, ...]
    stores: tuple[Formula, ...]
    operands: list[Tensor]
    grad: Tensor
    out: Tensor
    largest: Tensor
    inverse: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs: operands, the results and the gradient of the first."""
        return [*self.operands, self.out, self.largest, self.inverse, self.grad]
