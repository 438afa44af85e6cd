"""Neighbour loaders whose batches are made on a GPU: where a sampler samples, and copies there."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.derived import derived
from pyg_accel.native import cuda_unavailable_reasons

__all__ = ["copied", "copy_of", "device_of", "leave_on_cpu", "place", "why_on_cpu"]

_DEVICE, _REASON = "_pyg_accel_device", "_pyg_accel_on_cpu"
_CPU = torch.device("cpu")


def device_of(sampler: Any) -> torch.device:
    """Return where a sampler, of any class, samples."""
    device: torch.device = getattr(sampler, _DEVICE, _CPU)
    return device


def why_on_cpu(sampler: Any) -> str:
    """Return why a sampler samples on the CPU what is wanted on a GPU; empty if it does not."""
    return getattr(sampler, _REASON, "")


def place(sampler: Any, data: Any, wanted: torch.device | None) -> None:
    """Decide where a new sampler samples.

    Args:
        sampler: a ``torch_geometric.sampler.NeighborSampler``.
        data: what it was made of.
        wanted: the device of its batches; None for the one that all of its graph lies on.
    """
    device = _graph_device(data) if wanted is None else wanted
    if device.type != "cuda":
        return
    reasons = cuda_unavailable_reasons()
    if not isinstance(data, (Data, HeteroData)):
        reasons = ["its data are remote stores"]
    if reasons:
        setattr(sampler, _REASON, "; ".join(reasons))
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    setattr(sampler, _DEVICE, device)
    # PyG's loader indexes it by the sampled edges, and compares times with those of CPU seeds.
    sampler.perm = _each(sampler.perm, device)
    sampler.node_time = _each(sampler.node_time, _CPU)


def leave_on_cpu(sampler: Any, reason: str) -> None:
    """Let a sampler sample on the CPU, wherever its graph is."""
    if device_of(sampler) != _CPU:
        setattr(sampler, _DEVICE, _CPU)
        setattr(sampler, _REASON, reason)
        sampler.perm = _each(sampler.perm, _CPU)


def _graph_device(data: Any) -> torch.device:
    """Return where all edges lie; the CPU if that is no single device."""
    if not isinstance(data, (Data, HeteroData)):
        return _CPU
    found = set()
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        where: Any = getattr(edges, "device", _CPU)  # a method of SparseTensor
        found.add(where() if callable(where) else where)
    return found.pop() if len(found) == 1 else _CPU


def _each(held: Any, device: torch.device) -> Any:
    """Copy a tensor, the tensors of a dictionary, or nothing, to a device."""
    if isinstance(held, dict):
        return {key: _each(value, device) for key, value in held.items()}
    return None if held is None else copy_of(held, device)


def copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or its only copy on a device, which lasts for as long as it does."""
    if tensor.device == device:
        return tensor
    return derived([tensor], ("copy", device), lambda: tensor.to(device), lasting=True)


def copied(data: Data | HeteroData, device: torch.device) -> Any:
    """Return data whose tensors are on a device; those of several loaders share the copies.

    Raises:
        MemoryError: if the device has no room for them.
    """
    tensors = [t for store in data.stores for t in store.values() if isinstance(t, Tensor)]
    size = sum(t.nbytes for t in tensors if t.device != device)
    free = torch.cuda.mem_get_info(device)[0]

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_of(value, device)
        return value.to(device)  # others, which PyG lets be what they are if they cannot

    try:
        return copy.copy(data).apply(there)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"the graph and its features take {size / 2**30:.1f} GiB, which do not fit into the "
            f"{free / 2**30:.1f} GiB that are free on {device}. Without loader='cuda', and with "
            "data.edge_index alone on the GPU, batches are sampled there, and features are "
            "gathered on the CPU"
        ) from error
