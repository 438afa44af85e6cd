"""Attention and its gradients, as they are defined."""

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.reference.messages import evaluate, places_of
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR

__all__ = ["gradients", "run"]


def run(csr: CSR, score: Formula, value: Formula, operands: list[Tensor]) -> list[Tensor]:
    """See :meth:`pyg_accel.backends.Backend.attention`."""
    dtype = operands[0].dtype
    wide = [t.float() if dtype.itemsize == 2 else t for t in operands]
    place = places_of(csr)
    scores = evaluate(score, wide, place)
    values = evaluate(value, wide, place)
    heads = max(scores.size(1), values.size(1))
    scores, index = scores.expand(-1, heads, 1), place["v"].view(-1, 1, 1).expand(-1, heads, 1)
    zeros = scores.new_zeros(csr.num_rows, heads, 1)
    most = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    shares = (scores - most.gather(0, index)).exp()
    sums = zeros.scatter_add(0, index, shares)
    message = shares / sums.gather(0, index) * values
    out = message.new_zeros(csr.num_rows, *message.shape[1:]).index_add_(0, place["v"], message)
    return [out.to(dtype), (most + sums.log()).squeeze(-1)]


def gradients(csr: CSR, call: AttentionGradient, side: str) -> list[Tensor]:
    """A backward pass over a graph whose targets, those of the softmax, are of a side."""
    dtype = call.grad.dtype
    given = (*call.operands, call.grad, call.out)
    wide = [t.float() if dtype.itemsize == 2 else t for t in given]
    grad, out = wide[-2:]
    place = places_of(csr)
    target, eid = place[side], place["e"]
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
