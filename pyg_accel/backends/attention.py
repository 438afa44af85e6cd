"""What a backend is given for the backward pass of attention."""

from typing import NamedTuple

from torch import Tensor

from pyg_accel.formula import Formula

__all__ = ["AttentionGradient"]


class AttentionGradient(NamedTuple):
    """One backward pass, over the transposed graph or over the graph itself.

    Attributes:
        score: of attention, as the graph of the pass sees it: in the transposed graph, what targets
            own has side u.
        value: likewise.
        operands: of attention.
        grad: [targets, H, F], of the result.
        out: [targets, H, F], the result.
        total: [targets, H], the second result.
        gradients: formulas to sum over each row. With n operands, operand n is ``grad``, operand
            n + 1 the weight of an edge and n + 2 the gradient of its score.
        of: the operand that each is the gradient of.
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
    of: list[int]
    want_scores: bool
    want_weights: bool
