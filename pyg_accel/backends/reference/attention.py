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
        [num_rows, H, F], 0 for empty rows; and [num_rows, H], the logsumexp of the scores of each
        row (undefined for empty rows), in float64 for float64 operands and in float32 for others.
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
    return [out.to(dtype), (largest + sums.log()).squeeze(-1)]


def attention_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Sum gradients of the operands of rows, over the transposed graph.

    Returns:
        [num_rows, H, F | 1] per formula; then gradients of scores and weights, if wanted, [E, H, 1]
        in the order of ``csr.eid``.
    """
    dtype = call.grad.dtype
    wide = [widened(t) for t in (*call.operands, call.grad, call.out)]
    grad, out = wide[-2:]
    place = places_of(csr)
    target, eid = place["u"], place["e"]
    weights = (evaluate(call.score, wide, place) - call.total.unsqueeze(-1)[target]).exp()
    inner = (grad[target] * evaluate(call.value, wide, place)).sum(-1, keepdim=True)
    delta = (grad * out).sum(-1, keepdim=True)
    of_scores = weights * (inner - delta[target])
    by_edge = [torch.empty_like(t).index_copy_(0, eid, t) for t in (weights, of_scores)]
    tensors = [*wide[:-1], *by_edge]
    results = []
    for formula in call.gradients:
        part = evaluate(formula, tensors, place)
        part = part.expand(-1, grad.size(1), -1)
        results.append(part.new_zeros(csr.num_rows, *part.shape[1:]).index_add_(
            0, place["v"], part))  # fmt: skip
    results += [by_edge[1]] * call.want_scores + [by_edge[0]] * call.want_weights
    return [t.to(dtype) for t in results]
