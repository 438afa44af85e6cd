"""Reductions outside of layers: ``scatter`` and ``segment``, which PyG's readouts call.

``global_mean_pool``, the modules of ``torch_geometric.nn.aggr`` and softmax over groups call them.
A reduction over groups is one over the targets of a graph: its kernels go over the rows of a group
in one order, whatever the number of threads. Inside of layers messages are reduced elsewhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.backends.dispatch import fast_backend_reasons
from pyg_accel.graph import Graph
from pyg_accel.machine import is_captured
from pyg_accel.memo import running
from pyg_accel.ops.groups import groups_of, groups_of_ptr, reduce_groups
from pyg_accel.patching import gate
from pyg_accel.patching.reasons import data_reasons, is_active, torch_records, transform_reasons
from pyg_accel.patching.size import HOOK, Work
from pyg_accel.patching.sparse import REDUCES
from pyg_accel.patching.watch import Watch

__all__ = ["are_rows", "scatter", "segment"]


# A reduction gathers nothing, and neighbouring rows are mostly of one group: PyG's takes a quarter
# of the time of one of messages. Where it looks for the winners it takes eight times as long.
_WORK, _WINNERS = Work(2, 0.25, overhead=HOOK), Work(16, 2.0, overhead=HOOK)
_TENSORS = (Tensor, Parameter)


def scatter(
    function: Callable[..., Any],
    src: Any,
    index: Any,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Any:
    """Stand in for ``torch_geometric.utils.scatter``."""
    call = gate.Call(function, None, (src, index, dim, dim_size, reduce), {})
    if not _fits(src, index, dim, reduce) or (
        index.size(0) != src.size(0) or (dim_size is not None and type(dim_size) is not int)
    ):  # fmt: skip
        return call.stock()
    winners = reduce in ("max", "min") and src.requires_grad and torch.is_grad_enabled()
    reasons = _reasons(src, index, winners=winners)
    return gate.enter(call, reasons, _scattered, src.device, counts=False)


def _scattered(call: gate.Call) -> tuple[Tensor, list[str]]:
    src, index, _, dim_size, reduce = call.args
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() else 0
    return _reduced(groups_of(index, dim_size), src, index, reduce)


def segment(function: Callable[..., Any], src: Any, ptr: Any, reduce: str = "sum") -> Any:
    """Stand in for ``torch_geometric.utils.segment``."""
    call = gate.Call(function, None, (src, ptr, reduce), {})
    if not _fits(src, ptr, 0, reduce) or ptr.numel() < 1:
        return call.stock()
    reasons = _reasons(src, ptr, winners=True)
    return gate.enter(call, reasons, _of_segments, src.device, counts=False)


def _of_segments(call: gate.Call) -> tuple[Tensor, list[str]]:
    src, ptr, reduce = call.args
    return _reduced(groups_of_ptr(ptr, src.size(0)), src, None, reduce)


def _reduced(
    graph: Graph, src: Tensor, index: Tensor | None, reduce: str
) -> tuple[Tensor, list[str]]:
    reduce = REDUCES[reduce]
    return reduce_groups(graph, src, index, reduce), [f"{reduce}_j u0"]


def are_rows(src: Tensor, groups: Any, dim: int) -> bool:
    """Return whether a tensor has rows of numbers, and groups are ids or ends of rows.

    Nothing that reads calls may be in force: a compiler, a tracer or an accelerated call.
    """
    return (
        type(groups) is Tensor
        and groups.dim() == 1
        and groups.dtype in (torch.int32, torch.int64)
        and src.dim() > 0
        and dim in (0, -src.dim())
        and src.is_floating_point()
        and src.layout is torch.strided
        and groups.device == src.device
        and not torch_records()
        and Watch.active() is None
    )


def _fits(src: Any, groups: Any, dim: int, reduce: str) -> bool:
    """Whether a reduction over the rows of a tensor is of a known form."""
    if torch.compiler.is_dynamo_compiling() or not is_active() or type(src) not in _TENSORS:
        return False
    # Inside of a layer, messages are reduced by its own call.
    outside = running.lent is None and not running.inside
    return outside and reduce in REDUCES and are_rows(src, groups, dim)


def _reasons(src: Tensor, groups: Tensor, *, winners: bool) -> list[str]:
    """Why a reduction is PyG's.

    Args:
        src: to be reduced.
        groups: one number per row, or where groups begin.
        winners: the rows of maxima are looked for too, or the groups are segments.
    """
    if is_captured(src):  # sorting is not possible now
        return ["a CUDA graph is captured"]
    rows, work = src.size(0), _WINNERS if winners else _WORK
    reasons = gate.too_small(scatter, groups, rows, work, src.nbytes // max(rows, 1))
    return reasons or data_reasons(src) or transform_reasons() or (
        fast_backend_reasons(src.device.type)
    )  # fmt: skip
