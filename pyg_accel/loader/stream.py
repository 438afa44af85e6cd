"""The stream on which a GPU samples a batch, in parallel with the step on earlier batches.

A sampler waits for the device once per hop. On the current stream it would wait for all queued
steps, and the device would then wait for it. The host is at most one batch ahead: further batches
would only take memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["beside"]


class _Own:
    """A stream, and an event after the work that was queued before its last block."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.before: torch.cuda.Event | None = None


_own = lru_cache(maxsize=64)(_Own)  # by device


@contextmanager
def beside(device: torch.device, *, after: bool) -> Iterator[list[Tensor]]:
    """Queue the work of a block on a separate stream of a GPU; on a CPU, run the block.

    Args:
        device: the device of the work.
        after: wait for pending writes of the current stream.

    Yields:
        A list for new tensors, which the current stream may use after the block.
    """
    created: list[Tensor] = []
    if device.type != "cuda":
        yield created
        return
    current, own = torch.cuda.current_stream(device), _own(device)
    before, own.before = own.before, current.record_event()
    if before is not None:
        before.synchronize()
    if after:
        own.stream.wait_event(own.before)
    with torch.cuda.stream(own.stream):
        yield created
    current.wait_stream(own.stream)
    for tensor in created:
        tensor.record_stream(current)
