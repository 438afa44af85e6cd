"""Sums over the nodes of all ranks, with gradients: what norms and pools are made of."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire

__all__ = ["counts", "gathered", "group_sums", "largest_of_groups", "num_graphs", "total"]


class _Total(torch.autograd.Function):
    """The sum over ranks; the loss that counts is the mean of the ranks' losses, as DDP has it."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, tensor: Tensor) -> Tensor:
        ctx.wire = wire
        return wire.total(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _Total.apply(ctx.wire, grad)  # type: ignore[no-untyped-call]


def total(wire: Wire, tensor: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks, on every rank; differentiable."""
    summed: Tensor = _Total.apply(wire, tensor)  # type: ignore[no-untyped-call]
    return summed


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, padded to one length there; the gradients of all ranks come back."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, longest: int, rows: Tensor) -> Tensor:
        ctx.wire, ctx.longest, ctx.own = wire, longest, rows.size(0)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: rows.size(0)] = rows
        return wire.gather(padded, "rows")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _Scattered.apply(ctx.wire, ctx.longest, ctx.own, grad)  # type: ignore[no-untyped-call]


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, longest: int, own: int, grad: Tensor) -> Tensor:
        ctx.wire, ctx.longest = wire, longest
        return wire.scatter_sums(grad, "rows")[:own]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, _Gathered.apply(ctx.wire, ctx.longest, grad)  # type: ignore[no-untyped-call]


def gathered(wire: Wire, rows: Tensor) -> Tensor:
    """Return the rows of all ranks, rank after rank, on every rank; differentiable."""
    own = torch.tensor([rows.size(0)], device=wire.device)
    sizes = wire.gather(own, "rows").tolist()
    longest = max(sizes)
    whole: Tensor = _Gathered.apply(wire, longest, rows)  # type: ignore[no-untyped-call]
    parts = whole.view(wire.size, longest, *rows.shape[1:])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


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
