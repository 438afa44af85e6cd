"""PyG's aggregations on lazy messages, in one pass over the graph."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import (
    Aggregation,
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MulAggregation,
    MultiAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.fused import FusedAggregation

from pyg_accel.graph import Graph
from pyg_accel.patching.lazy import LazyTensor, Tracer
from pyg_accel.patching.reasons import WATCHED, Unrecognised, is_watched
from pyg_accel.patching.rules import reduce_over_targets
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.state import running

__all__ = ["aggregate", "combine", "is_simple", "reduces_of"]

_SIMPLE: dict[type, str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
    MulAggregation: "prod",
}
_SPREAD = (VarAggregation, StdAggregation)
_METHODS: dict[Any, tuple[Any, Any]] = {
    cls: (getattr(cls, "forward"), getattr(cls, "reduce"))  # noqa: B009
    for cls in (*_SIMPLE, *_SPREAD, MultiAggregation, DegreeScalerAggregation, FusedAggregation)
}
_SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


def aggregate(
    original: Callable[..., Tensor],
    self: Aggregation,
    x: Any,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    **kwargs: Any,
) -> Tensor:
    """Replace ``Aggregation.__call__``; unknown aggregations run their own code."""
    if type(x) is Tensor and not torch.compiler.is_dynamo_compiling() and running.traces:
        x = _of_edges(self, x, index)
    if not isinstance(x, LazyTensor):
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    reduces = reduces_of(self)
    tracer, place = x.tracer, x.edge_dim
    if (
        tracer.row_of(index) != tracer.target
        or dim not in (place, place - len(plain_shape(x)))
        or ptr is not None
        or kwargs
        or dim_size is None  # the largest index determines the rows
        or reduces is None
    ):
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    if is_watched(self):  # other than the aggr_module of the layer
        raise Unrecognised(WATCHED, permanent=False)
    got = reduce_over_targets(x, list(reduces), dim_size)

    def degree() -> Tensor:
        return perform(_degree, tracer.graph_of(dim_size), borrows=True)

    return combine(self, dict(zip(reduces, got, strict=True)), degree, place)


def _degree(graph: Graph) -> Tensor:
    return graph.degree


def _of_edges(aggregation: Aggregation, x: Tensor, index: Any) -> Tensor:
    """Messages that are values of edges only, as a lazy tensor if kernels can reduce them.

    Messages from features of nodes were materialised already, under a limit on their size.
    """
    trace: Tracer = running.traces[-1]
    if (
        trace.gathered
        or x.dim() < 2
        or x.size(0) != trace.num_edges
        or not x.is_floating_point()
        or trace.row_of(index) != trace.target
        or reduces_of(aggregation) is None
    ):
        return x
    return trace.leaf("e", x, x.shape, 0)


def is_simple(aggregation: Any) -> bool:
    """Whether an aggregation is one reduction, with the original methods of its class."""
    return type(aggregation) in _SIMPLE and _is_original(aggregation)


def _is_original(aggregation: Any) -> bool:
    cls = type(aggregation)
    return (cls.forward, cls.reduce) == _METHODS[cls]


def reduces_of(aggregation: Any) -> tuple[str, ...] | None:
    """Return the distinct reductions of an aggregation; None for other aggregations."""
    cls = type(aggregation)
    if cls not in _METHODS or not _is_original(aggregation):
        return None
    if cls in _SIMPLE:
        return (_SIMPLE[cls],)
    if cls is StdAggregation:
        return reduces_of(aggregation.var_aggr)
    if cls is VarAggregation:
        return None if aggregation.semi_grad else ("mean", "sqsum")
    if cls is DegreeScalerAggregation:
        supported = all(scaler in _SCALERS for scaler in aggregation.scaler)
        return reduces_of(aggregation.aggr) if supported else None
    if cls is not MultiAggregation:
        return None
    parts = [reduces_of(member) for member in aggregation.aggrs]
    if None in parts or not _fuses(aggregation):
        return None
    return tuple(dict.fromkeys(reduce for part in parts for reduce in part or ()))


def _fuses(aggregation: MultiAggregation) -> bool:
    """Whether PyG's fused aggregation belongs to the current members."""
    fused, flags = aggregation.fused_aggr, aggregation.is_fused_aggr
    if len(flags) != len(aggregation.aggrs):
        return False
    names = [type(m).__name__ for m, flag in zip(aggregation.aggrs, flags, strict=True) if flag]
    if fused is None:
        return not names
    alike = names == fused.aggr_names and len(set(names)) == len(names)
    return alike and _is_original(fused) and not fused.semi_grad


def combine(
    aggregation: Any, got: Mapping[str, Tensor], degree: Callable[[], Tensor], dim: int
) -> Tensor:
    """Return the result of an aggregation from its reductions, as PyG defines it.

    Args:
        aggregation: one with :func:`reduces_of`.
        got: reduced messages, by the name of the reduction.
        degree: returns the degrees of targets.
        dim: of the targets.
    """
    if type(aggregation) in _SIMPLE:
        return got[_SIMPLE[type(aggregation)]]
    if type(aggregation) is MultiAggregation:
        parts = [combine(member, got, degree, dim) for member in aggregation.aggrs]
        combined: Tensor = aggregation.combine(parts)
        return combined
    if type(aggregation) is DegreeScalerAggregation:
        out = combine(aggregation.aggr, got, degree, dim)
        scaled = _scaled(aggregation, out, _along(degree(), out, dim))
        return torch.cat(scaled, dim=-1) if len(scaled) > 1 else scaled[0]
    mean = got["mean"]
    variance = got["sqsum"] / _along(degree().clamp(min=1), mean, dim) - mean * mean
    if type(aggregation) is VarAggregation:
        return variance
    out = variance.clamp(min=1e-5).sqrt()
    return out.masked_fill(out <= math.sqrt(1e-5), 0.0)


def _along(degree: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [1] * like.dim()
    shape[dim] = -1
    return degree.to(like.dtype).view(shape)


def _scaled(aggregation: DegreeScalerAggregation, out: Tensor, degree: Tensor) -> list[Tensor]:
    """Return features times each scaler of Principal Neighbourhood Aggregation."""
    by_log, by_degree = aggregation.avg_deg_log, aggregation.avg_deg_lin
    least = degree.clamp(min=1)
    make: dict[str, Callable[[], Tensor]] = {
        "identity": lambda: out,
        "amplification": lambda: out * (torch.log(degree + 1) / by_log),
        "attenuation": lambda: out * (by_log / torch.log(least + 1)),
        "linear": lambda: out * (degree / by_degree),
        "inverse_linear": lambda: out * (by_degree / least),
    }
    return [make[str(scaler)]() for scaler in aggregation.scaler]
