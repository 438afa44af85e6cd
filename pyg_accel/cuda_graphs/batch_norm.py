"""Batch normalisation over the real rows of a padded tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["masked_batch_norm"]


def masked_batch_norm(
    x: Tensor,
    real: Tensor,
    count: Tensor,
    groups: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise by the statistics of the real rows, and let the running ones follow.

    Args:
        x: [R, C, ...].
        real: [R] bool, the rows that count; the first must.
        count: [], how many they are.
        groups: [2] float, the number of all rows, and that of the others with a minus before it.
        running_mean: [C] or None; changed in place, like running_var.
        running_var: [C] or None.
        weight: [C] or None.
        bias: [C] or None.
        momentum: how far running statistics move.
        eps: added to the variance.

    Returns:
        [R, C, ...]; rows of padding hold finite numbers of no meaning.
    """
    if x.is_cuda and x.dim() == 2 and x.dtype != torch.float64:
        stats = (running_mean, running_var)
        fused: Tensor = _FusedBatchNorm.apply(  # type: ignore[no-untyped-call]
            x.contiguous(), real, count, groups, weight, bias, stats, momentum, eps
        )
        return fused
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    dims = [dim for dim in range(x.dim()) if dim != 1]
    each = (1, -1, *[1] * (x.dim() - 2))  # how a number for each channel is broadcast
    keep = real.view(-1, *[1] * (x.dim() - 1))
    total = count.to(wide.dtype) * x[0, 0].numel()
    mean = wide.masked_fill(~keep, 0).sum(dims) / total
    centred = wide - mean.view(each)
    var = centred.masked_fill(~keep, 0).square().sum(dims) / total
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean) * momentum)
        if running_var is not None:
            unbiased = var * (total / (total - 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var) * momentum)
    out = centred * (var + eps).rsqrt().view(each)
    if weight is not None:
        out = out * weight.view(each)
    if bias is not None:
        out = out + bias.view(each)
    return out.to(x.dtype)


class _FusedBatchNorm(torch.autograd.Function):
    """The same by the CUDA kernels that torch has for synchronised batch normalisation.

    They join the statistics of groups of rows. Here one group is all rows, with the padding set to
    a copy of the first row, and the other is that padding, joined with a negative count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        real: Tensor,
        count: Tensor,
        groups: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> Tensor:
        keep = real.view(-1, 1)
        filled = torch.where(keep, x, x[:1])
        mean, scale = torch.batch_norm_stats(filled, eps)
        means = torch.stack([mean, x[0].to(mean.dtype)])
        scales = torch.stack([scale, torch.full_like(scale, eps**-0.5)])
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            filled, means, scales, *stats, momentum, eps, groups
        )
        ctx.save_for_backward(x, keep, count, weight, mean, scale)
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, keep, count, weight, mean, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad.contiguous()
        total, along, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, scale, weight, needs[0], needs[4], needs[5]
        )
        of_x = None
        if needs[0]:
            of_x = torch.batch_norm_backward_elemt(
                grad, x, mean, scale, weight, total, along, count.to(torch.int32).view(1)
            )
            of_x = of_x.masked_fill(~keep, 0)
        affine = of_weight if needs[4] else None, of_bias if needs[5] else None
        return of_x, None, None, None, *affine, None, None, None
