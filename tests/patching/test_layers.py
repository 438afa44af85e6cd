"""Every layer of PyG that matters: what it becomes under ``patch()``, and that its numbers stay."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg

import pyg_accel

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


class Layer(NamedTuple):
    """A row of the table: what builds the layer, and what it is called with."""

    make: Callable[[], torch.nn.Module]
    inputs: Inputs = x_and_edges


LAYERS = {
    # The SpMM family.
    "gcn": Layer(lambda: pyg.GCNConv(16, 8), x_edges_weight),
    "gcn-unweighted": Layer(lambda: pyg.GCNConv(16, 8), x_and_edges),
    "gcn-not-normalised": Layer(lambda: pyg.GCNConv(16, 8, normalize=False), x_and_edges),
    "sage-mean": Layer(lambda: pyg.SAGEConv(16, 8)),
    "sage-max": Layer(lambda: pyg.SAGEConv(16, 8, aggr="max")),
    "sage-min": Layer(lambda: pyg.SAGEConv(16, 8, aggr="min")),
    "sage-prod": Layer(lambda: pyg.SAGEConv(16, 8, aggr="mul")),
    "sage-project": Layer(lambda: pyg.SAGEConv(16, 8, project=True)),
    "sage-many": Layer(lambda: pyg.SAGEConv(16, 8, aggr=["mean", "max", "std", "min", "var"])),
    "gin": Layer(lambda: pyg.GINConv(linear(16, 8), train_eps=True)),
    "graph": Layer(lambda: pyg.GraphConv(16, 8), x_edges_weight),
    "graph-max": Layer(lambda: pyg.GraphConv(16, 8, aggr="max"), x_edges_weight),
    "cheb": Layer(lambda: pyg.ChebConv(16, 8, 3)),
    "arma": Layer(lambda: pyg.ARMAConv(16, 8, 3, 2)),
    "sg": Layer(lambda: pyg.SGConv(16, 8, 2)),
    "ssg": Layer(lambda: pyg.SSGConv(16, 8, 0.1, 2)),
    "appnp": Layer(lambda: pyg.APPNP(3, 0.1)),
    "tag": Layer(lambda: pyg.TAGConv(16, 8)),
    "gcn2": Layer(lambda: pyg.GCN2Conv(16, 0.1), with_start),
    "light-gcn": Layer(lambda: pyg.LGConv()),
    "mixhop": Layer(lambda: pyg.MixHopConv(16, 8)),
    "cluster-gcn": Layer(lambda: pyg.ClusterGCNConv(16, 8)),
    "gated-graph": Layer(lambda: pyg.GatedGraphConv(16, 2)),
    "simple": Layer(lambda: pyg.SimpleConv("mean")),
    "mf": Layer(lambda: pyg.MFConv(16, 8)),
    "wl-continuous": Layer(lambda: pyg.WLConvContinuous()),
    "pdn": Layer(lambda: pyg.PDNConv(16, 8, 16, 4), with_features(16)),
    "eg": Layer(lambda: pyg.EGConv(16, 8, aggregators=["sum", "mean", "max", "std", "symnorm"])),
    "hypergraph": Layer(lambda: pyg.HypergraphConv(16, 8)),
    "signed": Layer(
        lambda: pyg.SignedConv(16, 8, True),
        lambda world: (world.x, world.edge_index, world.edge_index.flip(0)),
    ),
    "rgcn": Layer(
        lambda: pyg.RGCNConv(16, 8, 3), lambda world: (world.x, world.edge_index, world.types)
    ),
    # Binary-reduce.
    "le": Layer(lambda: pyg.LEConv(16, 8), x_edges_weight),
    "gine": Layer(lambda: pyg.GINEConv(linear(16, 8)), with_features(16)),
    "gine-projected": Layer(lambda: pyg.GINEConv(linear(16, 8), edge_dim=8), with_features(8)),
    "res-gated": Layer(lambda: pyg.ResGatedGraphConv(16, 8)),
    "res-gated-edges": Layer(lambda: pyg.ResGatedGraphConv(16, 8, edge_dim=8), with_features(8)),
    "film": Layer(lambda: pyg.FiLMConv(16, 8)),
    "cg": Layer(lambda: pyg.CGConv(16, 8), with_features(8)),
    "general": Layer(lambda: pyg.GeneralConv(16, 8, in_edge_channels=8), with_features(8)),
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
        )
    ),
    "gen": Layer(lambda: pyg.GENConv(16, 8, edge_dim=8), with_features(8)),
    "gen-power": Layer(lambda: pyg.GENConv(16, 8, aggr="power")),
    "gen-mean-softmax": Layer(lambda: pyg.GENConv(16, 8, aggr=["mean", "softmax"])),
    # Attention.
    "gat": Layer(lambda: pyg.GATConv(16, 8, heads=4)),
    "gat-edges": Layer(lambda: pyg.GATConv(16, 8, heads=4, edge_dim=16), with_features(16)),
    "gatv2": Layer(lambda: pyg.GATv2Conv(16, 8, heads=4)),
    "transformer": Layer(
        lambda: pyg.TransformerConv(16, 8, heads=2, edge_dim=16), with_features(16)
    ),
    "agnn": Layer(lambda: pyg.AGNNConv()),
    "han": Layer(
        lambda: pyg.HANConv(16, 8, (["a"], [("a", "to", "a")]), heads=2),
        lambda world: ({"a": world.x}, {("a", "to", "a"): world.edge_index}),
    ),
    "hgt": Layer(
        lambda: pyg.HGTConv(16, 8, (["a"], [("a", "to", "a")]), heads=2),
        lambda world: ({"a": world.x}, {("a", "to", "a"): world.edge_index}),
    ),
    "feast": Layer(
        lambda: pyg.FeaStConv(24, 8, heads=3),
        lambda world: (world.features(world.num_nodes, 24), world.edge_index),
    ),
    "supergat": Layer(lambda: pyg.SuperGATConv(16, 8, heads=2).eval()),
    "fa": Layer(lambda: pyg.FAConv(16), with_start),
    "general-attention": Layer(lambda: pyg.GeneralConv(16, 8, attention=True, heads=2)),
    "hypergraph-attention": Layer(
        lambda: pyg.HypergraphConv(16, 8, use_attention=True, heads=2),
        lambda world: (world.x, world.edge_index, None, world.x),
    ),
    "rgat": Layer(
        lambda: pyg.RGATConv(16, 8, 3), lambda world: (world.x, world.edge_index, world.types)
    ),
    "fast-rgcn": Layer(
        lambda: pyg.FastRGCNConv(16, 8, 3), lambda world: (world.x, world.edge_index, world.types)
    ),
    # Networks on every edge.
    "nn": Layer(lambda: pyg.NNConv(16, 8, linear(8, 128)), with_features(8)),
    # Messages that no formula says: PyG's own path, with the reason.
    "sage-median": Layer(lambda: pyg.SAGEConv(16, 8, aggr="median")),
    "sage-lstm": Layer(
        lambda: pyg.SAGEConv(16, 8, aggr="lstm"),
        lambda world: (
            world.x,
            torch_geometric.utils.sort_edge_index(world.edge_index, sort_by_row=False),
        ),
    ),
    "edge-conv": Layer(lambda: pyg.EdgeConv(linear(32, 8))),
    "point-net": Layer(
        lambda: pyg.PointNetConv(linear(19, 8)),
        lambda world: (world.x, world.features(N, 3), world.edge_index),
    ),
    "dna": Layer(
        lambda: pyg.DNAConv(16), lambda world: (world.features(N, 3, 16), world.edge_index)
    ),
    "dna-groups": Layer(
        lambda: pyg.DNAConv(16, groups=2),
        lambda world: (world.features(N, 3, 16), world.edge_index),
    ),
}


LEFT_TO_PYG = ("sage-lstm", "sage-median", "dna-groups")


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(2)
    return LAYERS[name].make().double()


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_stock(name, same_as_stock, report_of):
    """Which formula each becomes, and how it runs, is compared in tests/test_layer_modes.py."""
    same_as_stock(build(name), *LAYERS[name].inputs(World()))
    assert any(row.formula for row in report_of()) == (name not in LEFT_TO_PYG)


@pytest.mark.one_of(3)
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


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", TURNED)
def test_the_other_flow_equals_stock(name, same_as_stock):
    layer = build(name)
    for module in layer.modules():
        if isinstance(module, pyg.MessagePassing):
            module.flow = "target_to_source"
    same_as_stock(layer, *LAYERS[name].inputs(World()))


@pytest.mark.one_of(8)
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


@pytest.mark.one_of(2)
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


@pytest.mark.each
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


@pytest.mark.each
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


@pytest.mark.each
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


@pytest.mark.one_of(2)
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
