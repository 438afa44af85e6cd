"""Puts many small graphs into one batch, as ``torch_geometric.data.collate`` does.

PyG queries every graph for the number of nodes and the increment of every attribute, adds these
numbers to each tensor, and fills a tensor per graph for the batch vector. Here the numbers of all
graphs are one tensor, and an attribute is one native copy. The batch is the same, attribute for
attribute. PyG's function collates other attributes, such as lists, and graphs of a class with
another ``__inc__`` are queried one by one.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.collate import _batch_and_ptr, _collate, get_incs
from torch_geometric.data.storage import N_KEYS, BaseStorage, NodeStorage
from torch_geometric.utils import cumsum

from pyg_accel.runtime.native import library_of

__all__ = ["are_dense", "collate", "collate_reasons", "gather", "is_shifted"]

_STOCK_INC = (Data.__inc__, HeteroData.__inc__)
_CPU = torch.device("cpu")
_RECORDS = attrgetter("requires_grad")
_STOCK_CAT_DIM = (Data.__cat_dim__, HeteroData.__cat_dim__)

Collated = tuple[Any, dict[Any, Any], dict[Any, Any]]


class _Group:
    """The storages of one kind, of all graphs.

    Attributes:
        store: the first of them.
        names: its attributes.
    """

    def __init__(self, stores: list[BaseStorage], graphs: Any, increment: bool) -> None:
        self.stores, self.graphs, self.increment = stores, graphs, increment
        self.maps = [store._mapping for store in stores]
        self.store, self.names = stores[0], list(self.maps[0])
        self._collated: dict[str, tuple[Any, Any, Any]] = {}

    @cached_property
    def ptr(self) -> Tensor:
        """Number of nodes of the graphs before each, and of all: [B + 1].

        It follows from the attribute by which PyG counts nodes, if this is the same in all graphs.
        """
        name = next((key for key in self.names if key in N_KEYS), "batch")
        stock = type(self.graphs[0]).__cat_dim__ in _STOCK_CAT_DIM
        if stock and not is_shifted(name) and "num_nodes" not in self.names:
            values: list[Any] = [m.get(name) for m in self.maps]
            alike = are_dense(values) and all(list(m) == self.names for m in self.maps)
            if alike and values[0].dim() > 0:
                slices: Tensor = self.attribute(name)[1]
                return slices
        return cumsum(torch.tensor([store.num_nodes or 0 for store in self.stores]))

    def increments(self, name: str, values: list[Tensor]) -> Tensor:
        """Return the increment of an attribute in each graph, [B] or [B, 2, 1]."""
        inc = type(self.graphs[0]).__inc__
        if inc in _STOCK_INC and not is_shifted(name):
            return torch.zeros(len(values), dtype=torch.long)
        stock = inc is Data.__inc__ and type(self.graphs[0]).num_nodes is Data.num_nodes
        if stock and "batch" not in name:
            return self.ptr[:-1].clone()
        incs: Tensor = get_incs(name, values, self.graphs, self.stores)
        return incs

    def values(self, name: str) -> list[Any]:
        """Return an attribute of every graph."""
        return [m[name] for m in self.maps]

    def attribute(self, name: str) -> tuple[Any, Any, Any]:
        """Collate one attribute: its value, where each graph begins, increments."""
        if name not in self._collated:
            self._collated[name] = self._attribute(name, self.values(name))
        return self._collated[name]

    def _attribute(self, name: str, values: list[Any]) -> tuple[Any, Any, Any]:
        graph, library = self.graphs[0], library_of(_CPU)
        if library is not None and are_dense(values) and not any(map(_RECORDS, values)):
            incs = self.increments(name, values) if self.increment else None
            moves = is_shifted(name) or type(graph).__inc__ not in _STOCK_INC
            by = incs if moves else None
            if by is None or by.dim() == 1 or (by.shape[1:] == (2, 1) and values[0].dim() == 2):
                dim = graph.__cat_dim__(name, values[0], self.stores[0])
                if joined := library.join(values, dim, by):
                    return *joined, incs
        result: tuple[Any, Any, Any] = _collate(
            name, values, self.graphs, self.stores, self.increment
        )
        return result


def collate_reasons(graphs: Sequence[Any]) -> list[str]:
    """Return why PyG has to collate graphs; empty if :func:`collate` does."""
    kinds = set(map(type, graphs))
    if len(kinds) > 1:
        return [f"graphs of several classes: {', '.join(sorted(k.__name__ for k in kinds))}"]
    if not all(issubclass(kind, (Data, HeteroData)) for kind in kinds):
        return [f"{kind.__name__} is neither Data nor HeteroData" for kind in kinds]
    return [] if graphs else ["no graphs"]


def collate(
    cls: type,
    data_list: Sequence[Any],
    increment: bool = True,
    add_batch: bool = True,
    follow_batch: Iterable[str] | None = None,
    exclude_keys: Iterable[str] | None = None,
) -> Collated:
    """Collate graphs into one object; see ``torch_geometric.data.collate.collate``.

    Args:
        cls: class of the result.
        data_list: the graphs, against which there are no :func:`collate_reasons`.
        increment: shift indices by the nodes of the graphs before.
        add_batch: add the vectors ``batch`` and ``ptr``.
        follow_batch: attributes that get batch vectors.
        exclude_keys: attributes to leave out.

    Returns:
        The result, where each attribute of each graph begins, and its increments.
    """
    by_key: dict[Any, list[BaseStorage]] = {}
    if type(data_list[0]).stores is Data.stores:
        by_key[None] = [graph._store for graph in data_list]
    else:
        for graph in data_list:
            for store in graph.stores:
                by_key.setdefault(store._key, []).append(store)
    groups = {key: _Group(stores, data_list, increment) for key, stores in by_key.items()}
    return gather(cls, data_list[0], groups, add_batch, follow_batch, exclude_keys)


def gather(
    cls: type,
    like: Any,
    groups: Mapping[Any, Any],
    add_batch: bool,
    follow_batch: Iterable[str] | None,
    exclude_keys: Iterable[str] | None,
) -> Collated:
    """Make a result like a graph, from groups of attributes by the keys of its storages."""
    out: Any = _empty(cls, type(like))
    out.stores_as(like)
    followed, excluded = set(follow_batch or ()), {"ptr", *(exclude_keys or ())}
    device: torch.device | None = None
    all_slices: dict[Any, Any] = {}
    all_incs: dict[Any, Any] = {}
    for out_store in out.stores:
        key = out_store._key
        group = groups[key]
        slices_of = all_slices if key is None else {}
        incs_of = all_incs if key is None else {}
        for name in group.names:
            if name in excluded:
                continue
            if name == "num_nodes":
                out_store._num_nodes = group.values(name)
                out_store.num_nodes = sum(out_store._num_nodes)
                continue
            value, slices, incs = group.attribute(name)
            if isinstance(value, Tensor) and value.is_cuda:
                device = value.device
            out_store[name] = value
            slices_of[name], incs_of[name] = slices, incs
            if name in followed:
                out_store[f"{name}_batch"], out_store[f"{name}_ptr"] = _batch_of(slices, device)
        if slices_of and key is not None:
            all_slices[key], all_incs[key] = slices_of, incs_of
        counts = isinstance(group.store, NodeStorage) and group.store.can_infer_num_nodes
        if add_batch and counts:
            out_store.batch, out_store.ptr = _batch_of(group.ptr, device)
    return out, all_slices, all_incs


def _empty(cls: type, kind: Any) -> Any:
    """Make a result without attributes.

    PyG makes a class of batches for each class of graphs, and inspects arguments of ``__init__`` at
    each call, which is only needed for classes of users.
    """
    if cls is kind:
        return cls()
    if kind.__init__ in (Data.__init__, HeteroData.__init__):
        return type.__call__(_class_of_batches(cls, kind))
    return cls(_base_cls=kind)


@lru_cache(maxsize=64)
def _class_of_batches(cls: Any, kind: type) -> type:
    return type(cls(_base_cls=kind))


def is_shifted(name: str) -> bool:
    """Whether PyG increments an attribute, by its name."""
    return "batch" in name or "index" in name or name == "face"


def are_dense(values: list[Any]) -> bool:
    """Whether values are plain dense tensors; like PyG, only the first layout is checked."""
    if set(map(type, values)) != {Tensor}:
        return False
    return not values[0].is_nested and values[0].layout is torch.strided


def _batch_of(slices: Any, device: torch.device | None) -> Any:
    """Return the batch vector of an attribute, and where each graph begins in it."""
    if not isinstance(slices, Tensor) or slices.dim() != 1:
        return _batch_and_ptr(slices, device)
    ptr = slices.to(device or "cpu", non_blocking=True, copy=True)
    return torch.repeat_interleave(ptr.diff(), output_size=int(slices[-1])), ptr
