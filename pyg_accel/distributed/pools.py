"""Readouts over the nodes of all ranks: pools, and aggregations outside of message passing."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    SumAggregation,
)

from pyg_accel.distributed.known import RUNNING
from pyg_accel.distributed.sums import counts, group_sums, largest_of_groups, num_graphs
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable
from pyg_accel.patching import reductions

__all__ = ["POOLS", "aggregate", "pool"]

POOLS = {"global_add_pool": "sum", "global_mean_pool": "mean", "global_max_pool": "max"}
_KNOWN: dict[type, str] = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MaxAggregation: "max",
    MinAggregation: "min",
}


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
    """Stand in for ``Aggregation.__call__``: outside of layers it reduces over all ranks."""
    wire = RUNNING.wire
    if wire is None or RUNNING.layer is not None or type(self) is MultiAggregation:
        return reductions.aggregate(original, self, x, index, ptr, dim_size, dim, **kwargs)
    name = _KNOWN.get(type(self))
    if name is None or ptr is not None or kwargs or dim not in (0, -x.dim()):
        raise NotDistributable(
            f"{type(self).__name__} outside of a layer reads the nodes of all ranks: sums, means, "
            "maxima and minima by an index are reduced over them, nothing else"
        )
    return _reduced(wire, name, x, index, dim_size)


def pool(
    function: Callable[..., Tensor], x: Tensor, batch: Tensor | None, size: int | None = None
) -> Tensor:
    """Stand in for ``global_add_pool`` and the others: over the nodes of all ranks."""
    wire = RUNNING.wire
    if wire is None:
        return function(x, batch, size)
    if x.dim() != 2:
        raise NotDistributable(f"{function.__name__} over all ranks takes features [N, F]")
    return _reduced(wire, POOLS[function.__name__], x, batch, size)


def _reduced(wire: Wire, name: str, x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    size = num_graphs(wire, batch) if size is None else size
    if name == "max":
        return largest_of_groups(wire, x, batch, size)
    if name == "min":
        return -largest_of_groups(wire, -x, batch, size)
    sums = group_sums(wire, x, batch, size)
    if name == "sum":
        return sums
    number = counts(wire, x, batch, size).clamp(min=1)
    return sums / number.view(-1, *[1] * (x.dim() - 1))
