"""Reductions over the target nodes, which run formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.patching.networks import leaf, node_of, reasons_against
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.rules.common import Args, Declined, Kwargs, need_formula, rule
from pyg_accel.record.edge_tensors import name_of, plain_shape
from pyg_accel.runtime.machine import is_captured
from pyg_accel.runtime.state import running

__all__ = ["reduce_over_targets"]


@rule("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like")
def _new(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = args[0]
    like = torch.empty((), dtype=lazy.dtype, device=lazy.device)
    if name_of(func).endswith("_like"):
        like = like.expand(lazy.shape)
    return func(like, *args[1:], **kwargs)


def reduce_over_targets(lazy: LazyTensor, reduces: list[str], num_rows: int | None) -> list[Tensor]:
    """Reduce messages over their target nodes, with several reductions in one pass."""
    return lazy.tracer.reduce(_need_message(lazy), reduces, num_rows)


def _need_message(lazy: LazyTensor) -> LazyTensor:
    if lazy.summed:
        out = lazy.tracer.compute(lazy)
        return lazy.tracer.leaf("e", out, out.shape, 0)
    if lazy.parts is not None and not reasons_against(lazy.tracer):
        shape, dtype = lazy.shape, lazy.dtype
        return leaf(lazy.tracer, node_of(lazy.tracer, lazy), shape, dtype)
    try:
        return need_formula(lazy, later=True)
    except Declined:
        raise Unrecognised("messages that are not floating-point features") from None


def _scattered(args: Args, names: tuple[str, ...], kwargs: Kwargs) -> dict[str, Any]:
    params = dict(zip(names, args, strict=False)) | kwargs
    lazy, out, dim = params.get("src"), params.get("self"), params.get("dim")
    if not isinstance(lazy, LazyTensor) or not isinstance(out, Tensor) or type(dim) is not int:
        raise Declined
    if isinstance(out, LazyTensor):
        raise Declined
    lazy = _need_message(lazy)
    shape, place = plain_shape(lazy), lazy.edge_dim
    # An index with fewer columns, or a wider output, would skip elements.
    if lazy.tracer.row_of(params.get("index"), shape, place) != lazy.tracer.target:
        raise Declined
    trailing = (*shape[:place], *shape[place + 1 :])
    if not -len(shape) <= dim < len(shape) or dim % len(shape) != place:
        raise Declined
    if out.dim() != len(shape) or (*out.shape[:place], *out.shape[place + 1 :]) != trailing:
        raise Declined
    if out.dtype != lazy.dtype:
        raise Declined
    return params


@rule("scatter_add")
def _scatter_add(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    params = _scattered(args, ("self", "dim", "index", "src"), kwargs)
    lazy, out = params["src"], params["self"]
    (total,) = reduce_over_targets(lazy, ["sum"], out.size(lazy.edge_dim))
    return out.add_(total) if name_of(func).endswith("_") else out + total


def _is_filled(out: Tensor, reduce: str) -> bool:
    """Return whether a tensor is filled with the result for targets without edges."""
    start, name = (1.0, "ones") if reduce == "prod" else (0.0, "zeros")
    recorder = running.recorder
    if recorder is not None and recorder.is_new(out, (name, f"new_{name}", f"{name}_like")):
        return True
    # Reading the values waits for the device.
    return not is_captured(out) and bool((out == start).all())


_SCATTER_REDUCES = {"sum": "sum", "mean": "mean", "prod": "prod", "amax": "max", "amin": "min"}


@rule("scatter_reduce")
def _scatter_reduce(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    params = _scattered(args, ("self", "dim", "index", "src", "reduce"), kwargs)
    lazy, out = params["src"], params["self"]
    reduce = _SCATTER_REDUCES.get(params.get("reduce", ""))
    if reduce is None or out.requires_grad:
        raise Declined
    if params.get("include_self", True) != (reduce == "prod") or not _is_filled(out, reduce):
        raise Declined
    (result,) = reduce_over_targets(lazy, [reduce], out.size(lazy.edge_dim))
    return out.copy_(result) if name_of(func).endswith("_") else result
