"""Graphs of an ``InMemoryDataset`` by number, collated without separating them.

The dataset holds all graphs as one: an attribute of a batch is one native copy of its parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, InMemoryDataset
from torch_geometric.data.storage import N_KEYS
from torch_geometric.utils import cumsum

from pyg_accel.loader.collate import are_dense, is_shifted
from pyg_accel.runtime.native import library_of

__all__ = ["Selected", "counted_by"]


class Selected:
    """Graphs of a dataset, by their numbers.

    Args:
        dataset: holds the graphs; :func:`counted_by` has accepted it.
        index: numbers of items of the dataset.
        counted: attribute that has a row per node.

    Attributes:
        data: all graphs as one.
        store: the storage of their attributes.
        names: of the attributes.
        ptr: number of nodes of the graphs before each, and of all: [B + 1].
    """

    def __init__(self, dataset: InMemoryDataset, index: Sequence[int], counted: str) -> None:
        data: Any = dataset._data
        self._where: dict[str, Tensor] = dataset.slices  # type: ignore[assignment]
        numbers = dataset.indices()
        self._index = torch.tensor([numbers[i] for i in index])
        self.data, self.store = data, data._store
        self.names = [name for name in self._where if name in self.store]
        self.ptr = self._slices(counted)

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._index)

    def _slices(self, name: str) -> Tensor:
        where = self._where[name]
        slices: Tensor = cumsum(where[self._index + 1] - where[self._index])
        return slices

    def attribute(self, name: str) -> tuple[Any, Any, Any]:
        """Collate one attribute: its value, where each graph begins, increments."""
        value = self.store[name]
        if not isinstance(value, Tensor):
            return [value[i] for i in self._index.tolist()], self._slices(name), None
        shifted = is_shifted(name)
        incs = self.ptr[:-1].clone() if shifted else torch.zeros_like(self.ptr[:-1])
        out, slices = library_of(value.device).take_parts(
            value, self.data.__cat_dim__(name, value), self._where[name], self._index,
            incs if shifted else None,
        )  # fmt: skip
        return out, slices, incs


def counted_by(dataset: InMemoryDataset, device: torch.device | None) -> str:
    """Return the attribute that has a row per node, if batches can be copied from a dataset.

    It is empty for datasets that compute their items, and for devices without a library (None: the
    device of the tensors).
    """
    cls, data, where = type(dataset), dataset._data, dataset.slices
    stock = cls.get is InMemoryDataset.get and cls.__getitem__ is Dataset.__getitem__
    if (
        not stock
        or "get" in vars(dataset)
        or dataset.transform is not None
        or type(data) is not Data
        or not where
    ):
        return ""
    store = data._store
    names = [name for name in where if name in store._mapping]
    if len(names) < len(store._mapping) or "ptr" in names or "_num_nodes" in vars(store):
        return ""
    for name in names:
        value = store._mapping[name]
        if isinstance(value, list) and value and isinstance(value[0], str):
            continue
        supported = are_dense([value]) and value.dim() > 0 and "batch" not in name
        if not supported or value.requires_grad or library_of(device or value.device) is None:
            return ""
        begins = where[name]
        listed = begins.is_cpu and begins.dim() == 1 and begins.dtype == torch.long
        if not listed or (is_shifted(name) and value.dtype != torch.long):
            return ""
    return next((name for name in names if name in N_KEYS), "")
