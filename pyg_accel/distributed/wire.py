"""The collectives of one process group, with what they move and how long they take."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_accel.errors import RankLost

__all__ = ["Traffic", "Wire"]

# torch 2.13 renamed both and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_PENDING = 512  # pairs of CUDA events that wait to be read


@dataclass
class Traffic:
    """What one kind of collective moved on this rank.

    Attributes:
        calls: how many there were.
        sent: bytes that went to other ranks.
        received: bytes that came from other ranks.
        seconds: how long they took on this rank, waiting for others included.
    """

    calls: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def settle(self) -> None:
        """Add up the times of collectives on a GPU, once it has done them."""
        for begin, end in self._events:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()


class Wire:
    """A process group as the rest of this package sees it."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Take a group.

        Args:
            group: a ``ProcessGroup``; None is the one of all processes.
            device: where its tensors live.
        """
        self.group = group
        self.device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.traffic: dict[str, Traffic] = {}

    @contextmanager
    def _measured(self, kind: str, sent: int, received: int) -> Iterator[None]:
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.sent += sent
        traffic.received += received
        on_gpu = self.device.type == "cuda"
        start = time.perf_counter()
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size}: the collective '{kind}' failed: another rank "
                f"ended, or did not come in time ({str(error).splitlines()[0]})"
            ) from error
        if on_gpu:
            end.record()
            traffic._events.append((begin, end))
            if len(traffic._events) > _PENDING:
                traffic.settle()
        else:
            traffic.seconds += time.perf_counter() - start

    def exchange(
        self,
        received: Tensor,
        receive: Sequence[int],
        sent: Tensor,
        send: Sequence[int],
        kind: str = "halo",
    ) -> None:
        """Send rows to every rank and receive rows from every rank.

        Args:
            received: [sum of receive, ...], contiguous; is written.
            receive: how many rows come from each rank.
            sent: [sum of send, ...], contiguous, those for rank 0 first.
            send: how many rows go to each rank.
            kind: what the report calls it.
        """
        outgoing, incoming = _bytes(sent), _bytes(received)
        with self._measured(kind, outgoing, incoming):
            dist.all_to_all_single(received, sent, list(receive), list(send), group=self.group)

    def total(self, tensor: Tensor, kind: str = "sums") -> Tensor:
        """Add up a tensor over all ranks, in place."""
        with self._measured(kind, _bytes(tensor), _bytes(tensor)):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor, kind: str = "sums") -> Tensor:
        """Take the largest elements of all ranks, in place."""
        with self._measured(kind, _bytes(tensor), _bytes(tensor)):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor, kind: str = "outputs") -> Tensor:
        """Return the tensors of all ranks, which have one shape, along the first dimension."""
        out = tensor.new_empty(self.size * tensor.size(0), *tensor.shape[1:])
        with self._measured(kind, _bytes(tensor), _bytes(out) - _bytes(tensor)):
            _all_gather(out, tensor.contiguous(), group=self.group)
        return out

    def scatter_sums(self, tensor: Tensor, kind: str = "outputs") -> Tensor:
        """Return this rank's part of the sum over all ranks; undoes :meth:`gather`."""
        out = tensor.new_empty(tensor.size(0) // self.size, *tensor.shape[1:])
        with self._measured(kind, _bytes(tensor) - _bytes(out), _bytes(out)):
            _reduce_scatter(out, tensor.contiguous(), group=self.group)
        return out

    def copy_of_first(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor by that of the first rank."""
        with self._measured("set-up", _bytes(tensor), _bytes(tensor)):
            dist.broadcast(tensor, dist.get_global_rank(self._group, 0), group=self.group)
        return tensor

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    def texts(self, value: Any) -> list[Any]:
        """Return what every rank passes, as JSON carries it."""
        own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        longest = torch.tensor([own.numel()], device=self.device)
        sizes = self.gather(longest, "set-up").tolist()
        padded = own.new_zeros(1, max(sizes))
        padded[0, : own.numel()] = own
        rows = self.gather(padded, "set-up").cpu()
        return [
            json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)
        ]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
