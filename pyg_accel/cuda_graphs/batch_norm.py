"""Batch normalisation over the real rows of a padded tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RealRows", "masked_batch_norm", "moments"]


class RealRows:
    """A mask of the padding of tensors, and the number of real rows.

    Computed once for all normalisations of a call, as small kernels dominate its time.

    Attributes:
        padding: [R] bool.
        count: [], the number of real rows.
        groups: [2] float, the number of all rows, and minus the number of rows of padding.
        counts: [1] int32, ``count`` in the form that a kernel takes.
    """

    def __init__(self, rows: int, count: Tensor, padding: Tensor | None = None) -> None:
        """By default the first ``count`` rows are real."""
        if padding is None:
            padding = torch.arange(rows, device=count.device) >= count
        self.count, self.padding = count, padding
        self.groups = torch.stack([torch.full_like(count, rows), count - rows]).float()
        self.counts = count.to(torch.int32).view(1)
        self._scales: dict[tuple[int, float], Tensor] = {}

    def scale(self, width: int, eps: float) -> Tensor:
        """Return the inverse standard deviation of equal rows, [width]."""
        if (width, eps) not in self._scales:
            device = self.count.device
            self._scales[width, eps] = torch.full((width,), eps**-0.5, device=device)
        return self._scales[width, eps]


def moments(
    x: Tensor, padding: Tensor, count: Tensor, dims: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean over real rows, the centred rows, and the sum of their squares.

    Args:
        x: [R, ...]; half precision is added up in single.
        padding: [R, 1, ...], True for padding.
        count: [], the number of elements per mean.
        dims: dimensions to reduce; they remain, with size 1.
    """
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    mean = wide.masked_fill(padding, 0).sum(dims, keepdim=True) / count
    centred = wide - mean
    return mean, centred, centred.masked_fill(padding, 0).square().sum(dims, keepdim=True)


def masked_batch_norm(
    x: Tensor, rows: RealRows, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """Normalise by the statistics of the real rows, and update the running ones.

    Args:
        x: [R, C, ...].
        rows: masks of the rows.
        running_mean: [C] or None; changed in place, like running_var.
        running_var: [C] or None.
        weight: [C] or None.
        bias: [C] or None.
        momentum: weight of the new statistics.
        eps: added to the variance.

    Returns:
        [R, C, ...]; rows of padding have finite, meaningless values.
    """
    if x.is_cuda and x.dim() == 2 and x.dtype != torch.float64:
        stats = (running_mean, running_var)
        fused: Tensor = _FusedBatchNorm.apply(  # type: ignore[no-untyped-call]
            x.contiguous(), rows, weight, bias, stats, momentum, eps
        )
        return fused
    dims = [dim for dim in range(x.dim()) if dim != 1]
    per_channel = (1, -1, *[1] * (x.dim() - 2))  # the shape to broadcast a value per channel
    total = rows.count * x[0, 0].numel()
    mean, centred, squares = moments(x, rows.padding.view(-1, *[1] * (x.dim() - 1)), total, dims)
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, squares / (total - 1))):
            if running is not None:
                running.lerp_(now.view(-1).to(running), momentum)
    out = centred * (squares / total + eps).rsqrt()
    if weight is not None:
        out = out * weight.view(per_channel)
    if bias is not None:
        out = out + bias.view(per_channel)
    return out.to(x.dtype)


class _FusedBatchNorm(torch.autograd.Function):
    """:func:`masked_batch_norm` with torch's CUDA kernels for synchronised batch normalisation.

    They combine the statistics of groups of rows. One group has all rows, with padding set to
    copies of the first row; the other has the padding, with a negative count.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: RealRows, weight: Tensor | None, bias: Tensor | None,
        stats: tuple[Tensor | None, Tensor | None], momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        filled = torch.where(rows.padding.view(-1, 1), x[:1], x)
        mean, scale = torch.batch_norm_stats(filled, eps)
        means = torch.stack([mean, x[0].to(mean.dtype)])
        scales = torch.stack([scale, rows.scale(x.size(1), eps)])
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            filled, means, scales, *stats, momentum, eps, rows.groups
        )
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.rows = rows
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = grad.contiguous()
        total, along, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, scale, weight, needs[0], needs[2], needs[3]
        )
        of_x = None
        if needs[0]:
            of_x = torch.batch_norm_backward_elemt(
                grad, x, mean, scale, weight, total, along, ctx.rows.counts
            )
            of_x = of_x.masked_fill_(ctx.rows.padding.view(-1, 1), 0)
        affine = of_weight if needs[2] else None, of_bias if needs[3] else None
        return of_x, None, *affine, None, None, None
