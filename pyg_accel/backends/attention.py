"""The arguments and results of a backend's backward pass of attention."""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from pyg_accel.formula import Binary, Formula, Operand, Sum, Unary, map_operands

__all__ = ["AttentionGradient", "gradient_formulas"]


class AttentionGradient(NamedTuple):
    """The backward pass, over the transposed graph.

    Attributes:
        score: of attention, as the transposed graph sees it: what targets own has side u.
        value: likewise.
        operands: of attention.
        grad: [targets, H, F], of the result.
        out: [targets, H, F], the result.
        total: [targets, H], the second result.
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

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads: operands, both results and the gradient of the first."""
        return [*self.operands, self.out, self.total, self.grad]

    def formulas(self) -> tuple[tuple[Formula, ...], tuple[Formula, ...]]:
        """Return :func:`gradient_formulas` of it."""
        return gradient_formulas(
            self.score, self.value, tuple(self.gradients), len(self.operands) + 1,
            want_scores=self.want_scores, want_weights=self.want_weights,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def gradient_formulas(
    score: Formula,
    value: Formula,
    gradients: tuple[Formula, ...],
    count: int,
    *,
    want_scores: bool,
    want_weights: bool,
) -> tuple[tuple[Formula, ...], tuple[Formula, ...]]:
    """Return what is summed up over each row, and what is left behind for every edge.

    The weight of an edge is ``exp(score - total)``, the gradient of its score ``weight * (sum(grad
    * value) - delta)``, with ``delta`` the dot product of a target's result and gradient.

    Args:
        score: as in :class:`AttentionGradient`, and so are the others.
        value: what is added up.
        gradients: to sum.
        count: of operands, ``grad`` included. Two more follow: ``total`` and ``delta``, [targets,
            H], both of side u.
        want_scores: leave the gradients of scores behind.
        want_weights: leave the weights behind.
    """
    grad, total, delta = (Operand("u", count + i) for i in (-1, 0, 1))
    weight: Formula = Unary("exp", Binary("sub", score, total))
    inner = Sum(Binary("mul", grad, value))
    of_score: Formula = Binary("mul", weight, Binary("sub", inner, delta))
    made = {count: weight, count + 1: of_score}
    sums = tuple(map_operands(f, lambda o: made.get(o.index, o)) for f in gradients)
    return sums, (of_score,) * want_scores + (weight,) * want_weights
