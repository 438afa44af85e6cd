"""The exchange of halos: rows that this rank's edges read and other ranks own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire

__all__ = ["Halo", "collect", "exchange", "make_halo", "turn"]


@dataclass(eq=False)
class Halo:
    """Which rows go where, for the edges of one edge_index of this rank.

    Own source nodes are ``0..own-1`` there, halo nodes ``own..own+halo-1``, in the order of the
    ranks that own them; target nodes are ``0..targets-1``, all of them own.

    Attributes:
        wire: the group.
        own: source nodes of this rank.
        targets: target nodes of this rank.
        receive: how many halo nodes each rank owns.
        send: how many rows each rank wants.
        wanted: [sum of send], the own rows that they want.
        narrow: whether float32 rows travel as bfloat16.
    """

    wire: Wire
    own: int
    targets: int
    receive: list[int]
    send: list[int]
    wanted: Tensor
    narrow: bool = False

    @property
    def halo(self) -> int:
        """Nodes of other ranks."""
        return sum(self.receive)

    @property
    def rows(self) -> int:
        """Source nodes in all: own ones and halo."""
        return self.own + self.halo


def make_halo(
    wire: Wire, sources: Tensor, cuts: Tensor, targets: int, narrow: bool = False
) -> tuple[Halo, Tensor]:
    """Agree with the other ranks on who sends what; every rank must call it.

    Args:
        wire: the group.
        sources: [E], the source of each edge of this rank, as places in the order of all nodes.
        cuts: [P + 1], where the nodes of every rank begin in that order.
        targets: target nodes of this rank.
        narrow: see :class:`Halo`.

    Returns:
        The plan, and the sources [E] as the edge_index of this rank names them.
    """
    low, high = (int(cuts[wire.rank + i]) for i in (0, 1))
    elsewhere = (sources < low) | (sources >= high)
    asked = sources[elsewhere].unique()
    bounds = torch.searchsorted(asked, cuts.to(asked.device))
    receive = bounds.diff().to(wire.device)
    send = torch.empty_like(receive)
    ones = [1] * wire.size
    wire.exchange(send, ones, receive, ones, "set-up")
    wants, gives = receive.tolist(), send.tolist()
    wanted = torch.empty(sum(gives), dtype=torch.int64, device=wire.device)
    wire.exchange(wanted, gives, asked.to(wire.device), wants, "set-up")
    local = torch.where(elsewhere, torch.searchsorted(asked, sources) + (high - low), sources - low)
    halo = Halo(wire, high - low, targets, wants, gives, wanted - low, narrow)
    return halo, local


def turn(halo: Halo, edges: Tensor) -> tuple[Halo, Tensor]:
    """Return the edges of all ranks that leave this rank's nodes, turned round, and their halo.

    The rank that owns the source of an edge owns it then. Every rank must call it.

    Args:
        halo: of the edges of this rank.
        edges: [2, E].
    """
    wire = halo.wire
    own = torch.tensor([halo.own, halo.targets], device=wire.device)
    sizes = wire.gather(own, "set-up").view(wire.size, 2)
    begins = torch.cat([sizes.new_zeros(1, 2), sizes.cumsum(0)])  # [P + 1], of sources and targets
    first, second = begins[wire.rank].tolist()
    (places,) = exchange(halo, [torch.arange(first, first + halo.own, device=wire.device)])
    pairs = torch.stack([places[edges[0].long()], edges[1].long() + second], dim=1)
    owner = torch.searchsorted(begins[:, 0].contiguous(), pairs[:, 0].contiguous(), right=True) - 1
    sent = torch.bincount(owner, minlength=wire.size)
    received = torch.empty_like(sent)
    ones = [1] * wire.size
    wire.exchange(received, ones, sent, ones, "set-up")
    gives, gets = sent.tolist(), received.tolist()
    found = pairs.new_empty(sum(gets), 2)
    by_owner = pairs[owner.argsort(stable=True)]
    wire.exchange(found, gets, by_owner, gives, "set-up")
    sources, cuts = found[:, 1].contiguous(), begins[:, 1].contiguous()
    result, local = make_halo(wire, sources, cuts, halo.own, halo.narrow)
    return result, torch.stack([local, found[:, 0] - first]).to(edges.dtype)


def exchange(halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    """Append the rows of halo nodes to rows of own nodes; differentiable, any number of times.

    One message a rank for all tensors of a dtype. Every rank must call it, with tensors of the same
    widths, dtypes and need of gradients.

    Args:
        halo: the plan.
        tensors: each [own, ...].

    Returns:
        Each [own + halo, ...].
    """
    return _by_dtype(_Exchange, halo, tensors)


def collect(halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    """Add rows of halo nodes to those of the ranks that own them: the transpose of the exchange.

    Args:
        halo: the plan.
        tensors: each [own + halo, ...].

    Returns:
        Each [own, ...].
    """
    return _by_dtype(_Collect, halo, tensors)


def _by_dtype(function: Any, halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    results: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        mine = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        made = function.apply(halo, *[tensors[i] for i in mine])
        for i, tensor in zip(mine, made, strict=True):
            results[i] = tensor
    return results


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.halo = halo
        return _marked(ctx, _forward(halo, list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_of_needed(ctx, _Collect, grads)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.halo = halo
        return _marked(ctx, _backward(halo, list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_of_needed(ctx, _Exchange, grads)


def _of_needed(ctx: Any, function: Any, grads: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Apply a function to the gradients that count; None for the others."""
    needs = ctx.needs_input_grad[1:]
    found = iter(function.apply(ctx.halo, *(g for g, n in zip(grads, needs, strict=True) if n)))
    return [next(found) if need else None for need in needs]


def _marked(ctx: Any, results: list[Tensor]) -> tuple[Tensor, ...]:
    """Return results, those of tensors without gradients as such: they may be kept."""
    needed = ctx.needs_input_grad[1:]
    ctx.mark_non_differentiable(*(r for r, n in zip(results, needed, strict=True) if not n))
    return tuple(results)


def _wire_dtype(halo: Halo, dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if halo.narrow and dtype == torch.float32 else dtype


def _forward(halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    flat = [t.reshape(halo.own, t.shape[1:].numel()) for t in tensors]
    widths = [t.size(1) for t in flat]
    dtype = _wire_dtype(halo, flat[0].dtype)
    sent = torch.cat([t.index_select(0, halo.wanted).to(dtype) for t in flat], dim=1)
    whole = [t.new_empty(halo.rows, t.size(1)) for t in flat]
    direct = len(flat) == 1 and dtype == flat[0].dtype
    received = whole[0][halo.own :] if direct else sent.new_empty(halo.halo, sum(widths))
    halo.wire.exchange(received, halo.receive, sent, halo.send)
    for out, own in zip(whole, flat, strict=True):
        out[: halo.own] = own
    if not direct:
        for out, part in zip(whole, received.split(widths, dim=1), strict=True):
            out[halo.own :] = part
    return [o.view(halo.rows, *t.shape[1:]) for o, t in zip(whole, tensors, strict=True)]


def _backward(halo: Halo, tensors: list[Tensor]) -> list[Tensor]:
    flat = [t.reshape(halo.rows, t.shape[1:].numel()) for t in tensors]
    widths = [t.size(1) for t in flat]
    dtype = _wire_dtype(halo, flat[0].dtype)
    parts = [t[halo.own :].to(dtype) for t in flat]
    sent = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()
    received = sent.new_empty(halo.wanted.numel(), sum(widths))
    halo.wire.exchange(received, halo.send, sent, halo.receive)
    results = [t[: halo.own].clone() for t in flat]
    for out, part in zip(results, received.split(widths, dim=1), strict=True):
        # A rank wants a row once, so that each addition below has distinct rows: the order of the
        # sum, that of the ranks, is always the same.
        for rows, back in zip(halo.wanted.split(halo.send), part.split(halo.send), strict=True):
            if rows.numel():
                out.index_add_(0, rows, back.to(out.dtype))
    return [r.view(halo.own, *t.shape[1:]) for r, t in zip(results, tensors, strict=True)]
