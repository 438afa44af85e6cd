"""Loaders under ``patch()``: what stands in for PyG's functions that make batches."""

import time
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch_geometric
from torch_geometric.data import Batch
from torch_geometric.sampler import NeighborSampler

from pyg_accel.call_report import record_batch
from pyg_accel.loader import collate as several
from pyg_accel.loader import neighbors
from pyg_accel.native import cpu_unavailable_reasons
from pyg_accel.patching.reasons import is_active

__all__ = ["collate", "construct", "sample"]


def collate(
    original: Callable[..., Any], cls: type, data_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for ``torch_geometric.data.collate.collate``."""
    if not is_active():
        return original(cls, data_list, *args, **kwargs)
    began = time.perf_counter()
    graphs = data_list if isinstance(data_list, (list, tuple)) else list(data_list)
    reason = next(iter(several.collate_reasons(graphs)), "")
    if reason:
        made = original(cls, graphs, *args, **kwargs)
    else:
        made = several.collate(cls, graphs, *args, **kwargs)
    seconds = time.perf_counter() - began
    what, backend = ("", "PyG") if reason else ("graphs", "cpu")
    if issubclass(cls, Batch):
        record_batch(cls.__name__, what, backend, reason, seconds)
    return made


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
    weighted = self.edge_weight is not None and type(self) is NeighborSampler
    if weighted and not torch_geometric.typing.WITH_WEIGHTED_NEIGHBOR_SAMPLE:
        self.__class__ = WeightedSampler


class WeightedSampler(NeighborSampler):
    """A sampler with weights, which PyG's own would ignore where ``patch()`` is not in force."""

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Any:
        return neighbors.sample(self, seed, seed_time)


def sample(function: Callable[..., Any], self: Any, seed: Any, seed_time: Any = None,
           **kwargs: Any) -> Any:  # fmt: skip
    """Stand in for ``NeighborSampler._sample``."""
    if not _takes_part():
        return function(self, seed, seed_time, **kwargs)
    return neighbors.sample(self, seed, seed_time)
