"""Every layer of torch_geometric.nn.conv, with its options that change the messages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch_geometric.utils import sort_edge_index

RELATIONS = 4
EDGE_DIM = 16


@dataclass(frozen=True)
class Inputs:
    """A graph with everything that a layer may be called with.

    Attributes:
        x: [N, F].
        edge_index: [2, E].
        edge_attr: [E, EDGE_DIM].
        edge_weight: [E].
        edge_type: [E].
        pos: [N, 3], also used as normals.
    """

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    edge_weight: Tensor
    edge_type: Tensor
    pos: Tensor


def inputs(nodes: int, edges: int, width: int, device: str) -> Inputs:
    """Random inputs, new ones in each call; in-degrees follow a power law."""
    return Inputs(*(t.to(device, copy=True) for t in _numbers(nodes, edges, width)))


@lru_cache(maxsize=1)
def _numbers(nodes: int, edges: int, width: int) -> tuple[Tensor, ...]:
    """The same, made once for all layers that are called with them."""
    random = torch.Generator().manual_seed(0)
    targets = torch.rand(edges, generator=random).pow(2).mul(nodes).long()
    edge_index = torch.stack([torch.randint(nodes, (edges,), generator=random), targets])
    return (
        torch.randn(nodes, width, generator=random),
        edge_index,
        torch.randn(edges, EDGE_DIM, generator=random),
        torch.rand(edges, generator=random),
        torch.randint(RELATIONS, (edges,), generator=random),
        torch.randn(nodes, 3, generator=random),
    )


Call = Callable[[Inputs], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A layer and its call.

    Attributes:
        make: builds the layer for features of a width, which is also that of its results.
        call: its arguments.
        largest: features from which on stock PyG needs more memory than most machines have.
    """

    make: Callable[[int], Module]
    call: Call = lambda g: (g.x, g.edge_index)
    largest: int = 1024


def _weight(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.edge_index, g.edge_weight


def _attr(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.edge_index, g.edge_attr


def _type(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.edge_index, g.edge_type


def _start(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.x, g.edge_index


def _position(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.pos, g.edge_index


def _one_type(g: Inputs) -> tuple[Any, ...]:
    return {"a": g.x}, {("a", "to", "a"): g.edge_index}


def mlp(*sizes: int) -> Module:
    first, hidden, last = sizes
    return Sequential(Linear(first, hidden), ReLU(), Linear(hidden, last))


_DEGREES = torch.tensor([1, 5, 10, 10, 5, 1])
_AGGREGATORS = ["mean", "max", "min", "std"]
_SCALERS = ["identity", "amplification"]
_META = (["a"], [("a", "to", "a")])

# By layer and option.
CASES: dict[tuple[str, str], Case] = {
    ("SimpleConv", ""): Case(lambda f: pyg.SimpleConv()),
    ("GCNConv", ""): Case(lambda f: pyg.GCNConv(f, f)),
    ("GCNConv", "edge_weight"): Case(lambda f: pyg.GCNConv(f, f), _weight),
    ("ChebConv", "K=3"): Case(lambda f: pyg.ChebConv(f, f, 3)),
    ("SAGEConv", ""): Case(lambda f: pyg.SAGEConv(f, f)),
    ("SAGEConv", "max"): Case(lambda f: pyg.SAGEConv(f, f, aggr="max")),
    ("SAGEConv", "median"): Case(lambda f: pyg.SAGEConv(f, f, aggr="median")),
    ("SAGEConv", "lstm"): Case(
        lambda f: pyg.SAGEConv(f, f, aggr="lstm"),
        lambda g: (g.x, sort_edge_index(g.edge_index, sort_by_row=False)),
        64,
    ),
    ("GraphConv", ""): Case(lambda f: pyg.GraphConv(f, f)),
    ("GraphConv", "edge_weight"): Case(lambda f: pyg.GraphConv(f, f), _weight),
    ("GatedGraphConv", ""): Case(lambda f: pyg.GatedGraphConv(f, 2)),
    ("ResGatedGraphConv", ""): Case(lambda f: pyg.ResGatedGraphConv(f, f)),
    ("ResGatedGraphConv", "edge_attr"): Case(
        lambda f: pyg.ResGatedGraphConv(f, f, edge_dim=EDGE_DIM), _attr
    ),
    ("GATConv", ""): Case(lambda f: pyg.GATConv(f, f // 4, heads=4)),
    ("GATConv", "edge_attr"): Case(
        lambda f: pyg.GATConv(f, f // 4, heads=4, edge_dim=EDGE_DIM), _attr
    ),
    ("GATv2Conv", ""): Case(lambda f: pyg.GATv2Conv(f, f // 4, heads=4)),
    ("GATv2Conv", "edge_attr"): Case(
        lambda f: pyg.GATv2Conv(f, f // 4, heads=4, edge_dim=EDGE_DIM), _attr
    ),
    ("TransformerConv", ""): Case(lambda f: pyg.TransformerConv(f, f // 4, heads=4)),
    ("TransformerConv", "edge_attr"): Case(
        lambda f: pyg.TransformerConv(f, f // 4, heads=4, edge_dim=EDGE_DIM), _attr
    ),
    ("AGNNConv", ""): Case(lambda f: pyg.AGNNConv()),
    ("TAGConv", ""): Case(lambda f: pyg.TAGConv(f, f)),
    ("GINConv", ""): Case(lambda f: pyg.GINConv(Linear(f, f))),
    ("GINEConv", "edge_attr"): Case(lambda f: pyg.GINEConv(Linear(f, f), edge_dim=EDGE_DIM), _attr),
    ("ARMAConv", ""): Case(lambda f: pyg.ARMAConv(f, f, 2, 2)),
    ("SGConv", "K=2"): Case(lambda f: pyg.SGConv(f, f, 2)),
    ("SSGConv", "K=2"): Case(lambda f: pyg.SSGConv(f, f, 0.1, 2)),
    ("APPNP", "K=3"): Case(lambda f: pyg.APPNP(3, 0.1)),
    ("MFConv", ""): Case(lambda f: pyg.MFConv(f, f)),
    ("RGCNConv", "4 relations"): Case(lambda f: pyg.RGCNConv(f, f, RELATIONS), _type),
    ("FastRGCNConv", "4 relations"): Case(lambda f: pyg.FastRGCNConv(f, f, RELATIONS), _type, 16),
    ("RGATConv", "4 relations"): Case(lambda f: pyg.RGATConv(f, f, RELATIONS), _type, 16),
    ("SignedConv", ""): Case(
        lambda f: pyg.SignedConv(f, f, True), lambda g: (g.x, g.edge_index, g.edge_index.flip(0))
    ),
    ("DNAConv", ""): Case(
        lambda f: pyg.DNAConv(f), lambda g: (torch.stack([g.x] * 3, 1), g.edge_index), 64
    ),
    ("PointNetConv", ""): Case(lambda f: pyg.PointNetConv(mlp(f + 3, f, f)), _position),
    ("GMMConv", "edge_attr"): Case(
        lambda f: pyg.GMMConv(f, f, EDGE_DIM, 4, separate_gaussians=False), _attr
    ),
    ("NNConv", "edge_attr"): Case(lambda f: pyg.NNConv(f, f, mlp(EDGE_DIM, 32, f * f)), _attr, 16),
    ("CGConv", ""): Case(lambda f: pyg.CGConv(f)),
    ("CGConv", "edge_attr"): Case(lambda f: pyg.CGConv(f, EDGE_DIM), _attr),
    ("EdgeConv", ""): Case(lambda f: pyg.EdgeConv(mlp(2 * f, f, f))),
    ("PPFConv", ""): Case(
        lambda f: pyg.PPFConv(mlp(f + 4, f, f)), lambda g: (g.x, g.pos, g.pos, g.edge_index)
    ),
    ("FeaStConv", ""): Case(lambda f: pyg.FeaStConv(f, f, heads=2)),
    ("PointTransformerConv", ""): Case(lambda f: pyg.PointTransformerConv(f, f), _position),
    ("HypergraphConv", ""): Case(lambda f: pyg.HypergraphConv(f, f)),
    ("LEConv", "edge_weight"): Case(lambda f: pyg.LEConv(f, f), _weight),
    ("PNAConv", ""): Case(lambda f: pyg.PNAConv(f, f, _AGGREGATORS, _SCALERS, _DEGREES)),
    ("PNAConv", "edge_attr"): Case(
        lambda f: pyg.PNAConv(f, f, _AGGREGATORS, _SCALERS, _DEGREES, edge_dim=EDGE_DIM), _attr
    ),
    ("ClusterGCNConv", ""): Case(lambda f: pyg.ClusterGCNConv(f, f)),
    ("GENConv", ""): Case(lambda f: pyg.GENConv(f, f)),
    ("GENConv", "edge_attr"): Case(lambda f: pyg.GENConv(f, f, edge_dim=EDGE_DIM), _attr),
    ("GCN2Conv", ""): Case(lambda f: pyg.GCN2Conv(f, 0.1), _start),
    ("WLConvContinuous", ""): Case(lambda f: pyg.WLConvContinuous()),
    ("FiLMConv", ""): Case(lambda f: pyg.FiLMConv(f, f)),
    ("FiLMConv", "4 relations"): Case(lambda f: pyg.FiLMConv(f, f, num_relations=RELATIONS), _type),
    ("SuperGATConv", "eval()"): Case(lambda f: pyg.SuperGATConv(f, f // 4, heads=4).eval()),
    ("FAConv", ""): Case(lambda f: pyg.FAConv(f), _start),
    ("EGConv", ""): Case(lambda f: pyg.EGConv(f, f)),
    ("PDNConv", "edge_attr"): Case(lambda f: pyg.PDNConv(f, f, EDGE_DIM, 16), _attr),
    ("GeneralConv", "edge_attr"): Case(
        lambda f: pyg.GeneralConv(f, f, in_edge_channels=EDGE_DIM), _attr
    ),
    ("HGTConv", "one type"): Case(lambda f: pyg.HGTConv(f, f, _META, heads=4), _one_type),
    ("HEATConv", "edge_attr"): Case(
        lambda f: pyg.HEATConv(f, f // 4, 1, RELATIONS, 8, EDGE_DIM, 8, heads=4),
        lambda g: (g.x, g.edge_index, torch.zeros_like(g.x[:, 0]).long(), g.edge_type, g.edge_attr),
    ),
    ("HeteroConv", "2 relations"): Case(
        lambda f: pyg.HeteroConv(
            {("a", "to", "a"): pyg.SAGEConv(f, f), ("a", "from", "a"): pyg.SAGEConv(f, f)}
        ),
        lambda g: (
            {"a": g.x},
            {("a", "to", "a"): g.edge_index, ("a", "from", "a"): g.edge_index.flip(0)},
        ),
    ),
    ("HANConv", "one type"): Case(lambda f: pyg.HANConv(f, f, _META, heads=4), _one_type),
    ("LGConv", ""): Case(lambda f: pyg.LGConv()),
    ("PointGNNConv", ""): Case(
        lambda f: pyg.PointGNNConv(mlp(f, f, 3), mlp(f + 3, f, f), mlp(f, f, f)), _position
    ),
    ("GPSConv", "GINConv"): Case(
        lambda f: pyg.GPSConv(f, pyg.GINConv(Linear(f, f)), attn_type="performer", heads=4)
    ),
    ("AntiSymmetricConv", ""): Case(lambda f: pyg.AntiSymmetricConv(f)),
    ("DirGNNConv", "SAGEConv"): Case(lambda f: pyg.DirGNNConv(pyg.SAGEConv(f, f))),
    ("MixHopConv", ""): Case(lambda f: pyg.MixHopConv(f, f)),
}

# Layers that no case measures.
WITHOUT = {
    "MessagePassing": "the base class",
    "GravNetConv": "needs torch_cluster",
    "DynamicEdgeConv": "needs torch_cluster; on its neighbours it is EdgeConv",
    "XConv": "needs torch_cluster",
    "PANConv": "needs torch-sparse; products of sparse matrices",
    "SplineConv": "needs torch_spline_conv",
    "MeshCNNConv": "four neighbours per edge in a table, no reduction over targets",
    "WLConv": "hashes of labels, in Python",
    "FusedGATConv": "needs dgNN",
    "CuGraphSAGEConv": "needs pylibcugraphops",
    "CuGraphGATConv": "needs pylibcugraphops",
    "CuGraphRGCNConv": "needs pylibcugraphops",
}
