"""Rows of the report for loaders: the batches that they gave, and how long these were waited for.

Workers are processes with reports of their own, which end with them. So it is the process that asks
for batches that counts them.
"""

import time
from collections.abc import Callable
from typing import Any

from torch_geometric.loader.dataloader import Collater
from torch_geometric.sampler import NeighborSampler

from pyg_accel.call_report import record_batch
from pyg_accel.native import cpu_unavailable_reasons
from pyg_accel.patching.reasons import is_active

__all__ = ["next_batch"]

_HERE = "this process"


def next_batch(function: Callable[..., Any], self: Any) -> Any:
    """Stand in for ``__next__`` of the iterators of torch's and PyG's loaders."""
    owner = _owner_of(self) if is_active() else None
    if owner is None:
        return function(self)
    began = time.perf_counter()
    batch = function(self)
    seconds = time.perf_counter() - began
    what, reason = _contents(owner)
    workers = getattr(self, "iterator", self)._num_workers
    where = f"{workers} worker{'s' * (workers > 1)}" if workers else _HERE
    name = "DataLoader" if isinstance(owner, Collater) else type(owner).__name__
    record_batch(name, what, where if what else "PyG", reason, seconds)
    return batch


def _owner_of(iterator: Any) -> Any:
    """Return the loader of an iterator if it is one of PyG's, or what collates for it."""
    finishes = getattr(iterator, "transform_fn", None)  # of PyG's iterators, in this process
    made = iterator._collate_fn if finishes is None else finishes
    owner = getattr(made, "__self__", made)
    if isinstance(owner, Collater):
        return owner
    if not any(cls.__module__.startswith("torch_geometric.") for cls in type(owner).__mro__):
        return None
    counted = finishes is not None or getattr(owner, "filter_per_worker", True)
    return owner if counted else None  # otherwise by the iterator around this one


def _contents(owner: Any) -> tuple[str, str]:
    """Return what makes the batches here, or else why PyG does."""
    sampler = getattr(owner, "node_sampler", getattr(owner, "link_sampler", None))
    if isinstance(sampler, NeighborSampler):
        reasons = cpu_unavailable_reasons()
        return ("", reasons[0]) if reasons else (f"neighbors {sampler.num_neighbors.values}", "")
    if isinstance(owner, Collater) or hasattr(owner, "follow_batch"):
        return "graphs", ""
    return "", "not a loader of small graphs, nor one with a NeighborSampler"
