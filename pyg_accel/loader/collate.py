"""Puts many small graphs into one batch, as ``torch_geometric.data.collate`` does.

PyG asks every graph for every attribute how many nodes it has and how its indices shift, adds these
numbers to each tensor, and fills a tensor per graph for the batch vector. Here the numbers of all
graphs are one tensor: an attribute is one concatenation, and at most one addition. The batch is the
same, attribute for attribute. Attributes other than tensors are collated by PyG's own function, and
graphs whose class has its own ``__inc__`` are asked one by one.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.collate import _batch_and_ptr, _collate, get_incs
from torch_geometric.data.storage import N_KEYS, BaseStorage, NodeStorage
from torch_geometric.utils import cumsum

__all__ = [
    "are_dense",
    "batch_of",
    "collate",
    "is_shifted",
    "shared_like",
]

_STOCK_INC = (Data.__inc__, HeteroData.__inc__)
_STOCK_CAT_DIM = (Data.__cat_dim__, HeteroData.__cat_dim__)

Collated = tuple[Any, dict[Any, Any], dict[Any, Any]]


class _Group:
    """The storages of one kind, of all graphs."""

    def __init__(self, stores: list[BaseStorage], graphs: Any) -> None:
        self.stores, self.graphs = stores, graphs
        self.maps = [store._mapping for store in stores]
        self._num_nodes: list[int] | None = None

    @property
    def num_nodes(self) -> list[int]:
        """Number of nodes of each graph."""
        if self._num_nodes is None:
            self._num_nodes = self._count()
        return self._num_nodes

    def _count(self) -> list[int]:
        names = list(self.maps[0])
        name = next((key for key in names if key in N_KEYS), "")
        stock = type(self.graphs[0]).__cat_dim__ in _STOCK_CAT_DIM
        if stock and name and "num_nodes" not in names:
            values: list[Any] = [m.get(name) for m in self.maps]
            if are_dense(values) and all(list(m) == names for m in self.maps):
                return [value.size(0) for value in values]
        return [store.num_nodes or 0 for store in self.stores]

    def increments(self, name: str, values: list[Tensor]) -> Tensor:
        """By how much an attribute is shifted in each graph: [B], or [B, 2, 1]."""
        inc = type(self.graphs[0]).__inc__
        if inc in _STOCK_INC and not is_shifted(name):
            return torch.zeros(len(values), dtype=torch.long)
        stock = inc is Data.__inc__ and type(self.graphs[0]).num_nodes is Data.num_nodes
        if stock and "batch" not in name:
            return cumsum(torch.tensor(self.num_nodes)[:-1])
        incs: Tensor = get_incs(name, values, self.graphs, self.stores)
        return incs

    def attribute(self, name: str, values: list[Any], increment: bool) -> tuple[Any, Any, Any]:
        """Collate one attribute: its value, where each graph begins, increments."""
        first, graph = values[0], self.graphs[0]
        moves = increment and (is_shifted(name) or type(graph).__inc__ not in _STOCK_INC)
        incs = None
        simple = are_dense(values) and not (moves and {v.dtype for v in values} != {torch.long})
        if simple and increment:
            incs = self.increments(name, values)
            pairs = incs.shape[1:] == (2, 1) and all(v.dim() == 2 == v.size(0) for v in values)
            simple = incs.dtype == torch.long and (incs.dim() == 1 or pairs)
        if not simple:
            result: tuple[Any, Any, Any] = _collate(
                name, values, self.graphs, self.stores, increment
            )
            return result
        dim = graph.__cat_dim__(name, first, self.stores[0])
        if dim is None or first.dim() == 0:
            values = [value.unsqueeze(0) for value in values]
        sizes = torch.tensor([value.size(dim or 0) for value in values])
        slices = cumsum(sizes)
        alike = len({value.dim() for value in values}) == 1
        out = shared_like(values[0], dim or 0, int(slices[-1])) if alike else None
        joined = torch.cat(values, dim or 0, out=out)
        if incs is not None and (incs.dim() > 1 or int(incs[-1]) != 0):
            parts = joined.split(sizes.tolist(), dim or 0)
            torch._foreach_add_(parts, incs.tolist() if incs.dim() == 1 else [*incs.unbind()])
        return joined, slices, incs


def collate(
    original: Callable[..., Collated],
    cls: type,
    data_list: Any,
    increment: bool = True,
    add_batch: bool = True,
    follow_batch: Iterable[str] | None = None,
    exclude_keys: Iterable[str] | None = None,
) -> Collated:
    """Collate graphs into one object; see ``torch_geometric.data.collate.collate``.

    Args:
        original: PyG's function, for graphs that this one does not collate.
        cls: class of the result.
        data_list: the graphs.
        increment: shift indices by the nodes of the graphs before.
        add_batch: add the vectors ``batch`` and ``ptr``.
        follow_batch: attributes that get batch vectors of their own.
        exclude_keys: attributes to leave out.

    Returns:
        The result, where each attribute of each graph begins, and its increments.
    """
    graphs = data_list if isinstance(data_list, (list, tuple)) else list(data_list)
    kind = type(graphs[0])
    if not issubclass(kind, (Data, HeteroData)) or any(type(g) is not kind for g in graphs):
        return original(cls, graphs, increment, add_batch, follow_batch, exclude_keys)
    out: Any = cls() if cls is kind else cls(_base_cls=kind)
    out.stores_as(graphs[0])
    followed, excluded = set(follow_batch or ()), set(exclude_keys or ())
    by_key: dict[Any, list[BaseStorage]] = {}
    for graph in graphs:
        for store in graph.stores:
            by_key.setdefault(store._key, []).append(store)
    device: torch.device | None = None
    all_slices: dict[Any, Any] = {}
    all_incs: dict[Any, Any] = {}
    for out_store in out.stores:
        key = out_store._key
        group = _Group(by_key[key], graphs)
        slices_of = all_slices if key is None else {}
        incs_of = all_incs if key is None else {}
        for name in group.maps[0]:
            if name in excluded or name == "ptr":
                continue
            values = [m[name] for m in group.maps]
            if name == "num_nodes":
                out_store._num_nodes = values
                out_store.num_nodes = sum(values)
                continue
            value, slices, incs = group.attribute(name, values, increment)
            if isinstance(value, Tensor) and value.is_cuda:
                device = value.device
            out_store[name] = value
            slices_of[name], incs_of[name] = slices, incs
            if name in followed:
                out_store[f"{name}_batch"], out_store[f"{name}_ptr"] = batch_of(slices, device)
        if slices_of and key is not None:
            all_slices[key], all_incs[key] = slices_of, incs_of
        first = group.stores[0]
        if add_batch and isinstance(first, NodeStorage) and first.can_infer_num_nodes:
            slices = cumsum(torch.tensor(group.num_nodes))
            out_store.batch, out_store.ptr = batch_of(slices, device)
    return out, all_slices, all_incs


def is_shifted(name: str) -> bool:
    """Whether PyG increments an attribute of this name."""
    return "batch" in name or "index" in name or name == "face"


def are_dense(values: list[Any]) -> bool:
    """Whether values are ordinary tensors."""
    if set(map(type, values)) != {Tensor} or values[0].is_nested:
        return False
    return {value.layout for value in values} == {torch.strided}


def shared_like(like: Tensor, dim: int, size: int) -> Tensor | None:
    """Return memory for a result of so many rows, in a worker that sends it; None elsewhere."""
    if get_worker_info() is None:
        return None
    shape = list(like.shape)
    shape[dim] = size
    count = torch.Size(shape).numel()
    storage = like.untyped_storage()._new_shared(count * like.element_size(), device=like.device)
    return like.new(storage).resize_(shape)


def batch_of(slices: Any, device: torch.device | None) -> Any:
    """Return the batch vector of an attribute, and where each graph begins in it."""
    if not isinstance(slices, Tensor) or slices.dim() != 1:
        return _batch_and_ptr(slices, device)
    total, slices = int(slices[-1]), slices.to(device)
    graph = torch.arange(slices.numel() - 1, device=device)
    return graph.repeat_interleave(slices.diff(), output_size=total), slices.clone()
