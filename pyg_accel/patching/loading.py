"""Loaders under ``patch()``: what stands in for PyG's functions that make batches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_geometric.data import InMemoryDataset

from pyg_accel.loader import collate as several
from pyg_accel.loader.selected import Selected, select
from pyg_accel.patching.reasons import is_active

__all__ = ["collate", "getitems"]


def collate(
    original: Callable[..., Any],
    cls: type,
    data_list: Any,
    increment: bool = True,
    add_batch: bool = True,
    follow_batch: Iterable[str] | None = None,
    exclude_keys: Iterable[str] | None = None,
) -> Any:
    """Stand in for ``torch_geometric.data.collate.collate``."""
    if not is_active():
        return original(cls, data_list, increment, add_batch, follow_batch, exclude_keys)
    if increment and isinstance(data_list, Selected):
        return data_list.collate(cls, add_batch, follow_batch, exclude_keys)
    return several.collate(
        original, cls, data_list, increment, add_batch, follow_batch, exclude_keys
    )


def getitems(self: InMemoryDataset, index: Sequence[int]) -> Sequence[Any]:
    """Return the items of a batch; ``__getitems__`` of datasets, which torch's loaders call."""
    return select(self, index) if is_active() else [self[i] for i in index]
