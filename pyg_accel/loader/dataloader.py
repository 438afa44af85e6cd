"""PyG's ``DataLoader``, whose graphs lie on a device and are put into batches there."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.loader import DataLoader as StockDataLoader

from pyg_accel.loader.collate import gather
from pyg_accel.loader.selected import Selected, counted_by

__all__ = ["DataLoader"]


class DataLoader(StockDataLoader):
    """``torch_geometric.loader.DataLoader`` whose batches are made on a device.

    The graphs of an ``InMemoryDataset`` of ``Data`` objects, of a ``torch.utils.data.Subset`` of
    one, or of a list of ``Data`` objects, are copied to the device once, when the loader is made; a
    batch is one native copy per attribute, and only the numbers of its graphs come from the host.
    Later changes of the dataset have no effect. Other datasets (with a transform, another ``get``,
    or typed graphs), and devices without a native library, are read and collated by PyG, and each
    batch is copied.

    Args:
        dataset: the graphs.
        batch_size: number of graphs of a batch.
        shuffle: draw them in a new order in each epoch.
        follow_batch: attributes that get batch vectors.
        exclude_keys: attributes to leave out.
        device: the device of batches, such as ``"cuda"``; None for the device of the graphs.
        **kwargs: other arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ValueError: if workers or pinned memory are asked for, and batches are made on a GPU.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type != "cpu":
            for name in ("num_workers", "pin_memory"):
                if kwargs.get(name):
                    raise ValueError(
                        f"expected no {name} with device={str(device)!r}, where the process that "
                        f"uses batches makes them, got {name}={kwargs[name]!r}"
                    )
        super().__init__(
            _resident(dataset, self.device), batch_size, shuffle, follow_batch, exclude_keys,
            **kwargs,
        )  # fmt: skip
        stock, self.collate_fn = self.collate_fn, self._collate
        self._stock = stock

    def _collate(self, items: Any) -> Any:
        if isinstance(items, Selected):
            batch, slices, incs = gather(
                Batch, items.data, {None: items}, True, self.follow_batch, self.exclude_keys
            )
            batch._num_graphs, batch._slice_dict, batch._inc_dict = len(items), slices, incs
            return batch
        batch = self._stock(items)
        return batch if self.device is None else batch.to(self.device)


class _Resident(torch.utils.data.Dataset[Any]):
    """A dataset in memory that is collated without making its items."""

    def __init__(self, graphs: InMemoryDataset, counted: str) -> None:
        self.graphs, self.counted = graphs, counted

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, at: int) -> Any:
        return self.graphs[at]

    def __getitems__(self, index: Sequence[int]) -> Selected:
        return Selected(self.graphs, index, self.counted)


class _Collated(InMemoryDataset):
    """The graphs of a list."""

    def __init__(self, graphs: Sequence[Data]) -> None:
        super().__init__()
        self.data, self.slices = self.collate([*graphs])


def _resident(dataset: Any, device: torch.device | None) -> Any:
    """Return a dataset with its tensors on a device; others than in-memory ones unchanged."""
    if isinstance(dataset, Subset):
        return Subset(_resident(dataset.dataset, device), dataset.indices)
    listed = isinstance(dataset, (list, tuple)) and dataset
    if listed and all(type(graph) is Data for graph in dataset):
        dataset = _Collated(dataset)
    counted = counted_by(dataset, device) if isinstance(dataset, InMemoryDataset) else ""
    if not counted:
        return dataset
    held = copy.copy(dataset)
    held._data_list = None
    data: Any = dataset._data
    held._data = copy.copy(data).contiguous()
    if device is not None:
        held._data = held._data.to(device)
    return _Resident(held, counted)
