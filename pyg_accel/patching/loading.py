"""Loaders under ``patch()``: replacements of PyG's functions that make batches."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.data import Batch
from torch_geometric.sampler import BaseSampler, NeighborSampler

from pyg_accel.loader import collate as several
from pyg_accel.loader import devices
from pyg_accel.patching.reasons import is_active
from pyg_accel.pyg_lib import neighbors, seam
from pyg_accel.runtime.cache import EXACT
from pyg_accel.runtime.native import cpu_unavailable_reasons, cuda_library
from pyg_accel.runtime.report import record_batch

__all__ = [
    "collate", "construct", "construct_both", "device_from", "load", "sample", "switch", "to_csc",
]  # fmt: skip

_wanted: list[torch.device] = []  # of batches, by the calls of patch() in force that name one
# Arguments for processes that cannot use a GPU, or for an unneeded copy.
_OF_WORKERS = ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory",
               "multiprocessing_context", "worker_init_fn", "timeout")  # fmt: skip


def device_from(loader: torch.device | str) -> torch.device:
    """Return the device of ``patch(loader=...)``.

    Raises:
        ValueError: if there are no samplers for it.
        ExtensionNotBuilt: if the CUDA library, or a GPU, is missing.
    """
    device = torch.device(loader)
    if device.type == "cuda":
        cuda_library()
    elif device.type != "cpu":
        raise ValueError(f"expected 'loader' to be None, 'cpu' or 'cuda' (got {loader!r})")
    return device


def switch(device: torch.device, by: int) -> None:
    """Count a ``patch(loader=...)`` that begins (1) or ends (-1)."""
    if by > 0:
        _wanted.append(device)
    else:
        _wanted.remove(device)


def collate(
    original: Callable[..., Any], cls: type, data_list: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``torch_geometric.data.collate.collate``."""
    if not is_active():
        return original(cls, data_list, *args, **kwargs)
    began = time.perf_counter()
    graphs = data_list if isinstance(data_list, (list, tuple)) else list(data_list)
    reason = next(iter(several.collate_reasons(graphs)), "")
    if reason:
        batch = original(cls, graphs, *args, **kwargs)
    else:
        batch = several.collate(cls, graphs, *args, **kwargs)
    seconds = time.perf_counter() - began
    what, backend = ("", "PyG") if reason else ("graphs", "cpu")
    if issubclass(cls, Batch):
        record_batch(cls.__name__, what, backend, reason, seconds)
    return batch


def _takes_part() -> bool:
    return is_active() and not cpu_unavailable_reasons()


def construct(function: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``NeighborSampler.__init__``."""
    if not _takes_part():
        return function(self, *args, **kwargs)
    function(self, *args, **kwargs)
    if self.edge_weight is not None and type(self) is NeighborSampler and seam.is_active():
        self.__class__ = WeightedSampler
    data = args[0] if args else kwargs["data"]
    devices.place(self, data, _wanted[-1] if _wanted else None)


def construct_both(function: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the ``__init__`` of ``BidirectionalNeighborSampler``, which has two samplers."""
    function(self, *args, **kwargs)
    for sampler in (self.forward_sampler, self.backward_sampler):
        devices.leave_on_cpu(sampler, "PyG compares the nodes of both directions one by one")


def to_csc(function: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace PyG's conversion of edges, which counts the edges of targets in an array.

    Raises:
        ValueError: for targets outside of that array.
    """
    edges = None if hasattr(data, "adj") or hasattr(data, "adj_t") else data.edge_index
    transposes = kwargs.get("to_transpose", args[5] if len(args) > 5 else False)
    side = 0 if transposes else 1
    if is_active() and edges is not None and edges.dim() == 2 and side < len(edges):
        size = data.size(side)
        if size is not None and edges.dtype in EXACT and edges.numel():
            least, most = (int(end) for end in edges[side].aminmax())
            if least < 0 or most >= size:
                raise ValueError(
                    f"expected 'edge_index' to hold ids of nodes that exist: there are {size} "
                    f"nodes (got targets from {least} to {most})"
                )
    return function(data, *args, **kwargs)


def load(function: Callable[..., None], self: Any, data: Any, *args: Any, **kwargs: Any) -> None:
    """Replace the ``__init__`` of PyG's ``NodeLoader`` and ``LinkLoader``.

    With a sampler on a GPU, the data are there too, and the consuming process makes the batches.
    """
    sampler = args[0] if args else kwargs.get("node_sampler", kwargs.get("link_sampler"))
    device = devices.device_of(sampler)
    if isinstance(sampler, BaseSampler) and not isinstance(sampler, NeighborSampler):
        for part in vars(sampler).values():
            if isinstance(part, NeighborSampler):
                devices.leave_on_cpu(part, f"it is part of a {type(sampler).__name__}")
    if device.type != "cpu":
        if _wanted and is_active():
            data = devices.data_for(data, device)
        for name in _OF_WORKERS:
            kwargs.pop(name, None)
    function(self, data, *args, **kwargs)


class WeightedSampler(NeighborSampler):
    """A sampler with weights, which PyG's own ignores outside of ``patch()``."""

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Any:
        return neighbors.sample(self, seed, seed_time)


def sample(function: Callable[..., Any], self: Any, seed: Any, seed_time: Any = None,
           **kwargs: Any) -> Any:  # fmt: skip
    """Replace ``NeighborSampler._sample``."""
    if not _takes_part():
        return function(self, seed, seed_time, **kwargs)
    return neighbors.sample(self, seed, seed_time)
