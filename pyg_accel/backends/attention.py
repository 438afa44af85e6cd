"""What a backend is given for the backward pass of attention."""

from typing import NamedTuple

from torch import Tensor

from pyg_accel.formula import Formula

__all__ = ["AttentionGradient"]


class AttentionGradient(NamedTuple):
    """One backward pass, as the transposed graph sees it.

    Attributes:
        score: of attention; what its targets own has side u here.
        value: likewise.
        operands: of attention.
        grad: [num_cols, H, F], of the result.
        out: [num_cols, H, F], the result.
        total: [num_cols, H], the second result.
        gradients: formulas to sum over each row. With n operands, operand n is ``grad``, operand
            n + 1 the weight of an edge and n + 2 the gradient of its score.
        want_scores: return the gradients of scores.
        want_weights: return the weights.
    """

    score: Formula
    value: Formula
    operands: list[Tensor]
    grad: Tensor
    out: Tensor
    total: Tensor
    gradients: list[Formula]
    want_scores: bool
    want_weights: bool
