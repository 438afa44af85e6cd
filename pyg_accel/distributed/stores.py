"""The attributes of a data set by what they belong to: nodes and edges of each type."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed.partition import Partition

__all__ = [
    "ONE", "Types", "begins", "by_type", "edge_stores", "holds_ids", "joined", "node_stores",
    "stays_whole", "store_of",
]  # fmt: skip

Types = dict[Any, Partition]  # by node type; None for a Data
ONE: Any = None


def node_stores(data: Data | HeteroData) -> dict[Any, Any]:
    """Return what holds the attributes of nodes, by type."""
    if isinstance(data, HeteroData):
        return {key: data[key] for key in data.node_types}
    return {ONE: data}


def edge_stores(data: Data | HeteroData) -> dict[tuple[Any, Any, Any], Any]:
    """Return what holds the attributes of edges, by source type, relation and target type."""
    if isinstance(data, HeteroData):
        return {key: data[key] for key in data.edge_types}
    return {(ONE, "to", ONE): data}


def store_of(data: Data | HeteroData, key: Any) -> Any:
    """Return what holds the attributes of a type of nodes or edges; a HeteroData gets it then."""
    return data[key] if isinstance(data, HeteroData) else data


def stays_whole(key: str) -> bool:
    """Return whether an attribute goes with outputs: labels and masks, by their names."""
    return key == "y" or key.startswith("y_") or key.endswith("mask")


def holds_ids(name: str) -> bool:
    """Return whether an attribute holds ids, and is no attribute of edges of that number."""
    return "index" in name


def joined(data: Data | HeteroData) -> tuple[Tensor, dict[Any, int]]:
    """Return the edges of all types, nodes numbered type by type, and how many each type has."""
    sizes = {key: int(store.num_nodes or 0) for key, store in node_stores(data).items()}
    first = begins(sizes)
    parts = [
        torch.stack([store.edge_index[0] + first[a], store.edge_index[1] + first[b]]).long()
        for (a, _, b), store in edge_stores(data).items()
    ]
    return torch.cat(parts, dim=1) if parts else torch.empty(2, 0, dtype=torch.int64), sizes


def by_type(whole: Partition, sizes: Mapping[Any, int]) -> Types:
    """Return the partition of each type, of one of nodes that are numbered type by type."""
    if len(sizes) == 1:
        return {next(iter(sizes)): whole}
    ranks = whole.cuts.numel() - 1
    owner = torch.empty_like(whole.order)
    owner[whole.order] = torch.repeat_interleave(torch.arange(ranks), whole.cuts.diff())
    result = {}
    first = begins(sizes)
    for key, n in sizes.items():
        mine = (whole.order >= first[key]) & (whole.order < first[key] + n)
        order = whole.order[mine] - first[key]  # ranges of ranks stay together
        counts = torch.bincount(owner[first[key] : first[key] + n], minlength=ranks)
        result[key] = Partition(order, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
    return result


def begins(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Return the number of the first node of each type, of nodes numbered type by type."""
    return dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
