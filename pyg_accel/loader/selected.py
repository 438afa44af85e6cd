"""Graphs of an ``InMemoryDataset`` by their numbers, which become a batch without being separated.

The dataset holds all graphs as one: an attribute of a batch is one native copy of parts of it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, InMemoryDataset
from torch_geometric.data.storage import N_KEYS
from torch_geometric.utils import cumsum

from pyg_accel.loader.collate import are_dense, batch_of, empty, is_shifted
from pyg_accel.native import library_of

__all__ = ["Selected", "counted_by"]


class Selected:
    """Graphs of a dataset, by their numbers."""

    def __init__(self, dataset: InMemoryDataset, index: Sequence[int], counted: str) -> None:
        """Note them.

        Args:
            dataset: holds the graphs; :func:`counted_by` has accepted it.
            index: their numbers among the items of the dataset.
            counted: attribute that has a row per node.
        """
        self._dataset, self._index, self._counted = dataset, index, counted

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._index)

    def collate(
        self,
        cls: type,
        follow_batch: Iterable[str] | None = None,
        exclude_keys: Iterable[str] | None = None,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Collate all of them; see :func:`~pyg_accel.loader.collate.collate`."""
        data: Any = self._dataset._data
        where: dict[str, Tensor] = self._dataset.slices  # type: ignore[assignment]
        numbers = self._dataset.indices()
        index = torch.tensor([numbers[i] for i in self._index])
        out: Any = empty(cls, type(data))
        followed, excluded = set(follow_batch or ()), set(exclude_keys or ())
        device: torch.device | None = None
        all_slices: dict[str, Any] = {}
        all_incs: dict[str, Any] = {}
        nodes = _slices(where[self._counted], index)
        store = data._store
        for name in (name for name in where if name in store and name not in excluded):
            value = store[name]
            if isinstance(value, Tensor):
                device = value.device if value.is_cuda else device
                incs = nodes[:-1].clone() if is_shifted(name) else torch.zeros_like(nodes[:-1])
                dim, shift = data.__cat_dim__(name, value), incs if is_shifted(name) else None
                library = library_of(value.device)
                out[name], all_slices[name] = library.take_parts(
                    value, dim, where[name], index, shift
                )
                all_incs[name] = incs
            else:
                all_slices[name] = _slices(where[name], index)
                out[name], all_incs[name] = [value[i] for i in index.tolist()], None
            if name in followed:
                out[f"{name}_batch"], out[f"{name}_ptr"] = batch_of(all_slices[name], device)
        if store.can_infer_num_nodes:
            out.batch, out.ptr = batch_of(nodes, device)
        return out, all_slices, all_incs


def _slices(where: Tensor, index: Tensor) -> Tensor:
    """Return where graphs begin in a batch, [B + 1], that begin at ``where`` in a dataset."""
    slices: Tensor = cumsum(where[index + 1] - where[index])
    return slices


def counted_by(dataset: InMemoryDataset, device: torch.device | None) -> str:
    """Return the attribute that has a row per node, if batches can be copied from a dataset.

    It is empty for datasets whose items are not what their tensors say, and have to be made, and
    where there is no library for the device (None: that of the tensors).
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
        known = are_dense([value]) and value.dim() > 0 and "batch" not in name
        if not known or value.requires_grad or library_of(device or value.device) is None:
            return ""
        begins = where[name].dim() == 1 and where[name].dtype == torch.long
        if not begins or (is_shifted(name) and value.dtype != torch.long):
            return ""
    return next((name for name in names if name in N_KEYS), "")
