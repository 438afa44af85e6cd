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
        return _affine(self, out, shape)


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


class _NormOfGraphs(torch.nn.Module):
    """What norms over the nodes of a graph have in common."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]."""
        wire = RUNNING.wire
        if wire is None or not self.reads_nodes():
            out: Tensor = super().forward(x, batch, batch_size)
            return out
        size = num_graphs(wire, batch) if batch_size is None else batch_size
        return self.over_all(x, _Graphs(wire, x, batch, size))

    def reads_nodes(self) -> bool:
        """Return whether the norm of a node depends on others."""
        return True

    def over_all(self, x: Tensor, graphs: "_Graphs") -> Tensor:
        """Normalise [N, C] by the nodes of all ranks."""
        raise NotImplementedError


class _Graphs:
    """The graphs of a batch, over the nodes of all ranks."""

    def __init__(self, wire: Wire, x: Tensor, batch: Tensor | None, size: int) -> None:
        self._wire, self._batch, self._size = wire, batch, size
        self.several = batch is not None
        self.counts = counts(wire, x, batch, size).view(-1, 1)
        self.numbers = self.counts.clamp(min=1)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums of each graph [B, C]."""
        return group_sums(self._wire, x, self._batch, self._size)

    def means(self, x: Tensor) -> Tensor:
        """Return the means of each graph [B, C]."""
        return self.sums(x) / self.numbers

    def of_nodes(self, values: Tensor) -> Tensor:
        """Return values of graphs [B, C] for each of their nodes; of one graph they broadcast."""
        return values if self._batch is None else values.index_select(0, self._batch)

    def centred(self, x: Tensor) -> Tensor:
        """Return features less the means of their graphs."""
        return x - self.of_nodes(self.means(x))


class AllNodesGraphNorm(_NormOfGraphs, nn.GraphNorm):
    """``GraphNorm`` over the nodes of all ranks."""

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""
        x = x - graphs.of_nodes(graphs.means(x)) * self.mean_scale
        deviation = (graphs.means(x.pow(2)) + self.eps).sqrt()
        out: Tensor = self.weight * x / graphs.of_nodes(deviation) + self.bias
        return out


class AllNodesPairNorm(_NormOfGraphs, nn.PairNorm):
    """``PairNorm`` over the nodes of all ranks."""

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""
        x = graphs.centred(x)
        if self.scale_individually:
            lengths = self.eps + x.norm(2, -1, keepdim=True)
        else:
            squares = graphs.means(x.pow(2).sum(-1, keepdim=True))
            lengths = (self.eps + graphs.of_nodes(squares)).sqrt()
        out: Tensor = self.scale * x / lengths
        return out


class AllNodesMeanSubtractionNorm(_NormOfGraphs, nn.MeanSubtractionNorm):
    """``MeanSubtractionNorm`` over the nodes of all ranks."""

    def forward(
        self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None
    ) -> Tensor:
        """Normalise [N, C]; the number of graphs has another name here."""
        return super().forward(x, batch, dim_size)

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""
        return graphs.centred(x)


class AllNodesLayerNorm(_NormOfGraphs, nn.LayerNorm):
    """``LayerNorm`` whose mode "graph" is over the nodes of all ranks."""

    def reads_nodes(self) -> bool:
        """See the base class."""
        return bool(self.mode == "graph")

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""

        def means(values: Tensor) -> Tensor:
            return graphs.means(values).mean(-1, keepdim=True)

        x = x - graphs.of_nodes(means(x))
        var = means(x * x)
        std = (var + self.eps).sqrt() if graphs.several else var.sqrt() + self.eps
        return _affine(self, x / graphs.of_nodes(std), [1, -1])


class AllNodesInstanceNorm(_NormOfGraphs, nn.InstanceNorm):
    """``InstanceNorm`` over the nodes of all ranks."""

    def reads_nodes(self) -> bool:
        """See the base class."""
        return self.training or not self.track_running_stats

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""
        mean = graphs.means(x)
        x = x - graphs.of_nodes(mean)
        squares = graphs.sums(x * x)
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = squares / (graphs.numbers - 1).clamp(min=1)
                self.running_mean.lerp_(mean.mean(0), self.momentum or 0.0)
                self.running_var.lerp_(unbiased.mean(0), self.momentum or 0.0)
        deviation = (squares / graphs.numbers + self.eps).sqrt()
        return _affine(self, x / graphs.of_nodes(deviation), [1, -1])


class AllNodesGraphSizeNorm(_NormOfGraphs, nn.GraphSizeNorm):
    """``GraphSizeNorm`` by the sizes that graphs have over all ranks."""

    def over_all(self, x: Tensor, graphs: _Graphs) -> Tensor:
        """See the base class."""
        return x * graphs.of_nodes(graphs.counts.pow(-0.5))


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


def _affine(norm: Any, out: Tensor, shape: list[int]) -> Tensor:
    if norm.weight is not None:
        out = out * norm.weight.view(shape)
    return out if norm.bias is None else out + norm.bias.view(shape)
