"""Times a call."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Laps", "timed"]

BUDGET = {"cpu": 0.12, "cuda": 0.05}  # seconds that the laps of one call may take
SHORTEST_LAP = 1e-3  # shorter calls are repeated: clocks are coarse, and a GPU is waited for once
FEWEST_LAPS, MOST_LAPS = 3, 15
ALIVE = 4  # results in memory at a time
DISTURBED = 1.2  # a median this many times the fastest lap: measure again


class Laps(NamedTuple):
    """Seconds of one call: the median of its laps, the fastest, and their number."""

    median: float
    fastest: float
    laps: int


@torch.no_grad()
def timed(call: Callable[[], Any], device: torch.device) -> Laps:
    """Time a call several times; again if something else on the machine disturbed it.

    On a GPU the calls of a lap are queued one after another, as in a model.
    """
    # Results stay alive, as activations do. Otherwise a call would write to the memory of the last
    # one, which is in the cache: that can take a tenth of the time in a model.
    alive: deque[Any] = deque(maxlen=ALIVE)

    def lap(repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            alive.append(call())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(time.perf_counter() - start, 1e-9) / repeats

    def laps() -> Laps:
        once = lap(1)
        repeats = max(1, round(SHORTEST_LAP / once))
        affordable = int(BUDGET[device.type] / (once * repeats))
        count = min(max(affordable, FEWEST_LAPS), MOST_LAPS)
        seconds = sorted(lap(repeats) for _ in range(count))
        return Laps(seconds[len(seconds) // 2], seconds[0], len(seconds))

    lap(1)
    first = laps()
    return min(first, laps()) if first.median > DISTURBED * first.fastest else first
