"""Checks before any collective: reasons against a model or data set, and facts to compare."""

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import HANConv, MessagePassing
from torch_geometric.utils import is_sparse

from pyg_accel.distributed.entry import names_read
from pyg_accel.distributed.norms import ALL_NODES
from pyg_accel.distributed.partition import edge_stores, node_stores

__all__ = ["data_facts", "data_reasons", "digest", "model_facts", "model_reasons"]

_ALL_NODES = "it looks at all nodes at once, in a way that is not supported"
_OWN_EDGES = "it builds its own edges from the features of all nodes"
_REASONS = {
    _ALL_NODES: "DirGNNConv GPSConv HANConv HGTConv MultiheadAttention TransformerEncoderLayer "
    "HeteroBatchNorm PerformerAttention SGFormer Polynormer MemPooling",
    _OWN_EDGES: "DynamicEdgeConv GravNetConv XConv TopKPooling SAGPooling EdgePooling ASAPooling "
    "PANPooling ClusterPooling Node2Vec MetaPath2Vec",
    "its nodes are not those of the graph": "HypergraphConv PANConv",
    "it learns to tell edges from a sample of all pairs of nodes, which differs with the number of "
    "ranks": "SuperGATConv",
    "it hashes the colours of all nodes": "WLConv",
}
_UNSUITABLE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
# These classes have a distributed form, but their subclasses do not.
_SUPPORTED = {HANConv, *ALL_NODES, *ALL_NODES.values()}


def model_reasons(model: Any) -> list[str]:
    """Return the reasons why a model cannot be distributed, one per class."""
    if not isinstance(model, torch.nn.Module):
        return [f"expected 'model' to be a torch.nn.Module (got {type(model).__name__})"]
    reasons: list[str] = []
    for module in model.modules():
        cls = module.__class__
        base = next((c.__name__ for c in cls.__mro__ if c.__name__ in _UNSUITABLE), "")
        if base and cls not in _SUPPORTED:
            reasons.append(f"{cls.__name__}: {_UNSUITABLE[base]}")
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            reasons.append("it has lazily initialised parameters: call it once before")
        if not isinstance(module, MessagePassing):
            continue
        if module.flow != "source_to_target":
            reasons.append(f"{cls.__name__} has flow '{module.flow}', for which PyG has no "
                           "bipartite calls: flip the edge_index and leave the flow")  # fmt: skip
        for function in ("propagate", "edge_updater"):
            at_source, names = names_read(module, function)
            reasons += [f"{cls.__name__} reads '{name}' both as a whole and at the ends of edges: "
                        "a call with halos cannot give it both"
                        for name in sorted(at_source & names)]  # fmt: skip
    return list(dict.fromkeys(reasons))


def data_reasons(data: Any) -> list[str]:
    """Return the reasons why a data set cannot be cut."""
    if isinstance(data, Batch) or not isinstance(data, (Data, HeteroData)):
        return [f"expected 'data' to be one Data or HeteroData, or the folder of a stored one (got "
                f"{type(data).__name__})"]  # fmt: skip
    if data.num_nodes is None:
        return ["the number of nodes is not known"]
    reasons = []
    sizes = {key: int(store.num_nodes or 0) for key, store in node_stores(data).items()}
    for key, store in edge_stores(data).items():
        where = f"{key}: " if isinstance(data, HeteroData) else ""
        for name in dict.fromkeys(["edge_index", *store.keys()]):
            if name.endswith("edge_index"):
                reason = _edge_reason(store.get(name), sizes[key[0]], sizes[key[2]])
                more = "" if name == "edge_index" else f"{name}: "
                reasons += [f"{where}{more}{reason}"] if reason else []
    return reasons


def _edge_reason(edges: Any, sources: int, targets: int) -> str:
    if edges is None or is_sparse(edges):
        return ("expected a plain edge_index [2, E] (of a sparse matrix, "
                "torch_geometric.utils.to_edge_index makes one)")  # fmt: skip
    if isinstance(edges, EdgeIndex) or not isinstance(edges, Tensor):
        return f"expected a plain edge_index (got {type(edges).__name__})"
    if edges.dim() != 2 or edges.size(0) != 2 or edges.dtype not in (torch.int32, torch.int64):
        return f"expected an edge_index [2, E] of node ids (got {list(edges.shape)} {edges.dtype})"
    if edges.numel() and (
        int(edges.min()) < 0 or int(edges[0].max()) >= sources or int(edges[1].max()) >= targets
    ):
        return (f"the edge_index has node ids outside of {sources} source and {targets} target "
                "nodes")  # fmt: skip
    return ""


def model_facts(model: torch.nn.Module) -> dict[str, str]:
    """Return the names, shapes and dtypes of a model's parameters and buffers, and its classes."""
    facts = {"model": ", ".join(type(m).__name__ for m in model.modules())}
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        kind = "parameter" if isinstance(t, torch.nn.Parameter) else "buffer"
        learned = ", learned" if t.requires_grad else ""
        facts[f"{kind} {name}"] = f"{list(t.shape)} {t.dtype}{learned}"
    return facts


def data_facts(data: Data | HeteroData) -> dict[str, str]:
    """Return the numbers of nodes and the digests of all attributes of a data set."""
    facts: dict[str, str] = {}
    for key, store in (node_stores(data) | edge_stores(data)).items():
        where = f"data {key} " if isinstance(data, HeteroData) else "data "
        facts |= {where + name: digest(value) for name, value in store.items()}
        if key in node_stores(data):
            facts[f"{where}number of nodes"] = str(store.num_nodes)
    return facts


def digest(value: Any) -> str:
    """Return a short text that differs, almost surely, if shape, dtype or numbers differ."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value if isinstance(value, str) else type(value).__name__
    numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{list(value.shape)} {value.dtype} {zlib.crc32(numbers.data):08x}"
