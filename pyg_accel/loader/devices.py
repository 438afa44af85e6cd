"""Neighbour loaders with batches on a GPU: the device of a sampler, and of the tensors it reads.

A GPU reads copies of a loader's tensors, as far as they fit. Others lie in pinned host memory, and
kernels read them over PCIe; for torch they are tensors of the GPU.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NeighborSampler

from pyg_accel.graph.derived import derived
from pyg_accel.runtime.cache import Snapshot, changes_unseen
from pyg_accel.runtime.native import cuda_unavailable_reasons

__all__ = [
    "data_for", "device_of", "leave_on_cpu", "may_have_changed", "place", "readable", "why_on_cpu",
]  # fmt: skip

_DEVICE, _REASON, _SEEN = "_pyg_accel_device", "_pyg_accel_on_cpu", "_pyg_accel_seen"
_CPU = torch.device("cpu")
_GRAPH = ("colptr", "row", "colptr_dict", "row_dict", "perm", "edge_time", "edge_weight")
_log = logging.getLogger("pyg_accel")


def device_of(sampler: Any) -> torch.device:
    """Return the device of a sampler; CPU for samplers of other classes."""
    return vars(sampler).get(_DEVICE, _CPU) if isinstance(sampler, NeighborSampler) else _CPU


def why_on_cpu(sampler: Any) -> str:
    """Return why a sampler for a GPU samples on the CPU, or an empty string."""
    return getattr(sampler, _REASON, "")


def place(sampler: Any, data: Any, wanted: torch.device | None) -> None:
    """Set the device of a new sampler.

    Args:
        sampler: a ``torch_geometric.sampler.NeighborSampler``.
        data: its source.
        wanted: the device of its batches; None for the device of its graph.
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
    _move(sampler, device)
    # PyG's loader compares them with the times of seeds, which are on the CPU.
    sampler.node_time = _each(sampler.node_time, _CPU)


def leave_on_cpu(sampler: Any, reason: str) -> None:
    """Let a sampler sample on the CPU, for a graph on any device."""
    if device_of(sampler) != _CPU:
        setattr(sampler, _REASON, reason)
        _move(sampler, _CPU)


def _move(sampler: Any, device: torch.device) -> None:
    setattr(sampler, _DEVICE, device)
    for name in _GRAPH:
        if hasattr(sampler, name):
            setattr(sampler, name, _each(getattr(sampler, name), device))


def _graph_device(data: Any) -> torch.device:
    """Return the device of all edges; the CPU if there are several."""
    if not isinstance(data, (Data, HeteroData)):
        return _CPU
    devices = set()
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        where: Any = getattr(edges, "device", _CPU)  # a method of SparseTensor
        devices.add(where() if callable(where) else where)
    return devices.pop() if len(devices) == 1 else _CPU


def _each(held: Any, device: torch.device) -> Any:
    """Return a tensor, or a dictionary of tensors, in a form that a device can read."""
    if isinstance(held, dict):
        return {key: _each(value, device) for key, value in held.items()}
    return None if held is None else readable(held, device)


def may_have_changed(sampler: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors of a sampler differ from its last call, or may change unseen."""
    seen = getattr(sampler, _SEEN, None)
    if seen is not None and seen.fits(tensors) and not any(map(changes_unseen, tensors)):
        return False
    setattr(sampler, _SEEN, Snapshot(tensors))
    return True


class _HostMemory:
    """Pinned memory in the form of CUDA memory; it lives as long as tensors in it."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (tensor.nbytes,),
            "data": (tensor.data_ptr(), False),
        }  # fmt: skip
        # Queued kernels must read it before it is reused.
        finalize(self, torch.cuda.synchronize, device).atexit = False


def _on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a pinned tensor as one of a device, without a copy."""
    memory = torch.as_tensor(_HostMemory(tensor, device), device=device)
    return memory.view(tensor.dtype).view(tensor.shape)


def _room(device: torch.device) -> int:
    """Return the bytes that may be copied to a GPU: an eighth is reserved for batches."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - total // 8


def readable(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor that kernels of a device can read.

    It is the tensor itself, or the memory of a pinned tensor, or a copy on the device (in pinned
    memory if it does not fit). The copy is shared, and lives as long as the tensor.
    """
    if tensor.device == device:
        return tensor
    dense = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad

    def move() -> Tensor:
        if device.type != "cuda" or not dense or tensor.nbytes <= _room(device):
            return tensor.to(device)
        _log.info("%.2f GiB do not fit into %s: they stay in pinned host memory",
                  tensor.nbytes / 2**30, device)  # fmt: skip
        return _on_host(tensor.contiguous().pin_memory(), device)

    if device.type == "cuda" and dense and tensor.is_pinned() and tensor.is_contiguous():
        return _on_host(tensor, device)
    return derived([tensor], ("copy", device), move, lasting=True)


def data_for(data: Data | HeteroData, device: torch.device) -> Any:
    """Return data whose tensors a device can read; several loaders share the copies."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return readable(value, device)
        return value.to(device)  # apply() leaves values without to() unchanged

    # The edges last: PyG's loader only reads their device.
    first = [name for store in data.stores for name in store if name != "edge_index"]
    return copy.copy(data).apply(there, *first).apply(there)
