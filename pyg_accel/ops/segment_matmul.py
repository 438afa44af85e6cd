"""Segments of rows times one matrix each, as for relations and their edges."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.ops.operator import call, define
from pyg_accel.runtime.checks import shown

__all__ = ["segment_matmul"]


def segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    """Multiply segments of rows by a matrix each: ``out[ptr[r]:ptr[r+1]] = x[...] @ weight[r]``.

    Args:
        x: [N, K].
        ptr: [R + 1] int64, ascending from 0 to N; on the CPU, else each call waits for the device.
        weight: [R, K, M] of the same dtype.

    Returns:
        [N, M].

    Raises:
        ValueError: for shapes or dtypes that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    for name, t in (("x", x), ("ptr", ptr), ("weight", weight)):
        if not isinstance(t, Tensor):
            raise ValueError(f"expected '{name}' to be a tensor (got {shown(t)})")
    if x.dim() != 2 or weight.dim() != 3 or x.size(1) != weight.size(1):
        raise ValueError(
            f"expected 'x' [N, K] and 'weight' [R, K, M] (got {list(x.shape)} and "
            f"{list(weight.shape)})"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(f"expected one floating dtype (got {x.dtype} and {weight.dtype})")
    if ptr.dtype != torch.int64 or ptr.shape != (weight.size(0) + 1,):
        raise ValueError(f"expected 'ptr' to be int64 [{weight.size(0) + 1}]")
    if x.device != weight.device:
        raise ValueError(f"expected 'weight' on {x.device} (got {weight.device})")
    result: Tensor = call("segment_matmul", x, ptr.cpu(), weight)
    return result


def _spec(op: str, x: Tensor, ptr: Tensor, width: int) -> OpSpec:
    return OpSpec.by_rows(op, x, width, num_cols=ptr.numel() - 1, k=x.size(1))


def _matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Any:
    bounds = ptr.tolist()
    if bounds[0] != 0 or bounds[-1] != x.size(0) or bounds != sorted(bounds):
        raise ValueError(f"expected 'ptr' to ascend from 0 to {x.size(0)}")
    return choose(_spec("segment_matmul", x, ptr, weight.size(2))).kernel.run(x, ptr, weight)


def _outer(x: Tensor, ptr: Tensor, y: Tensor) -> Any:
    return choose(_spec("segment_outer", x, ptr, y.size(1))).kernel.run(x, ptr, y)


define(
    "segment_matmul(Tensor x, Tensor ptr, Tensor weight) -> Tensor",
    _matmul,
    lambda x, ptr, weight: x.new_empty(x.size(0), weight.size(2)),
    {
        "x": lambda grad, ptr, weight: call("segment_matmul", grad, ptr, weight.mT),
        "weight": lambda grad, x, ptr: call("segment_outer", x, ptr, grad),
    },
)
define(
    "segment_outer(Tensor x, Tensor ptr, Tensor y) -> Tensor",
    _outer,
    lambda x, ptr, y: x.new_empty(ptr.size(0) - 1, x.size(1), y.size(1)),
    {
        "x": lambda grad, ptr, y: call("segment_matmul", y, ptr, grad.mT),
        "y": lambda grad, x, ptr: call("segment_matmul", x, ptr, grad),
    },
)
