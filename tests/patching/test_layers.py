"""Every layer of PyG that matters: what it becomes under ``patch()``, and that its numbers stay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg

import pyg_accel
from benchmarks.layers.cases import CASES, RELATIONS, Case, Inputs
from tests.user_layers import Layer, Weighted, written

pytestmark = pytest.mark.usefixtures("always")

N, E, WIDTH = 30, 220, 16


def world(nodes: int = N, edges: int = E) -> Inputs:
    """A directed graph with duplicates, self-loops and isolated nodes, and features for it."""
    ids = torch.randint(0, max(nodes - 4, 1), (2, edges))
    if edges > 20:
        ids[:, -8:] = ids[:, :8]
        ids[1, 8:12] = ids[0, 8:12]
    return Inputs(
        features(nodes, WIDTH), ids, features(edges, WIDTH),
        features(edges).detach().abs().requires_grad_(), torch.arange(edges) % RELATIONS,
        features(nodes, 3),
    )  # fmt: skip


def features(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def weighted(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.edge_index, g.edge_weight


def pna(f: int, aggregators: list[str], **options: Any) -> torch.nn.Module:
    degrees = torch.bincount(torch.bincount(world().edge_index[1], minlength=N))
    return pyg.PNAConv(f, 8, aggregators, ["identity", "attenuation"], degrees, **options)


# Layers with other options than those whose modes are compared with a table.
LAYERS: dict[str, Case] = {" ".join(key): case for key, case in CASES.items()} | {
    "gcn-not-normalised": Case(lambda f: pyg.GCNConv(f, 8, normalize=False)),
    "sage-min": Case(lambda f: pyg.SAGEConv(f, 8, aggr="min")),
    "sage-prod": Case(lambda f: pyg.SAGEConv(f, 8, aggr="mul")),
    "sage-project": Case(lambda f: pyg.SAGEConv(f, 8, project=True)),
    "sage-many": Case(lambda f: pyg.SAGEConv(f, 8, aggr=["mean", "max", "std", "min", "var"])),
    "gin-eps": Case(lambda f: pyg.GINConv(torch.nn.Linear(f, 8), train_eps=True)),
    "graph-max": Case(lambda f: pyg.GraphConv(f, 8, aggr="max"), weighted),
    "eg": Case(lambda f: pyg.EGConv(f, 8, aggregators=["sum", "mean", "max", "std", "symnorm"])),
    "gine": Case(
        lambda f: pyg.GINEConv(torch.nn.Linear(f, 8)), lambda g: (g.x, g.edge_index, g.edge_attr)),
    "pna-towers": Case(lambda f: pna(f, ["mean", "sum", "var"], towers=4, divide_input=True)),
    "gen-power": Case(lambda f: pyg.GENConv(f, 8, aggr="power")),
    "gen-mean-softmax": Case(lambda f: pyg.GENConv(f, 8, aggr=["mean", "softmax"])),
    "general-attention": Case(lambda f: pyg.GeneralConv(f, 8, attention=True, heads=2)),
    "hypergraph-attention": Case(
        lambda f: pyg.HypergraphConv(f, 8, use_attention=True, heads=2),
        lambda g: (g.x, g.edge_index, None, g.x)),
    "dna-groups": Case(
        lambda f: pyg.DNAConv(f, groups=2),
        lambda g: (torch.stack([g.x] * 3, 1).detach().requires_grad_(), g.edge_index)),
}  # fmt: skip
LEFT_TO_PYG = ("SAGEConv lstm", "SAGEConv median", "dna-groups")


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(2)
    return LAYERS[name].make(WIDTH).double()


def inputs(name: str, nodes: int = N, edges: int = E) -> tuple[Any, ...]:
    return LAYERS[name].call(world(nodes, edges))


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_stock(name, same_as_stock, report_of):
    """Which formula each becomes, and how it runs, is compared in tests/test_layer_modes.py."""
    same_as_stock(build(name), *inputs(name))
    assert any(row.formula for row in report_of()) == (name not in LEFT_TO_PYG)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", LAYERS)
def test_float32_stays_close_to_stock(name, same_as_stock):
    args = tree_map_only(
        Tensor,
        lambda t: (
            t.detach().float().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        ),
        inputs(name),
    )
    # Gradients of deviations and of softmax quotients divide by small numbers, in stock as well.
    same_as_stock(build(name).float(), *args, rtol=1e-3 if name == "sage-many" else 1e-4)


UNTURNED = ("SignedConv ", "PNAConv ", "PNAConv edge_attr", "pna-towers", "SAGEConv lstm",
            "HypergraphConv ", "hypergraph-attention")  # fmt: skip


@pytest.mark.one_of(4, 1)
@pytest.mark.parametrize("name", [n for n in LAYERS if n not in UNTURNED])
def test_the_other_flow_equals_stock(name, same_as_stock):
    layer = build(name)
    for module in layer.modules():
        if isinstance(module, pyg.MessagePassing):
            module.flow = "target_to_source"
    same_as_stock(layer, *inputs(name))


@pytest.mark.one_of(10)
@pytest.mark.parametrize("name", [n for n in LAYERS if n not in LEFT_TO_PYG[:2]])
@pytest.mark.parametrize(("nodes", "edges"), [(N, 0), (N, 1), (1, 3)], ids=str)
def test_graphs_with_next_to_nothing_in_them_equal_stock(name, nodes, edges, same_as_stock):
    if nodes == 1 and name.lower().startswith(("gen", "gps")):
        pytest.skip("its batch norm wants two rows")
    same_as_stock(build(name), *inputs(name, nodes, edges))


BIPARTITE = {
    "sage": lambda: pyg.SAGEConv((16, 12), 8),
    "sage-max": lambda: pyg.SAGEConv((16, 12), 8, aggr="max"),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(16, 8)),
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
    edge_index = torch.stack([torch.randint(0, 20, (90,)), torch.randint(0, 9, (90,))])
    width = 16 if name == "gin" else 12
    same_as_stock(layer, (features(20, 16), features(11, width)), edge_index)
    assert any(row.formula for row in report_of())


@pytest.mark.parametrize("name", ["sage", "sage-max", "gin", "graph", "gat", "mf"])
def test_bipartite_graphs_without_target_features_equal_stock(name, same_as_stock, report_of):
    torch.manual_seed(2)
    layer = BIPARTITE[name]().double()
    edge_index = torch.stack([torch.randint(0, 20, (90,)), torch.randint(0, 9, (90,))])
    x = features(20, 16)
    same_as_stock(layer, (x, None), edge_index, size=(20, 11))
    assert any(row.formula for row in report_of())


WEIGHTED = written(Weighted, message=lambda self, x_j, x_i, w: (x_j - x_i).relu() * w)


@pytest.mark.each
@pytest.mark.parametrize(
    "aggr", ["sum", "mean", "max", "min", "mul", "std", ["sum", "max"]], ids=str
)
@pytest.mark.parametrize(("shape", "node_dim"), [
    ((N, 6), 0), ((N, 6), -2), ((N, 3, 6), 0), ((3, N, 6), -2), ((3, N, 6), 1),
    ((2, 3, N, 6), -2), ((N,), 0), ((6, N), 1), ((6, N), -1),
], ids=str)  # fmt: skip
def test_features_of_any_rank_and_node_dimension_equal_stock(aggr, shape, node_dim, same_as_stock):
    if shape == (6, N) and isinstance(aggr, list):
        pytest.skip("PyG concatenates several aggregations in the last dimension only")
    same_as_stock(Layer(aggr=aggr, node_dim=node_dim), features(*shape), world().edge_index)


@pytest.mark.each
@pytest.mark.parametrize("node_dim", [-2, 1])
@pytest.mark.parametrize("weight", [(E, 1), (E, 6), (3, E, 6), (3, E, 1), (1, E, 1)], ids=str)
def test_edge_weights_meet_batched_features_as_in_stock(weight, node_dim, same_as_stock):
    layer = WEIGHTED(node_dim=node_dim)
    same_as_stock(layer, features(3, N, 6), world().edge_index, features(*weight))


@pytest.mark.parametrize("weight", [(E, 1), (E, 6), (1, 6), (6,), ()], ids=str)
def test_weights_of_edges_features_or_one_for_all_equal_stock(weight, same_as_stock):
    same_as_stock(WEIGHTED(), features(N, 6), world().edge_index, features(*weight))


@pytest.mark.parametrize("node_dim", [-2, 1])
def test_results_are_contiguous_as_in_stock(node_dim):
    layer, x, edge_index = Layer(node_dim=node_dim), features(3, N, 6), world().edge_index
    assert layer(x, edge_index).is_contiguous()
    with pyg_accel.patched():
        assert layer(x, edge_index).is_contiguous()


@pytest.mark.each
@pytest.mark.parametrize("size", [None, (N, N)], ids=["no-size", "size"])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize(
    "name", ["SAGEConv ", "SAGEConv max", "GATConv ", "gine", "GraphConv edge_weight"]
)
def test_an_edge_index_object_gives_the_results_of_stock(name, sort_order, size, same_as_stock):
    layer = build(name)
    args = list(inputs(name))
    edges = world().edge_index
    if sort_order is not None:
        edges = torch_geometric.utils.sort_edge_index(edges, sort_by_row=sort_order == "row")
    args[1] = EdgeIndex(edges, sparse_size=(N, N), sort_order=sort_order)
    same_as_stock(layer, *args, **({} if size is None or name == "GATConv " else {"size": size}))


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_an_int32_edge_index_gives_what_int64_gives(aggr):
    """PyG itself takes int32 in a few layers only."""
    layer, x, edges = Layer(aggr), features(N, WIDTH), world().edge_index
    expected = layer(x, edges)
    with pyg_accel.patched():
        actual = layer(x, edges.int())
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (actual, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded"])
def test_an_edge_index_that_is_a_view_equals_stock(view, same_as_stock):
    edges = world().edge_index
    odd = {
        "transposed": edges.t().contiguous().t(),
        "sliced": torch.cat([edges, edges], 1)[:, ::2],
        "expanded": edges[:, :1].expand(2, 40),
    }[view]
    same_as_stock(Layer(), features(N, WIDTH), odd)


def test_strided_features_equal_stock(same_as_stock):
    wide = features(N, 40).detach()
    same_as_stock(Layer(), wide[:, 3:30:2].requires_grad_(), world().edge_index)
    same_as_stock(Layer(aggr="max"), wide.t()[:N, :N].requires_grad_(), world().edge_index)
    same_as_stock(Layer(), wide[:1].expand(N, 40).requires_grad_(), world().edge_index)


# -- memory ---------------------------------------------------------------------------------------

PNA = Case(lambda f: pyg.PNAConv(f, f, ["mean", "max", "std"], ["identity"], torch.ones(9).long()))
LEAN = ["GCNConv edge_weight", "SAGEConv ", "SAGEConv max", "sage-many", "GINConv ",
        "GraphConv edge_weight", "TAGConv ", "ChebConv K=3", "GCN2Conv ", "ResGatedGraphConv ",
        "FiLMConv ", "LEConv edge_weight", "GATConv ", "GATv2Conv ", "AGNNConv ",
        "FAConv "]  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ["pna", *LEAN])
def test_no_tensor_of_edges_times_features_is_made(name, largest_result):
    nodes, edges, width = 211, 3001, 52
    x = torch.randn(nodes, width, requires_grad=True)
    graph = replace(world(nodes, edges), x=x, edge_weight=torch.rand(edges, requires_grad=True))
    case = PNA if name == "pna" else LAYERS[name]
    layer, args = case.make(width), case.call(graph)

    def largest() -> tuple[int, str]:
        with largest_result() as seen:
            layer(*args).sum().backward()
        return seen.numbers, seen.operator

    limit = edges * width // 2  # the widest node tensor here is PNA's, an eighth of E x F
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
        for actual, expected in zip(gradients(), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
