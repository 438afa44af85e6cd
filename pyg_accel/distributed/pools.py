"""Readouts over the nodes of all ranks: pools, and aggregations outside of message passing."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn
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

__all__ = ["aggregate", "enter", "pool"]

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
    if wire is None or RUNNING.layer is not None:
        return reductions.aggregate(original, self, x, index, ptr, dim_size, dim, **kwargs)
    if type(self) is MultiAggregation and self.mode == "cat":
        parts = [aggr(x, index, ptr, dim_size, dim) for aggr in self.aggrs]
        return torch.cat(parts, dim=-1)
    name = _KNOWN.get(type(self))
    if name is None or ptr is not None or kwargs or dim not in (0, -x.dim()):
        raise NotDistributable(
            f"{type(self).__name__} outside of a layer reads the nodes of all ranks: sums, means, "
            "maxima and minima by an index are reduced over them, nothing else"
        )
    return _reduced(wire, name, x, index, dim_size)


def _add(x, batch, size=None):  # type: ignore[no-untyped-def]
    from pyg_accel.distributed.pools import pool

    return pool("global_add_pool", x, batch, size)


def _mean(x, batch, size=None):  # type: ignore[no-untyped-def]
    from pyg_accel.distributed.pools import pool

    return pool("global_mean_pool", x, batch, size)


def _max(x, batch, size=None):  # type: ignore[no-untyped-def]
    from pyg_accel.distributed.pools import pool

    return pool("global_max_pool", x, batch, size)


# A model holds these functions under any name (``self.pool = global_mean_pool``), so they are not
# replaced where they are held: they get other code, which needs no names around it.
_POOLS: dict[str, tuple[Any, Any, str]] = {
    "global_add_pool": (nn.global_add_pool, _add, "sum"),
    "global_mean_pool": (nn.global_mean_pool, _mean, "mean"),
    "global_max_pool": (nn.global_max_pool, _max, "max"),
}
_OWN = {
    name: FunctionType(f.__code__, f.__globals__, name, f.__defaults__)
    for name, (f, _, _) in _POOLS.items()
}
_users = 0


def enter(by: int) -> int:
    """Count a distributed model that begins (1) or ends (-1), and return how many there are.

    While there is one, pools are taken over all ranks.
    """
    global _users
    _users += by
    for name, (function, ours, _) in _POOLS.items():
        function.__code__ = ours.__code__ if _users else _OWN[name].__code__
    return _users


def pool(name: str, x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    """Stand in for ``global_add_pool`` and the others: over the nodes of all ranks."""
    wire = RUNNING.wire
    if wire is None:
        own: Tensor = _OWN[name](x, batch, size)
        return own
    if x.dim() != 2:
        raise NotDistributable(f"{name} over all ranks takes features [N, F]")
    return _reduced(wire, _POOLS[name][2], x, batch, size)


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
