"""Norms whose statistics are those of the nodes of all ranks.

torch's SyncBatchNorm takes no CPU tensors, and there is none of the others. A module of the model
becomes one of a class below, which is a subclass of its own: parameters, buffers and settings stay.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn

from pyg_accel.distributed.known import RUNNING
from pyg_accel.distributed.sums import counts, group_sums, num_graphs, total
from pyg_accel.distributed.wire import Wire

__all__ = ["NORMS"]


class AllNodesBatchNorm1d(torch.nn.BatchNorm1d):
    """``BatchNorm1d`` over the rows of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [N, C] or [N, C, L]."""
        wire = RUNNING.wire
        if wire is None or not (self.training or self.running_mean is None):
            return super().forward(x)
        self._check_input_dim(x)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        rest = [d for d in range(x.dim()) if d != 1]
        number = total(wire, x.new_full((), x.numel() // max(x.size(1), 1)))
        mean = total(wire, x.sum(rest)) / number
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - mean.view(shape)
        squares = total(wire, centred.square().sum(rest))
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                share = self.momentum
                if share is None:
                    share = 1.0 / int(self.num_batches_tracked or 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                unbiased = (squares / (number - 1).clamp(min=1)).to(self.running_var.dtype)
                self.running_var.lerp_(unbiased, share)
        out = centred / (squares / number + self.eps).sqrt().view(shape)
        return _affine(out, self.weight, self.bias, shape)


class AllNodesBatchNorm(nn.BatchNorm):
    """PyG's ``BatchNorm``, which asks how many rows there are."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None or not self.allow_single_element:
            return super().forward(x)
        norm = self.module
        if int(wire.total(torch.tensor(x.size(0), device=x.device))) <= 1:
            return torch.nn.functional.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
            )
        out: Tensor = norm(x)
        return out


class AllNodesGraphNorm(nn.GraphNorm):
    """``GraphNorm`` over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, batch, batch_size)
        size = _size(wire, batch, batch_size)
        number = counts(wire, x, batch, size).clamp(min=1).view(-1, 1)
        mean = group_sums(wire, x, batch, size) / number
        out: Tensor = x - _of_nodes(mean, batch) * self.mean_scale
        var = group_sums(wire, out.pow(2), batch, size) / number
        out = self.weight * out / _of_nodes((var + self.eps).sqrt(), batch) + self.bias
        return out


class AllNodesPairNorm(nn.PairNorm):
    """``PairNorm`` over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, batch, batch_size)
        size = _size(wire, batch, batch_size)
        number = counts(wire, x, batch, size).clamp(min=1).view(-1, 1)
        x = x - _of_nodes(group_sums(wire, x, batch, size) / number, batch)
        if self.scale_individually:
            out: Tensor = self.scale * x / (self.eps + x.norm(2, -1, keepdim=True))
            return out
        squares = group_sums(wire, x.pow(2).sum(-1, keepdim=True), batch, size) / number
        out = self.scale * x / (self.eps + _of_nodes(squares, batch)).sqrt()
        return out


class AllNodesMeanSubtractionNorm(nn.MeanSubtractionNorm):
    """``MeanSubtractionNorm`` over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, batch, dim_size)
        size = _size(wire, batch, dim_size)
        number = counts(wire, x, batch, size).clamp(min=1).view(-1, 1)
        return x - _of_nodes(group_sums(wire, x, batch, size) / number, batch)


class AllNodesLayerNorm(nn.LayerNorm):
    """``LayerNorm`` whose mode "graph" is over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None or self.mode != "graph":
            return super().forward(x, batch, batch_size)
        size = _size(wire, batch, batch_size)
        number = counts(wire, x, batch, size).clamp(min=1).view(-1, 1) * x.size(-1)
        mean = group_sums(wire, x, batch, size).sum(-1, keepdim=True) / number
        x = x - _of_nodes(mean, batch)
        var = group_sums(wire, x * x, batch, size).sum(-1, keepdim=True) / number
        std = var.sqrt() + self.eps if batch is None else (var + self.eps).sqrt()
        return _affine(x / _of_nodes(std, batch), self.weight, self.bias, [1, -1])


class AllNodesInstanceNorm(nn.InstanceNorm):
    """``InstanceNorm`` over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None or not (self.training or not self.track_running_stats):
            return super().forward(x, batch, batch_size)
        size = _size(wire, batch, batch_size)
        number = counts(wire, x, batch, size).clamp(min=1).view(-1, 1)
        mean = group_sums(wire, x, batch, size) / number
        x = x - _of_nodes(mean, batch)
        squares = group_sums(wire, x * x, batch, size)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = squares / (number - 1).clamp(min=1)
                self.running_mean.lerp_(mean.mean(0), self.momentum or 0.0)
                self.running_var.lerp_(unbiased.mean(0), self.momentum or 0.0)
        out = x / _of_nodes((squares / number + self.eps).sqrt(), batch)
        return _affine(out, self.weight, self.bias, [1, -1])


class AllNodesGraphSizeNorm(nn.GraphSizeNorm):
    """``GraphSizeNorm`` by the sizes that graphs have over all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, batch, batch_size)
        size = _size(wire, batch, batch_size)
        root = counts(wire, x, batch, size).pow(-0.5).view(-1, 1)
        return x * _of_nodes(root, batch)


NORMS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.BatchNorm1d: AllNodesBatchNorm1d,
    nn.BatchNorm: AllNodesBatchNorm,
    nn.GraphNorm: AllNodesGraphNorm,
    nn.PairNorm: AllNodesPairNorm,
    nn.MeanSubtractionNorm: AllNodesMeanSubtractionNorm,
    nn.LayerNorm: AllNodesLayerNorm,
    nn.InstanceNorm: AllNodesInstanceNorm,
    nn.GraphSizeNorm: AllNodesGraphSizeNorm,
}


def _size(wire: Wire, batch: Tensor | None, given: int | None) -> int:
    return 1 if batch is None else num_graphs(wire, batch) if given is None else given


def _of_nodes(values: Tensor, batch: Tensor | None) -> Tensor:
    """Values of graphs [B, C] for each of their nodes; of the one graph they broadcast."""
    return values if batch is None else values.index_select(0, batch)


def _affine(out: Tensor, weight: Any, bias: Any, shape: list[int]) -> Tensor:
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)
