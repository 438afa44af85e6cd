"""Winners of a maximum: scattering gradients to them, and gathering from them."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.ops.operator import call, define


def _scatter_arg(grad: Tensor, arg: Tensor, num_rows: int) -> Tensor:
    sizes = {"num_cols": num_rows, "num_edges": grad.size(0)}
    spec = OpSpec.by_rows("scatter_arg", grad, grad.size(1), **sizes)
    out: Tensor = choose(spec).kernel.run(grad, arg, num_rows)
    return out


def _scatter_arg_fake(grad: Tensor, arg: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(1))


def _scatter_arg_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_arg_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return call("gather_arg", grad, ctx.saved_tensors[0]), None, None


def _gather_arg(x: Tensor, arg: Tensor) -> Tensor:
    return torch.where(arg < 0, 0, x.gather(0, arg.clamp(min=0).long()))


def _gather_arg_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].size(0)


def _gather_arg_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad = grad.contiguous()
    return call("scatter_arg", grad, ctx.saved_tensors[0], ctx.rows), None


def _gather_arg_fake(x: Tensor, arg: Tensor) -> Tensor:
    return x.new_empty(arg.shape)


define(
    "scatter_arg(Tensor grad, Tensor arg, SymInt num_rows) -> Tensor",
    _scatter_arg,
    _scatter_arg_fake,
    _scatter_arg_backward,
    _scatter_arg_setup,
)
define(
    "gather_arg(Tensor x, Tensor arg) -> Tensor",
    _gather_arg,
    _gather_arg_fake,
    _gather_arg_backward,
    _gather_arg_setup,
)
