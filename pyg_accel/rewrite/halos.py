"""Models whose layers read rows of other processes: :mod:`pyg_accel.distributed` names them."""

import weakref
from collections.abc import Callable

import torch

__all__ = ["DISTRIBUTED", "EXCHANGES", "exchanges_halos"]

# Models whose layers read rows of other processes.
DISTRIBUTED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
# Tell whether such a model runs in this thread; one, while a model is distributed.
EXCHANGES: list[Callable[[], bool]] = []


def exchanges_halos() -> bool:
    """Return whether layers exchange rows with other processes, before each of their products."""
    return any(running() for running in EXCHANGES)
