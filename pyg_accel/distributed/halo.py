"""The exchange of halos: rows of other ranks that the edges of this rank read."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire, linear

__all__ = ["Halo", "collect", "exchange", "make_halo", "reverse"]


@dataclass(eq=False)
class Halo:
    """The rows to send and receive for one edge_index of this rank.

    In that edge_index, ``0..own-1`` are the source nodes of this rank, and ``own..own+halo-1`` are
    halo nodes, ordered by the ranks that own them; target nodes are ``0..targets-1``.

    Attributes:
        wire: the process group.
        own: number of source nodes of this rank.
        targets: number of target nodes of this rank.
        receive: number of halo nodes per rank that owns them.
        send: number of rows per rank that reads them.
        requested: [sum(send)], the rows of this rank that other ranks read, ordered by rank.
        narrow: whether to send float32 rows as bfloat16.
        kind: name of the exchange in the report.
    """

    wire: Wire
    own: int
    targets: int
    receive: list[int]
    send: list[int]
    requested: Tensor
    narrow: bool = False
    kind: str = "halo"

    @property
    def rows(self) -> int:
        """Number of source nodes, with halo."""
        return self.own + sum(self.receive)


@torch.inference_mode(False)  # a halo may be used in training later
def make_halo(
    wire: Wire, sources: Tensor, cuts: Tensor, targets: int, narrow: bool = False,
    kind: str = "halo",
) -> tuple[Halo, Tensor]:  # fmt: skip
    """Agree with the other ranks on the rows to send; every rank must call it.

    Args:
        wire: the process group.
        sources: [E], the source of each edge of this rank, as a position in the order of all nodes.
        cuts: [P + 1], the first position of each rank in this order.
        targets: number of target nodes of this rank.
        narrow: see :class:`Halo`.
        kind: see :class:`Halo`.

    Returns:
        The halo, and the sources [E] as node ids of this rank.
    """
    low, high = cuts[wire.rank : wire.rank + 2].tolist()
    remote = (sources < low) | (sources >= high)
    needed = sources[remote].unique()
    requested, receive, send = _shuffled(wire, needed, _owners(needed, cuts))
    local = torch.where(remote, torch.searchsorted(needed, sources) + (high - low), sources - low)
    return Halo(wire, high - low, targets, receive, send, requested - low, narrow, kind), local


@torch.inference_mode(False)
def reverse(halo: Halo, edges: Tensor) -> tuple[Halo, Tensor]:
    """Reverse the edges of all ranks; each moves to the rank that owns its new target.

    Every rank must call it.

    Args:
        halo: the halo of the edges.
        edges: [2, E], the edges of this rank.

    Returns:
        The halo of the reversed edges of this rank, and these edges.
    """
    wire = halo.wire
    sizes = torch.tensor(wire.values([halo.own, halo.targets]), device=wire.device)
    begins = torch.nn.functional.pad(sizes.cumsum(0), (0, 0, 1, 0)).t().contiguous()  # [2, P + 1]
    first, second = begins[:, wire.rank].tolist()
    positions = exchange(halo, torch.arange(first, first + halo.own, device=wire.device))
    pairs = torch.stack([positions[edges[0].long()], edges[1].long() + second], dim=1)
    received, _, _ = _shuffled(wire, pairs, _owners(pairs[:, 0].contiguous(), begins[0]))
    sources = received[:, 1].contiguous()
    result, local = make_halo(wire, sources, begins[1], halo.own, halo.narrow)
    return result, torch.stack([local, received[:, 0] - first]).to(edges.dtype)


def _owners(positions: Tensor, cuts: Tensor) -> Tensor:
    return torch.searchsorted(cuts, positions, right=True) - 1


def _shuffled(wire: Wire, rows: Tensor, owners: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Send each row to its owner; return the rows received, and numbers sent and received."""
    sent = torch.bincount(owners, minlength=wire.size)
    received = torch.empty_like(sent)
    ones = [1] * wire.size
    wire.exchange(received, ones, sent, ones, "set-up")
    send, receive = sent.tolist(), received.tolist()
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    wire.exchange(result, receive, rows[owners.argsort(stable=True)], send, "set-up")
    return result, send, receive


def exchange(halo: Halo, own: Tensor) -> Tensor:
    """Append the rows of halo nodes to the rows of own nodes; differentiable any number of times.

    Every rank must call it, with tensors of the same width, dtype and ``requires_grad``.

    Args:
        halo: the halo.
        own: [own, ...].

    Returns:
        [own + halo, ...].
    """
    return linear(partial(_gathered, halo), partial(_summed, halo), own)


def collect(halo: Halo, whole: Tensor) -> Tensor:
    """Add the rows of halo nodes to the rows of their owners: the adjoint of the exchange.

    Args:
        halo: the halo.
        whole: [own + halo, ...].

    Returns:
        [own, ...].
    """
    return linear(partial(_summed, halo), partial(_gathered, halo), whole)


def _gathered(halo: Halo, own: Tensor) -> Tensor:
    sent = _as_sent(halo, own.index_select(0, halo.requested))
    whole = own.new_empty(halo.rows, *own.shape[1:])
    received = whole[halo.own :].to(sent.dtype)  # a view, unless rows are sent as bfloat16
    halo.wire.exchange(received, halo.receive, sent, halo.send, halo.kind)
    whole[: halo.own] = own
    if received.dtype != whole.dtype:
        whole[halo.own :] = received
    return whole


def _summed(halo: Halo, whole: Tensor) -> Tensor:
    sent = _as_sent(halo, whole[halo.own :])
    received = sent.new_empty(halo.requested.numel(), *whole.shape[1:])
    halo.wire.exchange(received, halo.send, sent, halo.receive, halo.kind)
    own = whole[: halo.own].clone()
    # Deterministic: the rows of one rank are distinct, and ranks are added in order.
    for rows, part in zip(halo.requested.split(halo.send), received.split(halo.send), strict=True):
        own.index_add_(0, rows, part.to(own.dtype))
    return own


def _as_sent(halo: Halo, rows: Tensor) -> Tensor:
    narrow = halo.narrow and rows.dtype == torch.float32
    return rows.to(torch.bfloat16 if narrow else rows.dtype).contiguous()
