"""This rank's share of a data set: its rows, its edges, and the halos of these."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed.folder import Stored
from pyg_accel.distributed.halo import Halo, make_halo
from pyg_accel.distributed.known import adopt, will_stay
from pyg_accel.distributed.partition import Partition, from_parts, partition
from pyg_accel.distributed.stores import (
    ONE,
    Types,
    by_type,
    edge_stores,
    holds_ids,
    joined,
    node_stores,
    stays_whole,
    store_of,
)
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = ["cut_data", "partitions", "read_data"]


def partitions(wire: Wire, data: Data | HeteroData, method: Any) -> Types:
    """Decide who owns what; the first rank does, and tells the others.

    Args:
        wire: the group.
        data: the whole data set.
        method: see :func:`~pyg_accel.distributed.distribute`.
    """
    joint, sizes = joined(data)
    if not isinstance(method, str):
        given = method if isinstance(method, Mapping) else {ONE: method}
        return {key: from_parts(given[key], n, wire.size) for key, n in sizes.items()}
    most = sum(sizes.values())
    orders = torch.empty(most + wire.size + 1, dtype=torch.int64)
    if wire.rank == 0:
        found = partition(joint, most, wire.size, method)
        orders = torch.cat([found.order.cpu(), found.cuts.cpu()])
    orders = wire.copy_of_first(orders.to(wire.device)).cpu()
    return by_type(Partition(orders[:most], orders[most:]), sizes)


def cut_data(wire: Wire, data: Any, types: Types, rows: str, narrow: bool) -> Any:
    """Return this rank's share of a data set, on the device of the group.

    Args:
        wire: the group.
        data: the whole data set; left as it is.
        types: who owns what.
        rows: ``"all"`` keeps labels and masks whole.
        narrow: see :class:`~pyg_accel.distributed.halo.Halo`.
    """
    result = copy.copy(data)
    whole, shares = node_stores(data), node_stores(result)
    own = {key: part.of(wire.rank) for key, part in types.items()}
    for key, store in whole.items():
        for name, value in list(store.items() if key is not ONE else data.to_dict().items()):
            if holds_ids(name):
                continue
            if store.is_node_attr(name) and not (rows == "all" and stays_whole(name)):
                shares[key][name] = _picked(value, own[key], data.__cat_dim__(name, value))
        shares[key].n_id = own[key]
        shares[key].num_nodes = own[key].numel()
    plans = {}
    for key, store in edge_stores(data).items():
        share = edge_stores(result)[key]
        for name, value in list(store.items() if key[0] is not ONE else data.to_dict().items()):
            if name.endswith("edge_index"):
                edges, halo, mine = _cut_edges(wire, value, types[key[2]], types[key[0]], narrow)
                plans[key, name] = edges, halo
                if name == "edge_index":
                    for other in filter(store.is_edge_attr, list(store.keys())):
                        if not holds_ids(other):
                            dim = data.__cat_dim__(other, store[other])
                            share[other] = _picked(store[other], mine, dim)
    result = result.to(wire.device)
    for (key, name), (edges, halo) in plans.items():
        edge_stores(result)[key][name] = edges
        know(result, edges, halo)
    return result


def _cut_edges(
    wire: Wire, edges: Tensor, into: Partition, out_of: Partition, narrow: bool
) -> tuple[Tensor, Halo, Tensor]:
    """Return the edges of this rank, which owns their targets, their halo, and their places."""
    places = into.places().to(edges.device)[edges[1].long()]
    low, high = int(into.cuts[wire.rank]), int(into.cuts[wire.rank + 1])
    mine = ((places >= low) & (places < high)).nonzero().view(-1)
    sources = out_of.places().to(edges.device)[edges[0][mine].long()]
    cuts = out_of.cuts.to(wire.device)
    halo, local = make_halo(wire, sources.to(wire.device), cuts, high - low, narrow)
    pair = torch.stack([local, (places[mine] - low).to(wire.device)])
    return pair.to(edges.dtype), halo, mine


def read_data(wire: Wire, stored: Stored, types: Types, rows: str, narrow: bool) -> Any:
    """Return this rank's share of a stored graph; see :func:`cut_data`."""
    kept = stays_whole if rows == "all" else lambda name: False
    data, edges = stored.part(types, wire.rank, kept)
    for key, part in types.items():
        store = store_of(data, key)
        store.n_id = part.of(wire.rank).clone()
        store.num_nodes = store.n_id.numel()
    data = data.to(wire.device)
    plans = {}
    for key, (sources, targets) in edges.items():
        cuts, own = types[key[0]].cuts.to(wire.device), int(types[key[2]].of(wire.rank).numel())
        halo, local = make_halo(wire, sources.long().to(wire.device), cuts, own, narrow)
        pair = torch.stack([local, targets.to(wire.device)]).to(sources.dtype)
        store_of(data, key).edge_index = pair
        plans[key] = halo
    for key, halo in plans.items():
        know(data, store_of(data, key).edge_index, halo)
    return data


def know(result: Data | HeteroData, edges: Tensor, halo: Halo) -> None:
    """Let a layer know the edges and features of this rank when it meets them."""
    adopt(edges, halo)
    for store in result.stores:
        for value in store.values():
            if isinstance(value, Tensor):
                will_stay(value)


def _picked(value: Any, ids: Tensor, dim: Any) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.index_select(int(dim), ids.to(value.device))
    if isinstance(value, (list, tuple)):
        return type(value)(value[i] for i in ids.tolist())
    raise NotDistributable(f"cannot cut an attribute that is a {type(value).__name__}")
