"""How long a call takes."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

__all__ = ["Laps", "timed"]

BUDGET = {"cpu": 0.12, "cuda": 0.05}  # seconds that the laps of one call may take
MOST_LAPS = {"cpu": 15, "cuda": 25}
ALIVE = 4  # results
DISTURBED = 1.2  # median over fastest lap
SHORTEST_LAP = 1e-3  # on a CPU: shorter calls are repeated, as the clock is coarse


class Laps(NamedTuple):
    """Seconds of one call: the median of its laps, the fastest, and their number."""

    median: float
    fastest: float
    laps: int


@torch.no_grad()
def timed(call: Callable[[], Any], device: torch.device) -> Laps:
    """Time a call, several times; again if something else on the machine disturbed it.

    On a GPU the calls are queued behind one another, as in a model, and the device's own clock
    tells when each was done.
    """
    call()
    found = _timed(call, device)
    if found.median > DISTURBED * found.fastest:
        found = min(found, _timed(call, device))
    return found


def _timed(call: Callable[[], Any], device: torch.device) -> Laps:
    once = max(_lap(call, device, 1), 1e-7)
    laps = int(min(MOST_LAPS[device.type], max(3, BUDGET[device.type] / once)))
    if device.type == "cuda":
        seconds = _events(call, laps)
    else:
        repeats = max(1, round(SHORTEST_LAP / once))
        repeats = max(repeats, ALIVE if once < 0.05 else 1)
        seconds = [_lap(call, device, repeats) / repeats for _ in range(laps)]
    seconds.sort()
    return Laps(seconds[laps // 2], seconds[0], laps)


def _lap(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # Results stay for a while, as activations do: otherwise the allocator hands out the same memory
    # again, warm in the cache, and a result on new pages looks ten times cheaper than it is.
    alive: deque[Any] = deque(maxlen=ALIVE)
    start = time.perf_counter()
    for _ in range(repeats):
        alive.append(call())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _events(call: Callable[[], Any], laps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(laps + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
