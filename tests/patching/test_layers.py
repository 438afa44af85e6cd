"""Every layer of PyG that matters: what it becomes under ``patch()``, and that its numbers stay."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg

import pyg_accel
from pyg_accel.patching import propagate

pytestmark = pytest.mark.usefixtures("always")

N, E = 30, 220
Inputs = Callable[["World"], tuple[Any, ...]]


def linear(*sizes: int) -> torch.nn.Linear:
    return torch.nn.Linear(*sizes)


@dataclass
class World:
    """A directed graph with duplicates, self-loops and isolated nodes, and features for it."""

    edge_index: Tensor = field(init=False)
    num_nodes: int = N
    num_edges: int = E

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        active = max(self.num_nodes - 4, 1)  # the last four have no edges
        ids = torch.randint(0, active, (2, self.num_edges), generator=generator)
        if self.num_edges > 20:
            ids[:, -8:] = ids[:, :8]
            ids[1, 8:12] = ids[0, 8:12]
        self.edge_index = ids
        self._generator = generator

    def features(self, *sizes: int, grad: bool = True) -> Tensor:
        x = torch.randn(sizes, generator=self._generator, dtype=torch.float64)
        return x.requires_grad_(grad)

    @property
    def x(self) -> Tensor:
        return self.features(self.num_nodes, 16)

    def edge(self, width: int) -> Tensor:
        return self.features(self.num_edges, width)

    @property
    def weight(self) -> Tensor:
        return self.features(self.num_edges, grad=False).abs().requires_grad_()

    @property
    def types(self) -> Tensor:
        return torch.arange(self.num_edges) % 3


def x_and_edges(world: World) -> tuple[Any, ...]:
    return world.x, world.edge_index


def x_edges_weight(world: World) -> tuple[Any, ...]:
    return world.x, world.edge_index, world.weight


def with_features(width: int) -> Inputs:
    return lambda world: (world.x, world.edge_index, world.edge(width))


def with_start(world: World) -> tuple[Any, ...]:
    return world.x, world.x, world.edge_index


def degrees(world: World) -> Tensor:
    return torch.bincount(torch.bincount(world.edge_index[1], minlength=N))


@dataclass(frozen=True)
class Layer:
    """A row of the table.

    Attributes:
        make: builds the layer.
        inputs: what it is called with.
        formulas: the formulas of its calls, one string a ``propagate``; golden: a lost one fails.
        reasons: why PyG's own path runs.
        tied: gradients of equal maxima go elsewhere than in PyG, so only outputs are compared.
    """

    make: Callable[[], torch.nn.Module]
    inputs: Inputs = x_and_edges
    formulas: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


WEIGHTED = ("sum_j mul(e0,u1)",)
SOFTMAX = "sum_j exp(sub(e0,v1))"

LAYERS = {
    # The SpMM family.
    "gcn": Layer(lambda: pyg.GCNConv(16, 8), x_edges_weight, WEIGHTED),
    "gcn-unweighted": Layer(lambda: pyg.GCNConv(16, 8), x_and_edges, WEIGHTED),
    "gcn-not-normalised": Layer(
        lambda: pyg.GCNConv(16, 8, normalize=False), x_and_edges, ("sum_j u0",)
    ),
    "sage-mean": Layer(lambda: pyg.SAGEConv(16, 8), formulas=("mean_j u0",)),
    "sage-max": Layer(lambda: pyg.SAGEConv(16, 8, aggr="max"), formulas=("max_j u0",)),
    "sage-min": Layer(lambda: pyg.SAGEConv(16, 8, aggr="min"), formulas=("min_j u0",)),
    "sage-prod": Layer(lambda: pyg.SAGEConv(16, 8, aggr="mul"), formulas=("prod_j u0",)),
    "sage-project": Layer(lambda: pyg.SAGEConv(16, 8, project=True), formulas=("mean_j u0",)),
    "sage-many": Layer(
        lambda: pyg.SAGEConv(16, 8, aggr=["mean", "max", "std", "min", "var"]),
        formulas=("mean+max+sqsum+min_j u0",),
    ),
    "gin": Layer(lambda: pyg.GINConv(linear(16, 8), train_eps=True), formulas=("sum_j u0",)),
    "graph": Layer(lambda: pyg.GraphConv(16, 8), x_edges_weight, WEIGHTED),
    "graph-max": Layer(
        lambda: pyg.GraphConv(16, 8, aggr="max"), x_edges_weight, ("max_j mul(e0,u1)",)
    ),
    "cheb": Layer(lambda: pyg.ChebConv(16, 8, 3), formulas=WEIGHTED),
    "arma": Layer(lambda: pyg.ARMAConv(16, 8, 3, 2), formulas=WEIGHTED),
    "sg": Layer(lambda: pyg.SGConv(16, 8, 2), formulas=WEIGHTED),
    "ssg": Layer(lambda: pyg.SSGConv(16, 8, 0.1, 2), formulas=WEIGHTED),
    "appnp": Layer(lambda: pyg.APPNP(3, 0.1), formulas=WEIGHTED),
    "tag": Layer(lambda: pyg.TAGConv(16, 8), formulas=WEIGHTED),
    "gcn2": Layer(lambda: pyg.GCN2Conv(16, 0.1), with_start, WEIGHTED),
    "light-gcn": Layer(lambda: pyg.LGConv(), formulas=WEIGHTED),
    "mixhop": Layer(lambda: pyg.MixHopConv(16, 8), formulas=WEIGHTED),
    "cluster-gcn": Layer(lambda: pyg.ClusterGCNConv(16, 8), formulas=WEIGHTED),
    "gated-graph": Layer(lambda: pyg.GatedGraphConv(16, 2), formulas=("sum_j u0",)),
    "simple": Layer(lambda: pyg.SimpleConv("mean"), formulas=("mean_j u0",)),
    "mf": Layer(lambda: pyg.MFConv(16, 8), formulas=("sum_j u0",)),
    "wl-continuous": Layer(lambda: pyg.WLConvContinuous(), formulas=("sum_j u0",)),
    "pdn": Layer(lambda: pyg.PDNConv(16, 8, 16, 4), with_features(16), WEIGHTED),
    "eg": Layer(
        lambda: pyg.EGConv(16, 8, aggregators=["sum", "mean", "max", "std", "symnorm"]),
        formulas=("sum_j u0; max_j u0; sum_j mul(u0,e1)",),
    ),
    "hypergraph": Layer(lambda: pyg.HypergraphConv(16, 8), formulas=("sum_j mul(v0,u1)",)),
    "signed": Layer(
        lambda: pyg.SignedConv(16, 8, True),
        lambda world: (world.x, world.edge_index, world.edge_index.flip(0)),
        ("mean_j u0",),
    ),
    "rgcn": Layer(
        lambda: pyg.RGCNConv(16, 8, 3),
        lambda world: (world.x, world.edge_index, world.types),
        ("mean_j u0, 3 relations",),
    ),
    # Binary-reduce.
    "le": Layer(lambda: pyg.LEConv(16, 8), x_edges_weight, ("sum_j mul(sub(u0,v1),e2)",)),
    "gine": Layer(
        lambda: pyg.GINEConv(linear(16, 8)), with_features(16), ("sum_j relu(add(u0,e1))",)
    ),
    "gine-projected": Layer(
        lambda: pyg.GINEConv(linear(16, 8), edge_dim=8),
        with_features(8),
        ("sum_j relu(add(u0,e1))",),
    ),
    "res-gated": Layer(
        lambda: pyg.ResGatedGraphConv(16, 8), formulas=("sum_j mul(sigmoid(add(v0,u1)),u2)",)
    ),
    "res-gated-edges": Layer(
        lambda: pyg.ResGatedGraphConv(16, 8, edge_dim=8),
        with_features(8),
        ("sum_j mul(sigmoid(add(add(v0,e1),add(u2,e3))),add(u4,e5))",),
    ),
    "film": Layer(lambda: pyg.FiLMConv(16, 8), formulas=("mean_j relu(add(mul(v0,u1),v2))",)),
    "cg": Layer(
        lambda: pyg.CGConv(16, 8),
        with_features(8),
        ("sum_j mul(sigmoid(add(add(v0,u1),e2)),softplus(add(add(v3,u4),e5)))",),
    ),
    "general": Layer(
        lambda: pyg.GeneralConv(16, 8, in_edge_channels=8), with_features(8), ("sum_j add(u0,e1)",)
    ),
    "pna": Layer(
        lambda: pyg.PNAConv(
            16,
            8,
            ["mean", "max", "min", "std"],
            ["identity", "amplification"],
            degrees(World()),
            edge_dim=8,
        ),
        with_features(8),
        ("mean+max+min+sqsum_j add(add(v0,u1),e2)",),
    ),
    "pna-towers": Layer(
        lambda: pyg.PNAConv(
            16,
            8,
            ["mean", "sum", "var"],
            ["identity", "attenuation"],
            degrees(World()),
            towers=4,
            divide_input=True,
        ),
        formulas=("mean+sum+sqsum_j add(v0,u1)",),
    ),
    "gen": Layer(
        lambda: pyg.GENConv(16, 8, edge_dim=8),
        with_features(8),
        (
            "max_j add(relu(add(u0,e1)),1e-07); "
            "sum_j exp(sub(add(relu(add(u0,e1)),1e-07),v2)); "
            "sum_j mul(add(relu(add(u0,e1)),1e-07),"
            "div(exp(sub(add(relu(add(u0,e1)),1e-07),v2)),v3))",
        ),
    ),
    "gen-power": Layer(lambda: pyg.GENConv(16, 8, aggr="power"), formulas=("sum_j u0",)),
    "gen-mean-softmax": Layer(
        lambda: pyg.GENConv(16, 8, aggr=["mean", "softmax"]),
        formulas=(
            "sum_j u0; max_j u0; sum_j exp(sub(u0,v1)); sum_j mul(u0,div(exp(sub(u0,v1)),v2))",
        ),
    ),
    # Attention.
    "gat": Layer(
        lambda: pyg.GATConv(16, 8, heads=4),
        formulas=(
            "softmax_j(leaky_relu(add(u0,v1),0.2))",
            "sum_j mul(softmax_j(leaky_relu(add(u0,v1),0.2)),u2)",
        ),
    ),
    "gat-edges": Layer(
        lambda: pyg.GATConv(16, 8, heads=4, edge_dim=16),
        with_features(16),
        (
            "softmax_j(leaky_relu(add(add(u0,v1),e2),0.2))",
            "sum_j mul(softmax_j(leaky_relu(add(add(u0,v1),e2),0.2)),u3)",
        ),
    ),
    "gatv2": Layer(
        lambda: pyg.GATv2Conv(16, 8, heads=4),
        formulas=(
            "softmax_j(sum(mul(leaky_relu(add(v0,u1),0.2),v2)))",
            "sum_j mul(softmax_j(sum(mul(leaky_relu(add(v0,u1),0.2),v2))),u1)",
        ),
    ),
    "transformer": Layer(
        lambda: pyg.TransformerConv(16, 8, heads=2, edge_dim=16),
        with_features(16),
        (f"sum_j mul(softmax_j(div(sum(mul(v0,add(u1,e2))),{math.sqrt(8)})),add(u3,e2))",),
    ),
    "agnn": Layer(
        lambda: pyg.AGNNConv(),
        formulas=("sum_j mul(softmax_j(mul(v0,sum(mul(v1,u2)))),u3)",),
    ),
    "han": Layer(
        lambda: pyg.HANConv(16, 8, (["a"], [("a", "to", "a")]), heads=2),
        lambda world: ({"a": world.x}, {("a", "to", "a"): world.edge_index}),
        ("sum_j mul(softmax_j(leaky_relu(add(u0,v1),0.2)),u2)",),
    ),
    "hgt": Layer(
        lambda: pyg.HGTConv(16, 8, (["a"], [("a", "to", "a")]), heads=2),
        lambda world: ({"a": world.x}, {("a", "to", "a"): world.edge_index}),
        ("sum_j mul(softmax_j(div(mul(sum(mul(v0,u1)),e2),2.0)),u3)",),
    ),
    "feast": Layer(
        lambda: pyg.FeaStConv(24, 8, heads=3),
        lambda world: (world.features(world.num_nodes, 24), world.edge_index),
        ("sum(mul(sub(u0,v1),v2)); mean_j mul(u0,e1)",),
    ),
    "supergat": Layer(
        lambda: pyg.SuperGATConv(16, 8, heads=2).eval(),
        formulas=(
            "sum_j mul(softmax_j(leaky_relu(mul(add(u0,v1),sigmoid(sum(mul(v2,u3)))),0.2)),u3)",
        ),
    ),
    "fa": Layer(
        lambda: pyg.FAConv(16),
        with_start,
        ("sum_j mul(u0,mul(tanh(add(u1,v2)),e3))",),
    ),
    "general-attention": Layer(
        lambda: pyg.GeneralConv(16, 8, attention=True, heads=2),
        formulas=("sum_j mul(softmax_j(u0),u1)",),
    ),
    "hypergraph-attention": Layer(
        lambda: pyg.HypergraphConv(16, 8, use_attention=True, heads=2),
        lambda world: (world.x, world.edge_index, None, world.x),
        ("sum_j mul(e0,mul(v1,u2))",),
    ),
    "rgat": Layer(
        lambda: pyg.RGATConv(16, 8, 3),
        lambda world: (world.x, world.edge_index, world.types),
        ("sum_j mul(softmax_j(leaky_relu(add(e0,e1),0.2)),u2)",),
    ),
    "fast-rgcn": Layer(
        lambda: pyg.FastRGCNConv(16, 8, 3),
        lambda world: (world.x, world.edge_index, world.types),
        ("sum_j mul(e0,u1)",),
    ),
    # Networks on every edge.
    "nn": Layer(
        lambda: pyg.NNConv(16, 8, linear(8, 128)),
        with_features(8),
        ("sum_j outer(u0,e1) @ weight, in blocks",),
    ),
    "sage-median": Layer(lambda: pyg.SAGEConv(16, 8, aggr="median"), formulas=("quantile_j u0",)),
    # Messages that no formula says: PyG's own path, with the reason.
    "sage-lstm": Layer(
        lambda: pyg.SAGEConv(16, 8, aggr="lstm"),
        lambda world: (
            world.x,
            torch_geometric.utils.sort_edge_index(world.edge_index, sort_by_row=False),
        ),
        reasons=("no reduction that could be fused",),
    ),
    "edge-conv": Layer(lambda: pyg.EdgeConv(linear(32, 8)), formulas=("max_j add(v0,u1)",)),
    "point-net": Layer(
        lambda: pyg.PointNetConv(linear(19, 8)),
        lambda world: (world.x, world.features(N, 3), world.edge_index),
        ("max_j network(edges), in blocks",),
    ),
    "dna": Layer(
        lambda: pyg.DNAConv(16),
        lambda world: (world.features(N, 3, 16), world.edge_index),
        formulas=("sum_j network(edges), in blocks",),
    ),
    "dna-groups": Layer(
        lambda: pyg.DNAConv(16, groups=2),
        lambda world: (world.features(N, 3, 16), world.edge_index),
        reasons=("'transpose' on a message that has views already",),
    ),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(2)
    return LAYERS[name].make().double()


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_stock(name, same_as_stock):
    same_as_stock(build(name), *LAYERS[name].inputs(World()))


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_runs_as_the_table_says(name, report_of):
    with pyg_accel.patched():
        build(name)(*LAYERS[name].inputs(World()))
    rows = report_of()
    formulas = LAYERS[name].formulas  # one that is part of another is computed within it
    inside = {f for f in formulas for g in formulas if f != g and f in g and "softmax" in f[:8]}
    assert {row.formula for row in rows if row.formula} == set(formulas) - inside
    assert {row.reason for row in rows if row.reason} == set(LAYERS[name].reasons)


@pytest.mark.parametrize("name", LAYERS)
def test_float32_stays_close_to_stock(name, same_as_stock):
    args = tree_map_only(
        Tensor,
        lambda t: (
            t.detach().float().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        ),
        LAYERS[name].inputs(World()),
    )
    # Gradients of deviations and of softmax quotients divide by small numbers, in stock as well.
    same_as_stock(build(name).float(), *args, rtol=1e-3 if name == "sage-many" else 1e-4)


TURNED = [
    name
    for name in LAYERS
    if name
    not in ("signed", "pna", "pna-towers", "sage-lstm", "hypergraph", "hypergraph-attention")
]


@pytest.mark.parametrize("name", TURNED)
def test_the_other_flow_equals_stock(name, same_as_stock):
    layer = build(name)
    for module in layer.modules():
        if isinstance(module, pyg.MessagePassing):
            module.flow = "target_to_source"
    same_as_stock(layer, *LAYERS[name].inputs(World()))


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("sage-lstm", "sage-median")])
@pytest.mark.parametrize(("nodes", "edges"), [(N, 0), (N, 1), (1, 3)], ids=str)
def test_graphs_with_next_to_nothing_in_them_equal_stock(name, nodes, edges, same_as_stock):
    if name in ("dna", "dna-groups", "point-net") and nodes != N:
        pytest.skip("its inputs are of a fixed number of nodes")
    if name.startswith("gen") and nodes == 1:
        pytest.skip("its batch norm wants two rows")
    same_as_stock(build(name), *LAYERS[name].inputs(World(nodes, edges)))


BIPARTITE = {
    "sage": lambda: pyg.SAGEConv((16, 12), 8),
    "sage-max": lambda: pyg.SAGEConv((16, 12), 8, aggr="max"),
    "gin": lambda: pyg.GINConv(linear(16, 8)),
    "graph": lambda: pyg.GraphConv((16, 12), 8),
    "gat": lambda: pyg.GATConv((16, 12), 8, heads=2, add_self_loops=False),
    "gatv2": lambda: pyg.GATv2Conv((16, 12), 8, heads=2, add_self_loops=False),
    "transformer": lambda: pyg.TransformerConv((16, 12), 8, heads=2),
    "res-gated": lambda: pyg.ResGatedGraphConv((16, 12), 8),
    "film": lambda: pyg.FiLMConv((16, 12), 8),
    "cg": lambda: pyg.CGConv((16, 12)),
    "general": lambda: pyg.GeneralConv((16, 12), 8),
    "mf": lambda: pyg.MFConv((16, 12), 8),
    "le": lambda: pyg.LEConv((16, 12), 8),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_bipartite_graphs_equal_stock(name, same_as_stock, report_of):
    torch.manual_seed(2)
    layer = BIPARTITE[name]().double()
    world = World()
    edge_index = torch.stack([torch.randint(0, 20, (90,)), torch.randint(0, 9, (90,))])
    width = 16 if name == "gin" else 12
    same_as_stock(layer, (world.features(20, 16), world.features(11, width)), edge_index)
    assert any(row.formula for row in report_of())


@pytest.mark.parametrize("name", ["sage", "sage-max", "gin", "graph", "gat", "mf"])
def test_bipartite_graphs_without_target_features_equal_stock(name, same_as_stock, report_of):
    torch.manual_seed(2)
    layer = BIPARTITE[name]().double()
    edge_index = torch.stack([torch.randint(0, 20, (90,)), torch.randint(0, 9, (90,))])
    x = World().features(20, 16)
    same_as_stock(layer, (x, None), edge_index, size=(20, 11))
    assert any(row.formula for row in report_of())


class Sum(pyg.MessagePassing):
    """The plainest layer, for any shape of features."""

    def forward(self, x: Tensor, edge_index: Any, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)


class Weighted(Sum):
    def forward(self, x: Tensor, edge_index: Any, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j: Tensor, x_i: Tensor, w: Tensor) -> Tensor:
        return (x_j - x_i).relu() * w


@pytest.mark.parametrize(
    "aggr", ["sum", "mean", "max", "min", "mul", "std", ["sum", "max"]], ids=str
)
@pytest.mark.parametrize(
    ("shape", "node_dim"),
    [
        ((N, 6), 0),
        ((N, 6), -2),
        ((N, 3, 6), 0),
        ((3, N, 6), -2),
        ((3, N, 6), 1),
        ((2, 3, N, 6), -2),
        ((N,), 0),
        ((6, N), 1),
        ((6, N), -1),
    ],
    ids=str,
)
def test_features_of_any_rank_and_node_dimension_equal_stock(aggr, shape, node_dim, same_as_stock):
    if shape == (6, N) and isinstance(aggr, list):
        pytest.skip("PyG concatenates several aggregations in the last dimension only")
    same_as_stock(Sum(aggr=aggr, node_dim=node_dim), World().features(*shape), World().edge_index)


@pytest.mark.parametrize("node_dim", [-2, 1])
@pytest.mark.parametrize("weight", [(E, 1), (E, 6), (3, E, 6), (3, E, 1), (1, E, 1)], ids=str)
def test_edge_weights_meet_batched_features_as_in_stock(weight, node_dim, same_as_stock):
    world = World()
    layer = Weighted(node_dim=node_dim)
    same_as_stock(layer, world.features(3, N, 6), world.edge_index, world.features(*weight))


@pytest.mark.parametrize("weight", [(E, 1), (E, 6), (1, 6), (6,), ()], ids=str)
def test_weights_of_edges_features_or_one_for_all_equal_stock(weight, same_as_stock):
    world = World()
    same_as_stock(Weighted(), world.features(N, 6), world.edge_index, world.features(*weight))


@pytest.mark.parametrize("node_dim", [-2, 1])
def test_results_are_contiguous_as_in_stock(node_dim):
    layer, x, edge_index = Sum(node_dim=node_dim), World().features(3, N, 6), World().edge_index
    assert layer(x, edge_index).is_contiguous()
    with pyg_accel.patched():
        assert layer(x, edge_index).is_contiguous()


@pytest.mark.parametrize("size", [None, (N, N)], ids=["no-size", "size"])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize("name", ["sage-mean", "sage-max", "gat", "gine", "graph"])
def test_an_edge_index_object_gives_the_results_of_stock(name, sort_order, size, same_as_stock):
    world = World()
    layer = build(name)
    args = list(LAYERS[name].inputs(world))
    edges = world.edge_index
    if sort_order is not None:
        edges = torch_geometric.utils.sort_edge_index(edges, sort_by_row=sort_order == "row")
    args[1] = EdgeIndex(edges, sparse_size=(N, N), sort_order=sort_order)
    same_as_stock(layer, *args, **({} if size is None or name == "gat" else {"size": size}))


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_an_int32_edge_index_gives_what_int64_gives(aggr):
    """PyG itself takes int32 in a few layers only."""
    world, layer = World(), Sum(aggr=aggr)
    x = world.x
    expected = layer(x, world.edge_index)
    with pyg_accel.patched():
        found = layer(x, world.edge_index.int())
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded"])
def test_an_edge_index_that_is_a_view_equals_stock(view, same_as_stock):
    edges = World().edge_index
    odd = {
        "transposed": edges.t().contiguous().t(),
        "sliced": torch.cat([edges, edges], 1)[:, ::2],
        "expanded": edges[:, :1].expand(2, 40),
    }[view]
    same_as_stock(Sum(), World().x, odd)


def test_strided_features_equal_stock(same_as_stock):
    wide = World().features(N, 40, grad=False)
    same_as_stock(Sum(), wide[:, 3:30:2].requires_grad_(), World().edge_index)
    same_as_stock(Sum(aggr="max"), wide.t()[:N, :N].requires_grad_(), World().edge_index)
    same_as_stock(Sum(), wide[:1].expand(N, 40).requires_grad_(), World().edge_index)


# -- memory ---------------------------------------------------------------------------------------

WIDE_N, WIDE_E, WIDE_F = 211, 3001, 53


def wide_inputs(kind: str) -> tuple[Tensor, ...]:
    x = torch.randn(WIDE_N, WIDE_F, requires_grad=True)
    edges = torch.randint(0, WIDE_N, (2, WIDE_E))
    return {
        "x": (x, edges),
        "weight": (x, edges, torch.rand(WIDE_E, requires_grad=True)),
        "start": (x, x.detach().clone().requires_grad_(), edges),
        "narrow": (x, edges, torch.randn(WIDE_E, 2, requires_grad=True)),
    }[kind]


F = WIDE_F
LEAN = {
    "gcn": (lambda: pyg.GCNConv(F, F), "weight"),
    "sage-mean": (lambda: pyg.SAGEConv(F, F), "x"),
    "sage-max": (lambda: pyg.SAGEConv(F, F, aggr="max"), "x"),
    "sage-many": (lambda: pyg.SAGEConv(F, F, aggr=["mean", "max", "std"]), "x"),
    "gin": (lambda: pyg.GINConv(linear(F, F)), "x"),
    "graph": (lambda: pyg.GraphConv(F, F), "weight"),
    "tag": (lambda: pyg.TAGConv(F, F), "x"),
    "cheb": (lambda: pyg.ChebConv(F, F, 3), "x"),
    "gcn2": (lambda: pyg.GCN2Conv(F, 0.1), "start"),
    "res-gated": (lambda: pyg.ResGatedGraphConv(F, F), "x"),
    "film": (lambda: pyg.FiLMConv(F, F), "x"),
    "pna": (
        lambda: pyg.PNAConv(F, F, ["mean", "max", "std"], ["identity"], torch.ones(90).long()),
        "x",
    ),
    "le": (lambda: pyg.LEConv(F, F), "weight"),
    "gat": (lambda: pyg.GATConv(F, F // 2, heads=2), "x"),
    "gatv2": (lambda: pyg.GATv2Conv(F, F // 2, heads=2), "x"),
    "agnn": (lambda: pyg.AGNNConv(), "x"),
    "fa": (lambda: pyg.FAConv(F), "start"),
}


@pytest.mark.parametrize("name", LEAN)
def test_no_tensor_of_edges_times_features_is_made(name, largest_result):
    make, kind = LEAN[name]
    layer, inputs = make(), wide_inputs(kind)

    def largest() -> tuple[int, str]:
        with largest_result() as seen:
            layer(*inputs).sum().backward()
        return seen.numbers, seen.operator

    limit = WIDE_E * WIDE_F // 2  # the widest node tensor here is PNA's, an eighth of E x F
    assert largest()[0] >= limit, "the test cannot see what stock allocates"
    with pyg_accel.patched():
        size, operator = largest()
    assert size < limit, f"{operator} made a tensor of {size} elements"


# Layers whose calls are traced each time, and what it is that no plan can do.
SEVERAL = "an aggregation that is made of other things than reductions of the messages"
AFTERWARDS = "a view of the reduced messages"
NODES = "tensors that the message makes of node features"
NOT_READ = "a message that reads sizes or tensors' attributes, calls methods, or loops"
UNPLANNED = {
    "eg": SEVERAL,
    "gen": SEVERAL,
    "gen-mean-softmax": SEVERAL,
    "sage-median": "a sort",
    "hypergraph": NOT_READ,
    "hypergraph-attention": NOT_READ,
    "rgat": NOT_READ,
    "fast-rgcn": NOT_READ,
    "nn": "messages of a network on every edge",
    "point-net": "messages of a network on every edge",
    "dna": "messages of a network on every edge",
}


@pytest.mark.parametrize("name", [name for name, row in LAYERS.items() if row.formulas])
def test_all_but_these_layers_are_traced_once(name, monkeypatch):
    """A layer that loses its plan fails, and so does one that is listed here and has got one."""
    attempt, traced = propagate._attempt, []

    def counted(call):
        traced.append(type(call.owner).__name__)
        return attempt(call)

    monkeypatch.setattr(propagate, "_attempt", counted)
    layer, args = build(name), LAYERS[name].inputs(World())
    with pyg_accel.patched():
        layer(*args)
        layer(*args)
        traced.clear()
        layer(*args)
    assert bool(traced) == (name in UNPLANNED), f"traced: {traced}"


@pytest.mark.parametrize("name", ["TransformerConv", "GATv2Conv", "SAGEConv", "GCNConv"])
def test_a_graph_that_was_first_seen_in_inference_mode_trains(name, always):
    layer, x, edges = getattr(pyg, name)(8, 8), torch.randn(9, 8), torch.randint(0, 9, (2, 30))

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x, edges).square().sum(), list(layer.parameters()))

    wanted = gradients()
    with pyg_accel.patched():
        with torch.inference_mode():
            layer(x, edges)
        for found, expected in zip(gradients(), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
