"""PyG's aggregations on lazy messages: all that are asked for, in one pass over the graph."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MulAggregation,
    MultiAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)

from pyg_accel.patching.edge_tensors import plain_shape
from pyg_accel.patching.lazy import LazyTensor, Unrecognised
from pyg_accel.patching.reasons import WATCHED, is_watched
from pyg_accel.patching.rules import reduce_over_targets

__all__ = ["aggregate", "is_simple"]

_SIMPLE: dict[type, str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
    MulAggregation: "prod",
}
_FORWARDS = {cls: vars(cls)["forward"] for cls in _SIMPLE}
_SPREAD = (VarAggregation, StdAggregation)


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
    """Stand in for ``Aggregation.__call__``; unknown aggregations run their own code."""
    if not isinstance(x, LazyTensor):
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    members: list[Any] = list(self.aggrs) if type(self) is MultiAggregation else [self]
    if (
        x.tracer.row_of(index) != x.tracer.target
        or dim not in (x.edge_dim, x.edge_dim - len(plain_shape(x)))
        or ptr is not None
        or kwargs
        or dim_size is None  # as many rows as the largest index says
        or not all(is_simple(m) or _is_spread(m) for m in members)
    ):
        return original(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)
    if is_watched(self):  # one that is not the layer's aggr_module
        raise Unrecognised(WATCHED, sticky=False)
    wanted: list[str] = []
    for member in members:
        wanted += ["mean", "sqsum"] if _is_spread(member) else [_SIMPLE[type(member)]]
    wanted = list(dict.fromkeys(wanted))
    got = dict(zip(wanted, reduce_over_targets(x, wanted, dim_size), strict=True))
    outs = [
        _spread(member, got["mean"], got["sqsum"], x) if _is_spread(member)
        else got[_SIMPLE[type(member)]]
        for member in members
    ]  # fmt: skip
    combined: Tensor = self.combine(outs) if type(self) is MultiAggregation else outs[0]
    return combined


def is_simple(aggregation: Any) -> bool:
    """Whether an aggregation is one reduction, and nobody replaced the ``forward`` of its class."""
    cls = type(aggregation)
    return cls in _SIMPLE and cls.forward is _FORWARDS[cls]


def _is_spread(member: Any) -> bool:
    if type(member) is StdAggregation:
        member = member.var_aggr
    return type(member) is VarAggregation and not member.semi_grad


def _spread(member: Any, mean: Tensor, sqsum: Tensor, x: LazyTensor) -> Tensor:
    """Variance or standard deviation from mean and sum of squares, as PyG defines them."""
    graph = x.tracer.graph_of(mean.size(x.edge_dim))
    shape = [1] * mean.dim()
    shape[x.edge_dim] = -1
    degree = graph.degree.clamp(min=1).to(mean.dtype).view(shape)
    variance = sqsum / degree - mean * mean
    if type(member) is VarAggregation:
        return variance
    out = variance.clamp(min=1e-5).sqrt()
    return out.masked_fill(out <= math.sqrt(1e-5), 0.0)
