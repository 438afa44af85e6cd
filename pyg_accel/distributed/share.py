"""The share of a rank in a data set: its rows, its edges, and their halos."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed import partition as parts
from pyg_accel.distributed.folder import Stored, holds_ids
from pyg_accel.distributed.halo import Halo, make_halo
from pyg_accel.distributed.partition import ONE, Partition, Types, edge_stores, store_of
from pyg_accel.distributed.tracking import adopt, will_stay
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = ["cut_data", "partitions", "read_data"]

Ends = tuple[Tensor, Tensor]  # sources as positions of all nodes, targets as rows of this rank
Halos = dict[tuple[Any, str], tuple[Tensor, Halo]]  # by edge type and attribute


def partitions(wire: Wire, data: Data | HeteroData, method: Any) -> Types:
    """Return the partition of every node type; the first rank computes it.

    Args:
        wire: the process group.
        data: the whole data set.
        method: see :func:`~pyg_accel.distributed.distribute`.
    """
    joint, sizes = parts.joined(data)
    if not isinstance(method, str):
        named = method if isinstance(method, Mapping) else {ONE: method}
        return {key: parts.from_parts(named[key], n, wire.size) for key, n in sizes.items()}
    size = sum(sizes.values())
    packed = torch.empty(size + wire.size + 1, dtype=torch.int64)
    if wire.rank == 0:
        packed = torch.cat([t.cpu() for t in parts.partition(joint, size, wire.size, method)])
    packed = wire.copy_of_first(packed.to(wire.device)).cpu()
    return parts.by_type(Partition(packed[:size], packed[size:]), sizes)


def cut_data(wire: Wire, data: Any, types: Types, rows: str, narrow: bool) -> Any:
    """Return this rank's share of a data set, on the device of the group.

    Args:
        wire: the process group.
        data: the whole data set; it is not changed.
        types: the partition of each node type.
        rows: with ``"all"``, labels and masks are not cut.
        narrow: see :class:`~pyg_accel.distributed.halo.Halo`.
    """
    result = copy.copy(data)
    for key, store in parts.node_stores(data).items():
        share, own = store_of(result, key), types[key].of(wire.rank)
        for name, value in store.items():
            whole = holds_ids(name) or (rows == "all" and _stays_whole(name))
            if store.is_node_attr(name) and not whole:
                share[name] = _picked(value, own, data.__cat_dim__(name, value))
        share.n_id, share.num_nodes = own, own.numel()
    halos: Halos = {}
    for key, store in edge_stores(data).items():
        for name, value in store.items():
            if name.endswith("edge_index"):
                ends, positions = _cut_edges(wire.rank, types, key, value)
                halos[key, name] = _local(wire, types, key, ends, narrow)
                if name == "edge_index":
                    own_edges = positions
        share = edge_stores(result)[key]
        for name, value in store.items():
            if store.is_edge_attr(name) and not holds_ids(name):
                share[name] = _picked(value, own_edges, data.__cat_dim__(name, value))
    return _with_edges(result.to(wire.device), halos)


def _cut_edges(rank: int, types: Types, key: Any, edges: Tensor) -> tuple[Ends, Tensor]:
    """Return the ends of the edges whose targets a rank owns, and their positions."""
    sources, targets = (
        types[key[2 * i]].positions().to(edges.device)[edges[i].long()] for i in (0, 1)
    )
    low, high = types[key[2]].cuts[rank : rank + 2].tolist()
    own = ((targets >= low) & (targets < high)).nonzero().view(-1)
    return (sources[own].to(edges.dtype), targets[own] - low), own


def _local(wire: Wire, types: Types, key: Any, ends: Ends, narrow: bool) -> tuple[Tensor, Halo]:
    """Return the edge_index of this rank for an edge type, and its halo."""
    sources, targets = (end.long().to(wire.device) for end in ends)
    cuts, own = types[key[0]].cuts.to(wire.device), len(types[key[2]].of(wire.rank))
    halo, local = make_halo(wire, sources, cuts, own, narrow)
    return torch.stack([local, targets]).to(ends[0].dtype), halo


def read_data(wire: Wire, stored: Stored, types: Types, rows: str, narrow: bool) -> Any:
    """Return this rank's share of a stored graph; see :func:`cut_data`."""
    data, edges = stored.part(types, wire.rank, _stays_whole if rows == "all" else lambda _: False)
    for key, part in types.items():
        store = store_of(data, key)
        store.n_id = part.of(wire.rank).clone()
        store.num_nodes = store.n_id.numel()
    halos = {
        (key, "edge_index"): _local(wire, types, key, ends, narrow) for key, ends in edges.items()
    }
    return _with_edges(data.to(wire.device), halos)


def _with_edges(data: Any, halos: Halos) -> Any:
    """Set the edges of this rank, and register them and its features."""
    for (key, name), (edges, halo) in halos.items():
        edge_stores(data)[key][name] = adopt(edges, halo)
    for store in data.stores:
        for value in filter(torch.is_tensor, store.values()):
            will_stay(value)
    return data


def _stays_whole(key: str) -> bool:
    """Return whether the name of an attribute is the name of labels or masks."""
    return key == "y" or key.startswith("y_") or key.endswith("mask")


def _picked(value: Any, ids: Tensor, dim: Any) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.index_select(int(dim), ids.to(value.device))
    if isinstance(value, (list, tuple)):
        return type(value)(value[i] for i in ids.tolist())
    raise NotDistributable(f"cannot cut an attribute that is a {type(value).__name__}")
