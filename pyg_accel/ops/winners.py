"""Winners of a maximum: scattering gradients to them, and gathering from them."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import Decision, OpSpec
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide
from pyg_accel.backends.notes import note_choice
from pyg_accel.ops.operator import call, define

__all__ = ["scatter_launch"]


def _decide(grad: Tensor, num_rows: int) -> Decision:
    sizes = {"num_cols": num_rows, "num_edges": grad.size(0)}
    return decide(OpSpec.by_rows("scatter_arg", grad, grad.size(1), **sizes))


def scatter_launch(grad: Tensor, num_rows: int) -> tuple[str, Launch]:
    """Return the backend for a gradient [N, F], and its launch."""
    decision = _decide(grad, num_rows)
    run, bind = decision.kernel.run, decision.kernel.bind
    if bind is None:
        return decision.backend.name, Launch(lambda grad, arg: run(grad, arg, num_rows))
    return decision.backend.name, bind(grad, num_rows)


def _scatter_arg(grad: Tensor, arg: Tensor, num_rows: int) -> Any:
    decision = _decide(grad, num_rows)
    note_choice(decision.backend.name)
    return decision.kernel.run(grad, arg, num_rows)


define(
    "scatter_arg(Tensor grad, Tensor arg, SymInt num_rows) -> Tensor",
    _scatter_arg,
    lambda grad, arg, num_rows: grad.new_empty(num_rows, grad.size(1)),
    {"grad": lambda seed, arg: call("gather_arg", seed, arg)},
)
define(
    "gather_arg(Tensor x, Tensor arg) -> Tensor",
    lambda x, arg: torch.where(arg < 0, 0, x.gather(0, arg.clamp(min=0).long())),
    lambda x, arg: x.new_empty(arg.shape),
    {"x": lambda grad, arg, x_rows: call("scatter_arg", grad.contiguous(), arg, x_rows)},
)
