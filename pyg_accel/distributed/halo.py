"""The exchange of halos: rows that the edges of this rank read and other ranks own."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire, linear

__all__ = ["Halo", "collect", "exchange", "make_halo", "turn"]


@dataclass(eq=False)
class Halo:
    """Which rows travel where, for the edges of one edge_index of this rank.

    In that edge_index the source nodes of this rank are ``0..own-1`` and halo nodes are
    ``own..own+halo-1``, ordered by the ranks that own them; target nodes are ``0..targets-1``.

    Attributes:
        wire: the group.
        own: source nodes of this rank.
        targets: target nodes of this rank.
        receive: number of halo nodes per rank.
        send: number of rows that each rank reads here.
        wanted: [sum(send)], the own rows that other ranks read, ordered by rank.
        narrow: send float32 rows as bfloat16.
        kind: name of the exchange in the report.
    """

    wire: Wire
    own: int
    targets: int
    receive: list[int]
    send: list[int]
    wanted: Tensor
    narrow: bool = False
    kind: str = "halo"

    @property
    def rows(self) -> int:
        """Number of source nodes: own ones and halo."""
        return self.own + sum(self.receive)


@torch.inference_mode(False)  # a plan may serve training later
def make_halo(
    wire: Wire,
    sources: Tensor,
    cuts: Tensor,
    targets: int,
    narrow: bool = False,
    kind: str = "halo",
) -> tuple[Halo, Tensor]:
    """Agree with the other ranks on which rows to send; every rank must call it.

    Args:
        wire: the group.
        sources: [E], the source of each edge of this rank as a place in the order of all nodes.
        cuts: [P + 1], the first place of each rank in that order.
        targets: number of target nodes of this rank.
        narrow: see :class:`Halo`.
        kind: see :class:`Halo`.

    Returns:
        The plan, and the sources [E] as the edge_index of this rank names them.
    """
    low, high = cuts[wire.rank : wire.rank + 2].tolist()
    elsewhere = (sources < low) | (sources >= high)
    asked = sources[elsewhere].unique()
    wanted, receive, send = _shuffled(wire, asked, _owners(asked, cuts))
    local = torch.where(elsewhere, torch.searchsorted(asked, sources) + (high - low), sources - low)
    return Halo(wire, high - low, targets, receive, send, wanted - low, narrow, kind), local


@torch.inference_mode(False)
def turn(halo: Halo, edges: Tensor) -> tuple[Halo, Tensor]:
    """Reverse the edges of all ranks, so that the rank of a node has the edges that left it.

    Every rank must call it.

    Args:
        halo: of the edges of this rank.
        edges: [2, E].

    Returns:
        The plan of the reversed edges of this rank, and these edges.
    """
    wire = halo.wire
    sizes = torch.tensor(wire.values([halo.own, halo.targets]), device=wire.device)
    begins = torch.nn.functional.pad(sizes.cumsum(0), (0, 0, 1, 0)).t().contiguous()  # [2, P + 1]
    first, second = begins[:, wire.rank].tolist()
    places = exchange(halo, torch.arange(first, first + halo.own, device=wire.device))
    pairs = torch.stack([places[edges[0].long()], edges[1].long() + second], dim=1)
    ours, _, _ = _shuffled(wire, pairs, _owners(pairs[:, 0].contiguous(), begins[0]))
    result, local = make_halo(wire, ours[:, 1].contiguous(), begins[1], halo.own, halo.narrow)
    return result, torch.stack([local, ours[:, 0] - first]).to(edges.dtype)


def _owners(places: Tensor, cuts: Tensor) -> Tensor:
    return torch.searchsorted(cuts, places, right=True) - 1


def _shuffled(wire: Wire, rows: Tensor, owners: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Send each row to the rank that owns it; return those received, and both counts by rank."""
    sent = torch.bincount(owners, minlength=wire.size)
    received = torch.empty_like(sent)
    ones = [1] * wire.size
    wire.exchange(received, ones, sent, ones, "set-up")
    send, receive = sent.tolist(), received.tolist()
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    wire.exchange(result, receive, rows[owners.argsort(stable=True)], send, "set-up")
    return result, send, receive


def exchange(halo: Halo, own: Tensor) -> Tensor:
    """Append the rows of halo nodes to those of own nodes; differentiable any number of times.

    Every rank must call it, with tensors of the same width, dtype and need of gradients.

    Args:
        halo: the plan.
        own: [own, ...].

    Returns:
        [own + halo, ...].
    """
    return linear(partial(_gathered, halo), partial(_added, halo), own)


def collect(halo: Halo, whole: Tensor) -> Tensor:
    """Add the rows of halo nodes to those of the ranks that own them: the adjoint of the exchange.

    Args:
        halo: the plan.
        whole: [own + halo, ...].

    Returns:
        [own, ...].
    """
    return linear(partial(_added, halo), partial(_gathered, halo), whole)


def _gathered(halo: Halo, own: Tensor) -> Tensor:
    sent = _as_sent(halo, own.index_select(0, halo.wanted))
    whole = own.new_empty(halo.rows, *own.shape[1:])
    received = whole[halo.own :].to(sent.dtype)  # itself unless rows travel as bfloat16
    halo.wire.exchange(received, halo.receive, sent, halo.send, halo.kind)
    whole[: halo.own] = own
    if received.dtype != whole.dtype:
        whole[halo.own :] = received
    return whole


def _added(halo: Halo, whole: Tensor) -> Tensor:
    sent = _as_sent(halo, whole[halo.own :])
    received = sent.new_empty(halo.wanted.numel(), *whole.shape[1:])
    halo.wire.exchange(received, halo.send, sent, halo.receive, halo.kind)
    own = whole[: halo.own].clone()
    # A rank reads a row once, so the rows of each addition are distinct and the order of the sum,
    # that of the ranks, is always the same.
    for rows, back in zip(halo.wanted.split(halo.send), received.split(halo.send), strict=True):
        own.index_add_(0, rows, back.to(own.dtype))
    return own


def _as_sent(halo: Halo, rows: Tensor) -> Tensor:
    narrow = halo.narrow and rows.dtype == torch.float32
    return rows.to(torch.bfloat16 if narrow else rows.dtype).contiguous()
