"""Quantiles of groups of rows.

PyG's quantiles sort all numbers twice, the second time by an index that is as wide as they are;
here each group is sorted by itself. Results are PyG's, bit for bit; of equal numbers another one
may get the gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.aggr import MedianAggregation, QuantileAggregation

from pyg_accel.backends.notes import note_choice
from pyg_accel.formula import Operand
from pyg_accel.graph import Graph
from pyg_accel.memo import running
from pyg_accel.ops.groups import groups_of
from pyg_accel.ops.ordered_groups import taken_at
from pyg_accel.patching import gate
from pyg_accel.patching.lazy import LazyTensor, first_operand, is_single_side
from pyg_accel.patching.readouts import are_rows
from pyg_accel.patching.reasons import data_reasons, is_active, transform_reasons
from pyg_accel.patching.running import Unrecognised
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import quiet
from pyg_accel.settings import settings

__all__ = ["quantile", "quantiles_of_sources", "takes_quantiles"]

_TENSORS = (Tensor, Parameter)
# What becomes of the place of a quantile among the sorted numbers.
_ENDS = (torch.floor, torch.ceil)
_ROUNDED = {"lower": (torch.floor,), "higher": (torch.ceil,), "nearest": (torch.round,),
            "linear": _ENDS, "midpoint": _ENDS}  # fmt: skip
_EXACT = 2**24  # PyG counts rows in float32
# Numbers from which on this is not slower, measured side by side on an AMD EPYC, one thread: 50 to
# 100,000 rows of 4 to 128 numbers.
_FEWEST = 10_000


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
    if isinstance(x, LazyTensor) and not torch.compiler.is_compiling():  # PyG's, of numbers
        raise Unrecognised(f"{type(self).__name__} of messages")
    call = gate.Call(forward, self, (x, index, ptr, dim_size, dim), {})
    if not _is_taken(x, index, dim_size, dim) or not _is_exact(self, x, x.size(0)):
        return call.stock()
    return gate.enter(call, (), _sorted, x.device, counts=False)


def _sorted(call: gate.Call) -> tuple[Tensor, list[str]]:
    x, index, _, dim_size, _ = call.args
    out = _quantiles(call.owner, groups_of(index, dim_size), x)
    return out, ["the sorted numbers of each group"]


def takes_quantiles(aggregation: Any) -> bool:
    """Whether an aggregation is one of quantiles, with the ``forward`` of its class."""
    cls = type(aggregation)
    mine = cls in (QuantileAggregation, MedianAggregation)
    return mine and hasattr(cls.forward, "__original_fn")


def quantiles_of_sources(aggregation: Any, lazy: LazyTensor, num_rows: int) -> Tensor | None:
    """Take the quantiles of messages that are features of sources, of which none is written out.

    Returns:
        None if the messages are others.
    """
    trace = lazy.tracer
    if torch.compiler.is_compiling() or lazy.edge_dim != 0 or not is_single_side(lazy):
        return None
    operand, x = lazy.formula, first_operand(lazy)
    assert isinstance(operand, Operand)
    if (
        operand.side != "u"
        or trace.repeated[operand.index]
        or type(x) not in _TENSORS
        or x.shape[1:] != plain_shape(lazy)[1:]
        or not x.is_floating_point()
        or x.device.type != "cpu"
        or not trace.num_edges
        or not _is_exact(aggregation, x, trace.num_edges)
    ):
        return None
    with quiet():
        out = _quantiles(aggregation, trace.graph_of(num_rows), x)
    trace.formulas.append("quantile_j u0")
    return out


def _is_exact(aggregation: Any, x: Tensor, rows: int) -> bool:
    """Whether the floats in which PyG numbers rows tell them apart."""
    q = aggregation.q
    exact = q.dtype in (torch.float32, torch.float64) and rows < _EXACT
    return exact and bool(q.device == x.device)


def _quantiles(aggregation: Any, graph: Graph, x: Tensor) -> Tensor:
    note_choice("torch")
    count, start = graph.degree.long(), graph.rowptr[:-1].long()
    # PyG's expression, and its rounding.
    points = aggregation.q * (count - 1) + start.clamp(max=graph.num_edges - 1)  # [Q, G]
    method = aggregation.interpolation
    places = torch.stack([rounded(points).long() for rounded in _ROUNDED[method]]) - start
    taken = taken_at(graph, x.reshape(x.size(0), -1), places.transpose(1, 2))
    out: Tensor
    if len(taken) == 1:
        (out,) = taken
    else:
        low, high = taken
        if method == "linear":
            out = low + (high - low) * points.frac().t().unsqueeze(2)
        else:
            out = 0.5 * low + 0.5 * high
    out = out.masked_fill((count == 0).view(-1, 1, 1), aggregation.fill_value)
    rest = x.shape[1:] if aggregation.q.numel() == 1 else (-1, *x.shape[2:])
    return out.view(graph.num_rows, *rest)


def _is_taken(x: Any, index: Any, dim_size: Any, dim: int) -> bool:
    """Whether a call is accelerated: large, and of tensors of a known form."""
    if torch.compiler.is_dynamo_compiling() or not is_active(running.layer):
        return False
    return (
        type(x) in _TENSORS
        and are_rows(x, index, dim)
        and x.device.type == "cpu"
        and index.shape == x.shape[:1]
        and type(dim_size) is int
        and x.numel() > 0
        and (settings.always or x.numel() >= _FEWEST)
        and not data_reasons(x)
        and not transform_reasons()
    )
