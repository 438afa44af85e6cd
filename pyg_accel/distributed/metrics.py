"""Losses and metrics of rows that ranks own."""

from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_accel.distributed.wire import Wire

__all__ = ["mean", "total"]


def _wire(device: torch.device) -> Wire:
    if device.type == "cpu" and dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return Wire(None, device)


def mean(loss: Tensor) -> Tensor:
    """Return the mean of a loss over the rows of all ranks.

    The value is the same on every rank. Gradients are such that their mean over ranks, which is
    what a distributed model (and DDP) takes, is the gradient of that value.

    Args:
        loss: one number a row of this rank, ``reduction="none"``; ranks may have none.
    """
    wire = _wire(loss.device)
    both = torch.stack([loss.detach().sum(), loss.new_full((), loss.numel())])
    both = wire.total(both.to(wire.device)).to(loss.device)
    own = loss.sum() * (wire.size / both[1])
    return own + (both[0] / both[1] - own).detach()


@overload
def total(value: Tensor) -> Tensor: ...
@overload
def total(value: float) -> float: ...


def total(value: Tensor | float) -> Tensor | float:
    """Return the sum of a number, or of each number of a tensor, over all ranks; no gradient."""
    if isinstance(value, Tensor):
        wire = _wire(value.device)
        return wire.total(value.detach().clone().to(wire.device)).to(value.device)
    wire = _wire(torch.device("cpu"))
    found = wire.total(torch.tensor([value], dtype=torch.float64, device=wire.device)).item()
    return int(found) if isinstance(value, int) else found
