"""Reductions outside of layers: ``scatter`` and ``segment``, by which PyG reads graphs out.

``global_mean_pool``, the modules of ``torch_geometric.nn.aggr`` and softmax over groups call them.
A reduction over groups is one over the targets of a graph: its kernels go over the rows of a group
in one order, whatever the number of threads. Inside of layers messages are reduced elsewhere.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.backends.dispatch import fast_backend_reasons, record_choices
from pyg_accel.call_report import record
from pyg_accel.graph import Graph
from pyg_accel.machine import is_captured
from pyg_accel.memo import MEMO
from pyg_accel.ops.groups import groups_of, groups_of_ptr, reduce_groups
from pyg_accel.patching.reasons import (
    SEEN,
    data_reasons,
    is_active,
    torch_records,
    transform_reasons,
)
from pyg_accel.patching.sparse import REDUCES
from pyg_accel.patching.watch import Watch
from pyg_accel.settings import settings

__all__ = ["scatter", "segment"]


class _Fewest(NamedTuple):
    """The fewest numbers to reduce, from which on this is not slower.

    Attributes:
        known: the groups were seen before.
        new: they were not.
        winners: gradients of maxima and minima, and segments; None as for others.
    """

    known: int
    new: int
    winners: int | None


# Measured side by side on an AMD EPYC, one thread: 2,000 to 1,000,000 rows of 16 and 64
# numbers in groups of 25. On a GPU, that of other sums.
_FEWEST = {"cpu": _Fewest(1_000_000, 4_000_000, 64_000),
           "cuda": _Fewest(40_000_000, 2**62, None)}  # fmt: skip


def scatter(
    function: Callable[..., Any],
    src: Any,
    index: Any,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Any:
    """Stand in for ``torch_geometric.utils.scatter``."""
    if torch.compiler.is_dynamo_compiling() or not is_active() or type(src) not in _TENSORS:
        return function(src, index, dim, dim_size, reduce)
    wanted = REDUCES.get(reduce)
    wide = wanted in ("max", "min") and src.requires_grad and torch.is_grad_enabled()
    if wanted is None or not _is_taken(src, index, dim, wide=wide) or (
        index.size(0) != src.size(0) or (dim_size is not None and type(dim_size) is not int)
    ):  # fmt: skip
        return function(src, index, dim, dim_size, reduce)
    start = time.perf_counter()
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() else 0
    try:
        graph = groups_of(index, dim_size)
    except (IndexError, ValueError):  # PyG raises what PyG raises
        return function(src, index, dim, dim_size, reduce)
    return _reduced("scatter", graph, src, index, wanted, start)


def segment(function: Callable[..., Any], src: Any, ptr: Any, reduce: str = "sum") -> Any:
    """Stand in for ``torch_geometric.utils.segment``."""
    if torch.compiler.is_dynamo_compiling() or not is_active() or type(src) not in _TENSORS:
        return function(src, ptr, reduce)
    wanted = REDUCES.get(reduce)
    if wanted is None or not _is_taken(src, ptr, 0, wide=True) or ptr.numel() < 1:
        return function(src, ptr, reduce)
    start = time.perf_counter()
    try:
        graph = groups_of_ptr(ptr, src.size(0))
    except (IndexError, ValueError, RuntimeError):
        return function(src, ptr, reduce)
    return _reduced("segment", graph, src, None, wanted, start)


_TENSORS = (Tensor, Parameter)


def _reduced(
    name: str, graph: Graph, src: Tensor, index: Tensor | None, reduce: str, start: float
) -> Tensor:
    with record_choices() as names:
        out = reduce_groups(graph, src, index, reduce)
    record(name, f"{reduce}_j u0", "+".join(names), "", time.perf_counter() - start)
    return out


def _is_taken(src: Tensor, groups: Any, dim: int, *, wide: bool) -> bool:
    """Whether a reduction over the rows of a tensor is large enough, and of a known form.

    Args:
        src: to be reduced.
        groups: one number per row, or where groups begin.
        dim: along which.
        wide: it is one that PyG takes long for.
    """
    if (
        type(groups) is not Tensor
        or groups.dim() != 1
        or groups.dtype not in (torch.int32, torch.int64)
        or not src.dim()
        or dim not in (0, -src.dim())
        or not src.is_floating_point()
        or src.layout is not torch.strided
        or groups.device != src.device
    ):
        return False
    # Inside of a layer, messages are reduced by its own call.
    if not MEMO.outside or torch_records() or Watch.active() is not None:
        return False
    return not (_size_reasons(src, groups, wide=wide) or data_reasons(src) or transform_reasons()
                or fast_backend_reasons(src.device.type))  # fmt: skip


def _size_reasons(src: Tensor, groups: Tensor, *, wide: bool) -> list[str]:
    kind = src.device.type
    if is_captured(src):  # sorting is not possible now
        return ["a CUDA graph is captured"]
    if settings.always:
        return []
    fewest = _FEWEST.get(kind)
    if fewest is None:
        return [f"no limit is known for {kind}"]
    numbers = src.numel()
    if wide and fewest.winners is not None:
        return [] if numbers >= fewest.winners else ["small"]
    if numbers < fewest.known:
        return ["small"]
    again = not SEEN.is_new(scatter, groups)
    return [] if again or numbers >= fewest.new else ["small for new groups"]
