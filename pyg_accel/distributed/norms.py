"""Norms, readouts and reversed edges over the nodes of all ranks.

PyG's code runs with ``scatter`` and ``degree`` that reduce over all ranks. On a GPU, batch norms
are torch's ``SyncBatchNorm``, which takes no CPU tensors. The ``__class__`` of such a module in the
model is set to a subclass below, so its parameters, buffers and options stay.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.nn import aggr

from pyg_accel.distributed.tracking import Following
from pyg_accel.distributed.wire import Wire, total
from pyg_accel.errors import NotDistributable
from pyg_accel.patching import reductions
from pyg_accel.runtime.state import during, running

__all__ = ["ALL_NODES", "HOOKS"]

_REDUCED = (aggr.SumAggregation, aggr.MeanAggregation, aggr.MaxAggregation, aggr.MinAggregation)


def _reduced(wire: Wire, reduce: str, rows: Tensor, batch: Tensor, size: int) -> Tensor:
    """Reduce rows [own, ...] to one per graph, [size, ...], over the nodes of all ranks.

    As in PyG, a graph without nodes gets zero, and equal maxima share the gradient.

    Args:
        wire: the group.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        rows: features of the nodes of this rank.
        batch: [own], the graph of each node.
        size: the number of graphs.
    """
    if reduce == "min":
        return -_reduced(wire, "max", -rows, batch, size)
    zeros = rows.new_zeros(size, *rows.shape[1:])
    if reduce != "max":
        sums = total(wire, zeros.index_add(0, batch, rows))
        if reduce == "sum":
            return sums
        ones = rows.new_ones(rows.size(0), *[1] * (rows.dim() - 1))
        return sums / _reduced(wire, "sum", ones, batch, size).clamp(min=1)
    with torch.no_grad():
        index = batch.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        most = wire.largest((zeros - torch.inf).scatter_reduce(0, index, rows, "amax"))
        wins = (rows == most[batch]).to(rows.dtype)
        ties = _reduced(wire, "sum", wins, batch, size).clamp(min=1)
        most = most.masked_fill(most == -torch.inf, 0)
    shares = _reduced(wire, "sum", rows * (wins / ties[batch]), batch, size)
    return most + (shares - shares.detach())


def _over_all_ranks(
    wire: Wire, function: Callable[..., Any], rows: Tensor, batch: Tensor | None, size: int | None
) -> Any:
    """Call a function of PyG that reduces rows by their graphs.

    Args:
        wire: the group.
        function: takes rows, batch and size.
        rows: [own, ...].
        batch: [own], the graph of each node; None for a single graph.
        size: the number of graphs, if it is known.
    """
    if batch is None:
        batch, size = rows.new_zeros(rows.size(0), dtype=torch.int64), 1
    elif size is None:
        size = int(wire.largest(batch.max() + 1 if batch.numel() else batch.new_zeros(())))
    with during(scatter=partial(_reduced, wire)):
        return function(rows, batch, size)


def _scatter(
    original: Callable[..., Any], src: Tensor, index: Tensor, dim: int = 0,
    dim_size: int | None = None, reduce: str = "sum",
) -> Any:  # fmt: skip
    if running.scatter is None:
        return original(src, index, dim, dim_size, reduce)
    return running.scatter(reduce, src, index, dim_size)


def _degree(
    original: Callable[..., Any], index: Tensor, num_nodes: Any = None, dtype: Any = None
) -> Any:
    if running.scatter is None:
        return original(index, num_nodes, dtype)
    ones = torch.ones(index.shape, dtype=dtype, device=index.device)
    return running.scatter("sum", ones, index, num_nodes)


def _pool(original: Callable[..., Any], x: Tensor, batch: Any, size: int | None = None) -> Any:
    wire = running.wire
    if wire is None:
        return original(x, batch, size)
    if x.dim() != 2:
        raise NotDistributable(f"{original.__name__} over all ranks takes features [N, F]")
    return _over_all_ranks(wire, original, x, batch, size)


def _aggregate(
    original: Callable[..., Tensor], self: aggr.Aggregation, x: Any, *args: Any, **kwargs: Any
) -> Any:
    wire = running.wire
    if wire is None or running.halo_rows is not None:
        return reductions.aggregate(original, self, x, *args, **kwargs)
    if type(self) is aggr.MultiAggregation and self.mode == "cat":
        return torch.cat([part(x, *args, **kwargs) for part in self.aggrs], dim=-1)
    arguments = inspect.signature(original).bind(self, x, *args, **kwargs).arguments
    batch, size = arguments.get("index"), arguments.get("dim_size")
    dim = arguments.get("dim", -2)
    others = arguments.get("ptr") is not None or "kwargs" in arguments
    if type(self) not in _REDUCED or others or dim not in (0, -x.dim()):
        raise NotDistributable(
            f"{type(self).__name__} outside of a layer reads the nodes of all ranks: only sums, "
            "means, maxima and minima by an index are reduced over them"
        )
    reduce = lambda rows, batch, size: original(self, rows, batch, None, size, dim)  # noqa: E731
    return _over_all_ranks(wire, reduce, x, batch, size)


def _group(original: Callable[..., Any], xs: list[Tensor], q: Tensor, k_lin: Any) -> Any:
    """Replace ``group`` of HANConv, which takes a mean over all nodes per edge type."""
    wire = running.wire
    if wire is None or not xs:
        return original(xs, q, k_lin)
    out = torch.stack(xs)  # [edge types, own, F]
    number = total(wire, out.new_full((), float(out.size(1)))).clamp(min=1)
    weight = (q * total(wire, k_lin(out).tanh().sum(1)) / number).sum(-1).softmax(0)
    return (weight.view(-1, 1, 1) * out).sum(0), weight


HOOKS = {
    "aggregate": _aggregate, "degree": _degree, "group": _group, "pool": _pool, "scatter": _scatter,
}  # fmt: skip


class AllNodesBatchNorm1d(torch.nn.SyncBatchNorm, torch.nn.BatchNorm1d):
    """``BatchNorm1d`` over the rows of all ranks."""

    # SyncBatchNorm reads it; a module with the group as an attribute could not be pickled.
    process_group = property(lambda self: running.wire.group if running.wire else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Normalise [N, C] or [N, C, L]."""
        wire = running.wire
        if wire is None or not (self.training or self.running_mean is None):
            return torch.nn.BatchNorm1d.forward(self, x)
        if x.is_cuda and self.training:
            return super().forward(x)
        self._check_input_dim(x)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        number = total(wire, x.new_full((), x.numel() // max(x.size(1), 1)))
        mean = total(wire, x.sum(dims)) / number
        centred = x - mean.view(shape)
        squares = total(wire, centred.square().sum(dims))
        if self.training and self.running_mean is not None and self.running_var is not None:
            momentum = self.momentum
            if momentum is None:
                momentum = 1 / int(self.num_batches_tracked or 1)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                unbiased = (squares / (number - 1).clamp(min=1)).to(self.running_var.dtype)
                self.running_var.lerp_(unbiased, momentum)
        out = centred / (squares / number + self.eps).sqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        return out if self.bias is None else out + self.bias.view(shape)


class AllNodesBatchNorm(nn.BatchNorm):
    """``BatchNorm`` of PyG, which treats a single row separately."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [N, C]."""
        wire = running.wire
        if wire is None or not self.allow_single_element:
            return super().forward(x)
        single = int(wire.total(torch.tensor(x.size(0), device=x.device))) <= 1
        out: Tensor = super().forward(x) if single else self.module(x)
        return out


class _NormOfGraphs(torch.nn.Module):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, batch: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Normalise [N, C]; the argument after the batch vector is the number of graphs."""
        if running.wire is None:
            return super().forward(x, batch, *args, **kwargs)
        size = next(iter([*args, *kwargs.values()]), None)
        return _over_all_ranks(running.wire, super().forward, x, batch, size)


class AllNodesGraphNorm(_NormOfGraphs, nn.GraphNorm):
    """``GraphNorm`` over the nodes of all ranks."""


class AllNodesPairNorm(_NormOfGraphs, nn.PairNorm):
    """``PairNorm`` over the nodes of all ranks."""


class AllNodesMeanSubtractionNorm(_NormOfGraphs, nn.MeanSubtractionNorm):
    """``MeanSubtractionNorm`` over the nodes of all ranks."""


class AllNodesGraphSizeNorm(_NormOfGraphs, nn.GraphSizeNorm):
    """``GraphSizeNorm`` by the sizes of graphs over all ranks."""


class AllNodesLayerNorm(_NormOfGraphs, nn.LayerNorm):
    """``LayerNorm`` whose mode "graph" is over the nodes of all ranks."""

    def forward(self, x: Tensor, batch: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Normalise [N, C]; without a batch vector PyG adds ``eps`` to the deviation."""
        wire = running.wire
        if wire is None or self.mode != "graph" or batch is not None:
            return super().forward(x, batch, *args, **kwargs)
        number = total(wire, x.new_full((), x.numel()))
        x = x - total(wire, x.sum()) / number
        out = x / ((total(wire, x.square().sum()) / number).sqrt() + self.eps)
        return out if self.weight is None else out * self.weight + self.bias


class AllNodesInstanceNorm(_NormOfGraphs, nn.InstanceNorm):
    """``InstanceNorm`` over the nodes of all ranks."""

    def forward(  # type: ignore[override]  # as PyG does
        self, x: Tensor, batch: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Normalise [N, C]; with a batch vector PyG's running statistics would have gradients."""
        before = dict(self.named_buffers(recurse=False))
        out = super().forward(x, batch, *args, **kwargs)
        with torch.no_grad():
            for name, buffer in before.items():
                setattr(self, name, buffer.copy_(getattr(self, name)))
        return out


class AllNodesDirGNNConv(nn.DirGNNConv):
    """``DirGNNConv`` that reverses the edges of all ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run the layer."""
        if running.wire is None:
            return super().forward(x, edge_index)
        with Following():
            return super().forward(x, edge_index)


ALL_NODES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    cls.__bases__[-1]: cls
    for cls in (
        AllNodesBatchNorm1d, AllNodesBatchNorm, AllNodesGraphNorm, AllNodesPairNorm,
        AllNodesMeanSubtractionNorm, AllNodesGraphSizeNorm, AllNodesLayerNorm, AllNodesInstanceNorm,
        AllNodesDirGNNConv,
    )
}  # fmt: skip
