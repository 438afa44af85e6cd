"""Why a model or data set cannot be spread over ranks: found before any collective."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GPSConv, MessagePassing
from torch_geometric.utils import is_sparse

from pyg_accel.distributed.convs import CONVS
from pyg_accel.distributed.entry import names_read

__all__ = ["data_reasons", "model_reasons"]

_ALL_NODES = "it looks at all nodes at once, in a way that is not known here"
_OWN_EDGES = "it makes edges of its own from the features of all nodes"
_REASONS: dict[str, tuple[str, ...]] = {
    _ALL_NODES: (
        "DirGNNConv", "GPSConv", "HANConv", "HGTConv", "MultiheadAttention",
        "TransformerEncoderLayer", "HeteroBatchNorm", "PerformerAttention",
        "SGFormer", "Polynormer", "MemPooling",
    ),
    _OWN_EDGES: (
        "DynamicEdgeConv", "GravNetConv", "XConv", "TopKPooling", "SAGPooling",
        "EdgePooling", "ASAPooling", "PANPooling", "ClusterPooling", "Node2Vec", "MetaPath2Vec",
    ),
    "its nodes are not those of the graph": ("HypergraphConv", "PANConv"),
    "it learns to tell edges from a sample of all pairs of nodes, which is another on every number "
    "of ranks": ("SuperGATConv",),
    "it hashes the colours of all nodes": ("WLConv",),
}  # fmt: skip
_KNOWN = {name: reason for reason, names in _REASONS.items() for name in names}
# Of these, but of no class that is derived from them, it is known.
_TAUGHT = {*CONVS, *CONVS.values()}


def model_reasons(model: Any) -> list[str]:
    """Return why a model cannot be distributed, one reason a class."""
    if not isinstance(model, torch.nn.Module):
        return [f"expected 'model' to be a torch.nn.Module (got {type(model).__name__})"]
    reasons: dict[str, None] = {}
    inside = {id(m) for gps in model.modules() if isinstance(gps, GPSConv)
              for m in gps.attn.modules()}  # fmt: skip
    for module in model.modules():
        if id(module) in inside:
            continue
        cls = module.__class__  # what a rewritten layer passes for
        name = cls.__name__
        known = next((c.__name__ for c in cls.__mro__ if c.__name__ in _KNOWN), "")
        if known and cls not in _TAUGHT:
            reasons[f"{name}: {_KNOWN[known]}"] = None
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            reasons["it has parameters whose shape is not known yet: call it once before"] = None
        if isinstance(module, MessagePassing):
            if module.flow != "source_to_target":
                reasons[f"{name} has flow '{module.flow}', for which PyG has no bipartite calls: "
                        "flip the edge_index, and leave the flow as it is"] = None  # fmt: skip
            for function in ("propagate", "edge_updater"):
                at_source, names = names_read(module, function)
                for both in sorted(at_source & names):
                    reasons[f"{name} reads '{both}' both as a whole and at the ends of edges: "
                            "a call with halos cannot give it both"] = None  # fmt: skip
    return list(reasons)


def data_reasons(data: Any) -> list[str]:
    """Return why a data set cannot be cut."""
    if isinstance(data, Batch) or not isinstance(data, (Data, HeteroData)):
        return [f"expected 'data' to be one Data or HeteroData, or the folder of a stored one (got "
                f"{type(data).__name__})"]  # fmt: skip
    reasons = []
    if data.num_nodes is None:
        reasons.append("the number of nodes is not known")
    for name, edges, size in _edges(data):
        if edges is None or is_sparse(edges):
            reasons.append(f"{name}expected a plain edge_index [2, E] (of a sparse matrix, "
                           "torch_geometric.utils.to_edge_index makes one)")  # fmt: skip
        elif isinstance(edges, EdgeIndex) or not isinstance(edges, Tensor):
            reasons.append(f"{name}expected a plain edge_index (got {type(edges).__name__})")
        elif edges.dim() != 2 or edges.size(0) != 2 or edges.dtype not in (
            torch.int32, torch.int64
        ):  # fmt: skip
            reasons.append(f"{name}expected an edge_index [2, E] of node ids (got "
                           f"{list(edges.shape)} {edges.dtype})")  # fmt: skip
        elif edges.numel() and (
            int(edges.min()) < 0 or int(edges[0].max()) >= size[0] or int(edges[1].max()) >= size[1]
        ):
            reasons.append(f"{name}the edge_index has node ids outside of {size[0]} source and "
                           f"{size[1]} target nodes")  # fmt: skip
    return reasons


def _edges(data: Data | HeteroData) -> Iterable[tuple[str, Any, tuple[int, int]]]:
    if isinstance(data, Data):
        size = int(data.num_nodes or 0)
        yield "", data.get("edge_index"), (size, size)
        for name, value in data.to_dict().items():
            if name.endswith("edge_index") and name != "edge_index":
                yield f"{name}: ", value, (size, size)
        return
    for key in data.edge_types:
        ends = tuple(int(data[k].num_nodes or 0) for k in (key[0], key[-1]))
        yield f"{key}: ", data[key].get("edge_index"), (ends[0], ends[1])
