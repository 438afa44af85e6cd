"""Definitions of attention and its gradients."""

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.dtypes import widened
from pyg_accel.backends.reference.messages import evaluate, places_of
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR

__all__ = ["attention", "attention_backward"]


def attention(csr: CSR, score: Formula, value: Formula, operands: list[Tensor]) -> list[Tensor]:
    """Sum values weighted by the softmax of scores over each row.

    Args:
        csr: the graph.
        score: one number per edge and head.
        value: of every edge; without sums over the width.
        operands: of both, by operand index.

    Returns:
        [num_rows, H, F], 0 for empty rows; and for the weights, ``exp(score - largest) * inverse``,
        the largest score of each row and the inverse of the sum of the exponentials, [num_rows, H]
        (undefined for empty rows), in float64 for float64 operands and in float32 for others. Their
        logarithm together would lose the sum beside a large score.
    """
    dtype, wide = operands[0].dtype, [widened(t) for t in operands]
    place = places_of(csr)
    scores = evaluate(score, wide, place)
    values = evaluate(value, wide, place)
    heads = max(scores.size(1), values.size(1))
    scores, index = scores.expand(-1, heads, 1), place["v"].view(-1, 1, 1).expand(-1, heads, 1)
    zeros = scores.new_zeros(csr.num_rows, heads, 1)
    largest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    shares = (scores - largest.gather(0, index)).exp()
    sums = zeros.scatter_add(0, index, shares)
    message = shares / sums.gather(0, index) * values
    out = message.new_zeros(csr.num_rows, *message.shape[1:]).index_add_(0, place["v"], message)
    return [out.to(dtype), largest.squeeze(-1), sums.reciprocal().squeeze(-1)]


def attention_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Evaluate formulas over the transposed graph.

    Returns:
        [num_rows, H, F | 1] per sum; [E, H, 1] in the order of ``csr.eid`` for what is stored.
    """
    *operands, grad, out = (widened(t) for t in (*call.operands, call.grad, call.out))
    delta = (grad * out).sum(-1, keepdim=True)
    tensors, place = [*operands, grad, call.largest, call.inverse, delta], places_of(csr)
    results = []
    for formula in call.sums:
        part = evaluate(formula, tensors, place).expand(-1, grad.size(1), -1)
        zeros = part.new_zeros(csr.num_rows, *part.shape[1:])
        results.append(zeros.index_add_(0, place["v"], part))
    for formula in call.stores:
        part = evaluate(formula, tensors, place)
        results.append(torch.empty_like(part).index_copy_(0, place["e"], part))
    return [t.to(call.grad.dtype) for t in results]
