"""Aggregations that sort, and ``to_dense_batch``.

PyG's quantiles sort all numbers twice, the second time by an index that is as wide as they are; here
each group is sorted by itself. SortAggregation lays rows side by side and keeps the first k of a
group; here only their last numbers are. Results are PyG's, bit for bit.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.call_report import record
from pyg_accel.memo import MEMO
from pyg_accel.ops.groups import groups_of
from pyg_accel.ops.ordered_groups import first_rows, side_by_side, slots_of, taken_at
from pyg_accel.patching.reasons import data_reasons, is_active, torch_records, transform_reasons
from pyg_accel.patching.watch import Watch
from pyg_accel.settings import settings

__all__ = ["quantile", "sort", "to_dense_batch"]

_TENSORS = (Tensor, Parameter)
# What becomes of the place of a quantile among the sorted numbers.
_ENDS = (torch.floor, torch.ceil)
_ROUNDED = {"lower": (torch.floor,), "higher": (torch.ceil,), "nearest": (torch.round,),
            "linear": _ENDS, "midpoint": _ENDS}  # fmt: skip
_EXACT = 2**24  # PyG counts rows in float32
# Measured side by side on an AMD EPYC, one thread: the fewest numbers that are not slower.
_FEWEST = {"quantile": 0, "sort": 0, "to_dense_batch": 0}


def quantile(
    forward: Callable[..., Any],
    self: Any,
    x: Any,
    index: Any = None,
    ptr: Any = None,
    dim_size: Any = None,
    dim: int = -2,
) -> Any:
    """Stand in for ``QuantileAggregation.forward``, which MedianAggregation shares."""
    if not _is_taken("quantile", x, index, dim) or not _fits(x, index, dim_size) or (
        self.q.dtype != torch.float32 or self.q.device != x.device or x.size(0) >= _EXACT
    ):  # fmt: skip
        return forward(self, x, index, ptr, dim_size, dim)
    begun = time.perf_counter()
    graph = groups_of(index, dim_size)
    count, start = graph.degree.long(), graph.rowptr[:-1].long()
    # PyG's expression, and its rounding.
    points = self.q * (count - 1) + start.clamp(max=x.size(0) - 1)  # [Q, G]
    method = self.interpolation
    places = torch.stack([rounded(points).long() for rounded in _ROUNDED[method]]) - start
    taken = taken_at(graph, x.reshape(x.size(0), -1), places.transpose(1, 2))
    if len(taken) == 1:
        (out,) = taken
    else:
        low, high = taken
        if method == "linear":
            out = low + (high - low) * points.frac().t().unsqueeze(2)
        else:
            out = 0.5 * low + 0.5 * high
    out = out.masked_fill((count == 0).view(-1, 1, 1), self.fill_value)
    _record(type(self).__name__, "the sorted numbers of each group", begun)
    rest = x.shape[1:] if self.q.numel() == 1 else (-1, *x.shape[2:])
    return out.view(dim_size, *rest)


def sort(
    forward: Callable[..., Any],
    self: Any,
    x: Any,
    index: Any = None,
    ptr: Any = None,
    dim_size: Any = None,
    dim: int = -2,
    max_num_elements: Any = None,
) -> Any:
    """Stand in for ``SortAggregation.forward``."""
    if (
        not _is_taken("sort", x, index, dim)
        or not _fits(x, index, dim_size)
        or x.dim() != 2
        or max_num_elements is not None
        or not bool((index[:-1] <= index[1:]).all())  # PyG raises
    ):
        return forward(self, x, index, ptr, dim_size, dim, max_num_elements)
    begun = time.perf_counter()
    least = x.detach().min()
    if not bool(least - 1 < least):  # PyG takes rows for empty ones, or there is a NaN
        return forward(self, x, index, ptr, dim_size, dim, max_num_elements)
    out = first_rows(groups_of(index, dim_size), x, self.k).flatten(1)
    _record(type(self).__name__, "the first rows of each group", begun)
    return out


def to_dense_batch(
    function: Callable[..., Any],
    x: Any,
    batch: Any = None,
    fill_value: Any = 0.0,
    max_num_nodes: Any = None,
    batch_size: Any = None,
) -> Any:
    """Stand in for ``torch_geometric.utils.to_dense_batch``."""
    begun = time.perf_counter()
    if (
        not _is_taken("to_dense_batch", x, batch, 0)
        or type(fill_value) not in (int, float)
        or any(n is not None and type(n) is not int for n in (max_num_nodes, batch_size))
        or (slots := slots_of(batch, batch_size, max_num_nodes)) is None
    ):
        return function(x, batch, fill_value, max_num_nodes, batch_size)
    out = side_by_side(x, slots, fill_value), slots.mask.clone()
    _record("to_dense_batch", "rows side by side", begun)
    return out


def _record(name: str, what: str, begun: float) -> None:
    record(name, what, "torch", "", time.perf_counter() - begun)


def _fits(x: Tensor, index: Tensor, dim_size: Any) -> bool:
    """Whether there are rows, and each is in a group that is known of."""
    low, high = index.aminmax()
    return type(dim_size) is int and 0 <= int(low) and int(high) < dim_size and x.numel() > 0


def _is_taken(name: str, x: Any, index: Any, dim: int) -> bool:
    """Whether a call is accelerated: large, and of tensors of a known form."""
    if torch.compiler.is_dynamo_compiling() or not is_active(MEMO.layer):
        return False
    return (
        type(x) in _TENSORS
        and type(index) is Tensor
        and x.dim() > 0
        and dim in (0, -x.dim())
        and x.is_floating_point()
        and x.layout is torch.strided
        and x.device.type == index.device.type == "cpu"
        and index.dtype in (torch.int32, torch.int64)
        and index.shape == x.shape[:1]
        and x.numel() >= max(0 if settings.always else _FEWEST[name], 1)
        and not torch_records()
        and Watch.active() is None
        and not data_reasons(x)
        and not transform_reasons()
    )
