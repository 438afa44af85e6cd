"""How long a call takes."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Laps", "timed"]

BUDGET = {"cpu": 0.12, "cuda": 0.05}  # seconds that the laps of one call may take
SHORTEST_LAP = 1e-3  # shorter calls are repeated: clocks are coarse, and a GPU is waited for once
FEWEST_LAPS, MOST_LAPS = 3, 15
ALIVE = 4  # results
DISTURBED = 1.2  # median over fastest lap


class Laps(NamedTuple):
    """Seconds of one call: the median of its laps, the fastest, and their number."""

    median: float
    fastest: float
    laps: int


@torch.no_grad()
def timed(call: Callable[[], Any], device: torch.device) -> Laps:
    """Time a call, several times; again if something else on the machine disturbed it.

    On a GPU the calls of a lap are queued behind one another, as in a model.
    """
    # Results stay for a while, as activations do: otherwise the allocator hands out the same memory
    # again, warm in the cache, and a result on new pages looks ten times cheaper than it is.
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
        wanted = int(BUDGET[device.type] / (once * repeats))
        seconds = sorted(lap(repeats) for _ in range(min(max(wanted, FEWEST_LAPS), MOST_LAPS)))
        return Laps(seconds[len(seconds) // 2], seconds[0], len(seconds))

    lap(1)
    found = laps()
    return min(found, laps()) if found.median > DISTURBED * found.fastest else found
