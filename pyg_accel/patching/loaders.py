"""Stands in for PyG's ``NeighborSampler``, which every neighbour loader calls."""

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch_geometric

from pyg_accel.loader import neighbors
from pyg_accel.native import cpu_unavailable_reasons
from pyg_accel.patching.reasons import is_active

__all__ = ["construct", "sample"]


def _takes_part() -> bool:
    return is_active() and not cpu_unavailable_reasons()


def construct(function: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``NeighborSampler.__init__``, which asks for pyg-lib: here it has one."""
    if not _takes_part():
        return function(self, *args, **kwargs)
    typing = SimpleNamespace(**vars(torch_geometric.typing))
    typing.WITH_PYG_LIB = True
    typing.WITH_EDGE_TIME_NEIGHBOR_SAMPLE = typing.WITH_WEIGHTED_NEIGHBOR_SAMPLE = True
    module = SimpleNamespace(typing=typing)
    assert isinstance(function, FunctionType)
    # Its own code, which reads `torch_geometric.typing`; other threads see nothing of it.
    complete = FunctionType(
        function.__code__, {**function.__globals__, "torch_geometric": module}, "__init__",
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    complete.__kwdefaults__ = function.__kwdefaults__
    complete(self, *args, **kwargs)


def sample(function: Callable[..., Any], self: Any, seed: Any, seed_time: Any = None,
           **kwargs: Any) -> Any:  # fmt: skip
    """Stand in for ``NeighborSampler._sample``."""
    if not _takes_part():
        return function(self, seed, seed_time, **kwargs)
    return neighbors.sample(self, seed, seed_time)
