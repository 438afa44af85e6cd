"""How long a call takes."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

__all__ = ["Laps", "timed"]

BUDGET = {"cpu": 0.12, "cuda": 0.05}  # seconds that the laps of one call may take
ALIVE = 4  # results that are kept


class Laps(NamedTuple):
    """Seconds of one call: the median of its laps, the fastest, and their number."""

    median: float
    fastest: float
    laps: int


@torch.no_grad()
def timed(call: Callable[[], Any], device: torch.device) -> Laps:
    """Time a call in laps of many calls each.

    On a GPU the calls of a lap are queued one after another, as in a model.
    """
    # The last results are kept, as activations are. Otherwise a call would write to the memory of
    # the one before, which is in the cache: that can take a tenth of the time in a model.
    names = {"call": call, "alive": deque[Any](maxlen=ALIVE)}
    timer = Timer("alive.append(call())", globals=names, num_threads=torch.get_num_threads())
    found = timer.blocked_autorange(min_run_time=BUDGET[device.type])
    return Laps(found.median, min(found.times), len(found.times))
