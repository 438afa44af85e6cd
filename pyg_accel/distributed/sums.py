"""Sums over the nodes of all ranks, with gradients: what norms and pools are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire

__all__ = [
    "counts", "gathered", "group_sums", "largest_of_groups", "linear", "num_graphs", "padded",
    "total",
]  # fmt: skip


_Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear map between the tensors of all ranks, and its adjoint, which is its gradient.

    The loss that counts is the mean of the ranks' losses, as DDP has it.
    """

    @staticmethod
    def forward(ctx: Any, run: _Map, adjoint: _Map, tensor: Tensor) -> Tensor:
        ctx.turned = adjoint, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run, adjoint = ctx.turned
        return None, None, linear(run, adjoint, grad)


def linear(run: _Map, adjoint: _Map, tensor: Tensor) -> Tensor:
    """Return the result of a linear map between ranks; differentiable any number of times."""
    result: Tensor = _Linear.apply(run, adjoint, tensor)  # type: ignore[no-untyped-call]
    return result


def total(wire: Wire, tensor: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks, on every rank; differentiable."""

    def run(own: Tensor) -> Tensor:
        return wire.total(own.clone(memory_format=torch.contiguous_format))

    return linear(run, run, tensor)


def gathered(wire: Wire, rows: Tensor) -> Tensor:
    """Return the rows of all ranks, rank after rank, on every rank; differentiable."""
    own = rows.size(0)
    sizes = wire.gather(torch.tensor([own], device=wire.device), "rows").tolist()
    longest = max(sizes)

    def gather(rows: Tensor) -> Tensor:
        return wire.gather(padded(rows, longest), "rows")

    whole = linear(gather, lambda grad: wire.scatter_sums(grad, "rows")[:own], rows)
    parts = whole.view(wire.size, longest, *rows.shape[1:])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def padded(rows: Tensor, longest: int) -> Tensor:
    """Return rows with zeros behind them: those of all ranks are gathered in one length."""
    result = rows.new_zeros(longest, *rows.shape[1:])
    result[: rows.size(0)] = rows
    return result


def group_sums(wire: Wire, rows: Tensor, batch: Tensor | None, size: int) -> Tensor:
    """Return the sums of rows over all ranks: [size, ...], one a graph of the batch.

    Args:
        wire: the group.
        rows: [own, ...].
        batch: [own], the graph of each node; None if there is one graph.
        size: how many graphs there are.
    """
    if batch is None:
        return total(wire, rows.sum(0, keepdim=True))
    return total(wire, rows.new_zeros(size, *rows.shape[1:]).index_add(0, batch, rows))


def counts(wire: Wire, like: Tensor, batch: Tensor | None, size: int) -> Tensor:
    """Return how many nodes of all ranks each graph has, [size] in the dtype of ``like``."""
    with torch.no_grad():
        return group_sums(wire, like.new_ones(like.size(0)), batch, size)


def num_graphs(wire: Wire, batch: Tensor | None) -> int:
    """Return how many graphs there are on all ranks."""
    if batch is None:
        return 1
    most = batch.max() + 1 if batch.numel() else batch.new_zeros(())
    return int(wire.largest(most))


def largest_of_groups(wire: Wire, rows: Tensor, batch: Tensor | None, size: int) -> Tensor:
    """Return the largest rows of each graph over all ranks; equal ones share the gradient.

    A graph without nodes gets 0, as in PyG.
    """
    places = rows.new_zeros(rows.size(0), dtype=torch.int64) if batch is None else batch
    with torch.no_grad():
        most = rows.new_full((size, *rows.shape[1:]), -torch.inf)
        index = places.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        most = wire.largest(most.scatter_reduce(0, index, rows, "amax"))
        wins = (rows == most[places]).to(rows.dtype)
        ties = group_sums(wire, wins, places, size).clamp(min=1)
        most = most.masked_fill(most == -torch.inf, 0)
    shares = group_sums(wire, rows * (wins / ties[places]), places, size)
    return most + (shares - shares.detach())
