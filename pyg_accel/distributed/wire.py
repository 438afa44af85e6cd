"""The collectives of one process group: bytes and times, gradients, and agreement between ranks.

The objective is the mean of the losses of all ranks, as in DistributedDataParallel, so the backward
pass of a linear map between ranks is its adjoint.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_accel.errors import NotDistributable, PartitionMismatch, RankLost, RanksDiverged
from pyg_accel.runtime.state import running

__all__ = ["Traffic", "Wire", "agree", "linear", "total", "world"]

_PENDING = 512  # pairs of CUDA events before they are read
_FEW = 4  # facts that an error message lists
_Map = Callable[[Tensor], Tensor]


@dataclass
class Traffic:
    """The traffic of one kind of collective on this rank.

    Attributes:
        calls: number of collectives.
        sent: bytes sent to other ranks.
        received: bytes received from other ranks.
        seconds: time on this rank, including the wait for other ranks.
    """

    calls: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def synchronize(self) -> None:
        """Wait for the collectives on the GPU and add their times to ``seconds``."""
        for begin, end in self._events:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()


class Wire:
    """A process group and the device of its tensors.

    With ``TORCH_DISTRIBUTED_DEBUG`` set to ``INFO`` or ``DETAIL``, ranks compare the kind of each
    collective before it and raise :class:`~pyg_accel.errors.RanksDiverged` if they differ.

    Args:
        group: a ``ProcessGroup``; None for the group of all processes.
        device: the device of the tensors that are exchanged.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.traffic: dict[str, Traffic] = {}
        self._compares = dist.get_debug_level() != dist.DebugLevel.OFF

    @contextmanager
    def measured(self, kind: str, sent: int, received: int) -> Iterator[None]:
        """Count and time the collective in a ``with`` block.

        Raises:
            RankLost: if it fails.
        """
        if running.recorder is not None:
            running.recorder.stop("it exchanges rows with other ranks by itself")
        if self._compares and kind != "set-up":
            self._compare(kind)
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.calls, traffic.sent = traffic.calls + 1, traffic.sent + sent
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
                f"ended or did not reach it in time ({str(error).splitlines()[0]})"
            ) from error
        if on_gpu:
            end.record()
            traffic._events.append((begin, end))
            if len(traffic._events) > _PENDING:
                traffic.synchronize()
        else:
            traffic.seconds += time.perf_counter() - start

    def _compare(self, kind: str) -> None:
        backward = torch._C._current_graph_task_id() != -1
        texts = self.values(f"'{kind}' in the {'backward' if backward else 'forward'} pass")
        if len(set(texts)) > 1:
            by_rank = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RanksDiverged(
                f"ranks meet in different collectives ({by_rank}): the loss of a rank does not "
                "depend on what the model returned, or its backward() was left out"
            )

    def exchange(
        self, received: Tensor, receive: list[int], sent: Tensor, send: list[int], kind: str
    ) -> None:
        """Send rows to every rank and receive rows from every rank.

        Args:
            received: [sum(receive), ...], contiguous; overwritten.
            receive: number of rows from each rank.
            sent: [sum(send), ...], contiguous, ordered by rank.
            send: number of rows for each rank.
            kind: name of the collective in the report.
        """
        with self.measured(kind, sent.nbytes, received.nbytes):
            dist.all_to_all_single(received, sent, receive, send, group=self.group)

    def total(self, tensor: Tensor, kind: str = "sums", op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        with self.measured(kind, tensor.nbytes, tensor.nbytes):
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    def largest(self, tensor: Tensor, kind: str = "sums") -> Tensor:
        """Take the elementwise maximum of a tensor over all ranks, in place."""
        return self.total(tensor, kind, dist.ReduceOp.MAX)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, for each time, the longest of any rank."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        longest: list[float] = self.largest(times, "set-up").tolist()
        return longest

    def copy_of_first(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the tensor of the first rank."""
        with self.measured("set-up", tensor.nbytes, tensor.nbytes):
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def values(self, value: Any) -> list[Any]:
        """Return the picklable values that all ranks pass, ordered by rank."""
        every: list[Any] = [None] * self.size
        on_gpu = self.device.type == "cuda"  # NCCL moves objects over the current device
        with self.measured("set-up", 0, 0), torch.cuda.device(self.device if on_gpu else -1):
            dist.all_gather_object(every, value, group=self.group)
        return every


def world(device: Any = "cpu") -> Wire:
    """Return the wire of all processes, for tensors of a device."""
    device = torch.device(device)
    if device.type == "cpu" and dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return Wire(None, device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Map, adjoint: _Map, tensor: Tensor) -> Tensor:
        ctx.backward_maps = adjoint, run
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        run, adjoint = ctx.backward_maps
        return None, None, linear(run, adjoint, grad)


def linear(run: _Map, adjoint: _Map, tensor: Tensor) -> Tensor:
    """Return ``run(tensor)``, a linear map between ranks; differentiable any number of times.

    Args:
        run: computes the map; every rank must call it.
        adjoint: computes its adjoint.
        tensor: the argument.
    """
    result: Tensor = _Linear.apply(run, adjoint, tensor)  # type: ignore[no-untyped-call]
    return result


def total(wire: Wire, tensor: Tensor) -> Tensor:
    """Return the sum of the tensors of all ranks, on every rank; differentiable."""

    def run(own: Tensor) -> Tensor:
        return wire.total(own.clone(memory_format=torch.contiguous_format))

    return linear(run, run, tensor)


def agree(wire: Wire, function: Callable[[], dict[str, str]]) -> None:
    """Compare facts between ranks; all ranks raise if they differ, or if a rank raises.

    Args:
        wire: the process group.
        function: returns facts by name, or raises a ValueError with the reason why it cannot.

    Raises:
        PartitionMismatch: if a fact differs.
        NotDistributable: if ``function`` raised on some rank; the message has all reasons.
    """
    facts: dict[str, str] = {}
    failure: Exception | None = None
    reason: str | None = "an error that is no fault of the input"  # of any other error
    try:
        facts = function()
        reason = None
    except ValueError as error:
        failure, reason = error, str(error)
    finally:  # other ranks wait for this one, whatever it raises
        every = wire.values((facts, reason))
    reasons = {rank: text for rank, (_, text) in enumerate(every) if text is not None}
    if reasons:
        same = len(reasons) == wire.size and len(set(reasons.values())) == 1
        text = "; ".join(f"rank {rank}: {text}" for rank, text in reasons.items())
        raise NotDistributable(next(iter(reasons.values())) if same else text) from failure
    names = dict.fromkeys(name for facts, _ in every for name in facts)
    differing = [n for n in names if len({facts.get(n) for facts, _ in every}) > 1]
    if differing:
        lines = [f"ranks differ in {len(differing)} of {len(names)} things they must share"]
        for name in differing[:_FEW]:
            values = ", ".join(f"rank {r}: {facts.get(name)}" for r, (facts, _) in enumerate(every))
            lines.append(f"  {name}: {values}")
        raise PartitionMismatch("\n".join(lines))
