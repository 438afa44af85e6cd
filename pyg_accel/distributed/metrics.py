"""Losses and metrics over the rows of all ranks, and the traffic of a rank."""

import sys
from typing import TextIO, TypeVar

import torch
from torch import Tensor

from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.wire import Traffic, world

__all__ = ["mean", "report", "total"]

T = TypeVar("T", Tensor, float)


def mean(loss: Tensor) -> Tensor:
    """Return the mean of a loss over the rows of all ranks.

    The value is the same on every rank. A distributed model (or DDP) averages the gradients of the
    ranks to the gradient of this mean.

    Args:
        loss: one number per row of this rank (``reduction="none"``); a rank may have no rows.
    """
    wire = world(loss.device)
    sums = torch.stack([loss.detach().sum(), loss.new_full((), loss.numel())])
    sums = wire.total(sums.to(wire.device)).to(loss.device)
    own = loss.sum() * (wire.size / sums[1])
    return own + (sums[0] / sums[1] - own).detach()


def total(value: T) -> T:
    """Return the sum of a number, or of each number of a tensor, over all ranks; no gradient."""
    dtype = value.dtype if isinstance(value, Tensor) else torch.float64
    own = torch.as_tensor(value, dtype=dtype).detach().clone()
    wire = world(own.device)
    result = wire.total(own.to(wire.device)).to(own.device)
    if isinstance(value, Tensor):
        return result
    return int(result) if isinstance(value, int) else float(result)


def report(model: Distributed, file: TextIO | None = None) -> dict[str, Traffic]:
    """Print the traffic of this rank since the model was distributed, and return it.

    Times include waiting for other ranks. On a GPU they are times of the stream.

    Args:
        model: from :func:`distribute`.
        file: where to print; standard output by default.

    Returns:
        The traffic by kind of collective: ``halo``, ``sums`` of norms and pools, ``outputs``,
        ``gradients``, ``set-up``.
    """
    out, wire = file or sys.stdout, model.wire
    print(f"pyg_accel.distributed: rank {wire.rank} of {wire.size}", file=out)
    print(f"{'kind':10} {'calls':>7} {'sent MB':>10} {'received MB':>12} {'seconds':>9}", file=out)
    for kind, traffic in wire.traffic.items():
        traffic.synchronize()
        sent, received = traffic.sent / 1e6, traffic.received / 1e6
        print(f"{kind:10} {traffic.calls:7} {sent:10.2f} {received:12.2f} {traffic.seconds:9.3f}",
              file=out)  # fmt: skip
    return dict(wire.traffic)
