"""One matrix for every segment of rows: what relations do to the features of their edges."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.checks import shown
from pyg_accel.ops.operator import call, define

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
    segments = ptr.numel() - 1
    return OpSpec.by_rows(op, x, width, num_cols=segments, k=x.size(1))


def _matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    if ptr[0] != 0 or ptr[-1] != x.size(0) or bool((ptr.diff() < 0).any()):
        raise ValueError(f"expected 'ptr' to ascend from 0 to {x.size(0)}")
    out: Tensor = choose(_spec("segment_matmul", x, ptr, weight.size(2))).kernel.run(x, ptr, weight)
    return out


def _outer(x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
    out: Tensor = choose(_spec("segment_outer", x, ptr, y.size(1))).kernel.run(x, ptr, y)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, ptr, weight = ctx.saved_tensors
    wants_x, _, wants_weight = ctx.needs_input_grad[-3:]
    return (
        call("segment_matmul", grad, ptr, weight.mT) if wants_x else None,
        None,
        call("segment_outer", x, ptr, grad) if wants_weight else None,
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, ptr, y = ctx.saved_tensors
    wants_x, _, wants_y = ctx.needs_input_grad[-3:]
    return (
        call("segment_matmul", y, ptr, grad.mT) if wants_x else None,
        None,
        call("segment_matmul", x, ptr, grad) if wants_y else None,
    )


define(
    "segment_matmul(Tensor x, Tensor ptr, Tensor weight) -> Tensor",
    _matmul,
    lambda x, ptr, weight: x.new_empty(x.size(0), weight.size(2)),
    _matmul_backward,
    _keep,
)
define(
    "segment_outer(Tensor x, Tensor ptr, Tensor y) -> Tensor",
    _outer,
    lambda x, ptr, y: x.new_empty(ptr.size(0) - 1, x.size(1), y.size(1)),
    _outer_backward,
    _keep,
)
