"""Graphs of an ``InMemoryDataset`` by their numbers, which become a batch without being separated.

The dataset holds all graphs as one: an attribute of a batch is one ``index_select`` of it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, Dataset, InMemoryDataset
from torch_geometric.data.storage import N_KEYS
from torch_geometric.utils import cumsum

from pyg_accel.loader.collate import are_dense, batch_of, empty, is_shifted, shared_like
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
        parts = _Parts(index)
        nodes = parts.of(where[self._counted], None).slices
        store = data._store
        for name in (name for name in where if name in store and name not in excluded):
            value = store[name]
            if isinstance(value, Tensor):
                device = value.device if value.is_cuda else device
                incs = nodes[:-1].clone() if is_shifted(name) else torch.zeros_like(nodes[:-1])
                dim, shift = data.__cat_dim__(name, value), incs if is_shifted(name) else None
                out[name], all_slices[name] = parts.take(value, dim, where[name], shift)
                all_incs[name] = incs
            else:
                all_slices[name] = parts.of(where[name], None).slices.clone()
                out[name], all_incs[name] = [value[i] for i in index.tolist()], None
            if name in followed:
                out[f"{name}_batch"], out[f"{name}_ptr"] = batch_of(all_slices[name], device)
        if store.can_infer_num_nodes:
            out.batch, out.ptr = batch_of(nodes, device)
        return out, all_slices, all_incs


class _Part:
    """The rows that some graphs have of attributes whose slices are the same.

    Attributes:
        begin: [B], where each graph begins in the dataset.
        slices: [B + 1], where it begins in the batch.
        rows: of the dataset, in the order of the batch.
        graph: of the batch, by row.
    """

    def __init__(self, begin: Tensor, sizes: Tensor, device: torch.device | None) -> None:
        self.begin, self.slices, self.device = begin, cumsum(sizes), device
        if device is not None:
            total = int(self.slices[-1])
            offset, sizes = (begin - self.slices[:-1]).to(device), sizes.to(device)
            graph = torch.arange(sizes.numel(), device=device)
            self.graph = graph.repeat_interleave(sizes, output_size=total)
            self.rows = offset[self.graph].add_(torch.arange(total, device=device))


class _Parts:
    """Makes each part once: attributes of nodes have equal slices, and those of edges."""

    def __init__(self, index: Tensor) -> None:
        self._index, self._next = index, index + 1
        self._known: list[_Part] = []

    def take(
        self, value: Tensor, dim: int, where: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what the graphs have of a tensor, shifted, and where each begins in it."""
        shared = get_worker_info() is not None  # where results lie in memory of their own
        library = None if shared or value.requires_grad else library_of(value.device)
        found = None
        if library is not None:
            take = library.take_parts if value.is_cuda else library.take
            found = take(value, dim, where, self._index, shift)
        if found:
            return found[0], found[1]
        part = self.of(where, value.device)
        out = torch.index_select(
            value, dim, part.rows, out=shared_like(value, dim, part.rows.numel())
        )
        if shift is not None:
            out += shift.to(value.device)[part.graph]
        return out, part.slices.clone()

    def of(self, where: Tensor, device: torch.device | None) -> _Part:
        """Return the part of attributes with these slices, which lie on a device."""
        begin, end = where[self._index].long(), where[self._next].long()
        sizes = end - begin
        for part in self._known:
            same = part.device == device and torch.equal(part.begin, begin)
            if same and torch.equal(part.slices.diff(), sizes):
                return part
        self._known.append(_Part(begin, sizes, device))
        return self._known[-1]


def counted_by(dataset: InMemoryDataset) -> str:
    """Return the attribute that has a row per node, if a dataset's items are what its tensors say.

    It is empty for others, whose items have to be made.
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
        if not known or where[name].dim() != 1 or (is_shifted(name) and value.dtype != torch.long):
            return ""
    return next((name for name in names if name in N_KEYS), "")
