"""RGCNConv with all relations at once, against PyG's loop."""

import copy

import pytest
import torch
from torch_geometric.nn import RGCNConv as StockRGCNConv

import pyg_accel
from pyg_accel.layers import RGCNConv

RELATIONS, NODES, WIDTH = 100, 60, 8


def pair_of(*args, **options):
    stock = StockRGCNConv(*args, **options).double()
    ours = RGCNConv(*args, **options).double()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def graph(edges: int = 2000, sources: int = NODES, targets: int = NODES):
    edge_type = (RELATIONS * torch.rand(edges) ** 3).long() // 2 * 2  # of every second, no edge
    ends = [torch.randint(n, (edges,)) for n in (sources, targets)]
    return torch.stack(ends), edge_type


def assert_same(stock, ours, x, *graph):
    results = []
    leaves = x if isinstance(x, tuple) else (x,)
    for layer in (stock, ours):
        out = layer(x, *graph)
        inputs = [*leaves, *layer.parameters()]
        grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for expected, found in zip(*results, strict=True):
        scale = 1 + float(expected.abs().max()) if expected.numel() else 1.0
        expected = expected if expected.dim() else torch.zeros_like(found)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("aggr", ["mean", "add", "max", "min"])
@pytest.mark.parametrize(
    "options", [{}, {"num_bases": 4}, {"num_blocks": 4}, {"root_weight": False, "bias": False}],
    ids=["full", "bases", "blocks", "bare"],
)  # fmt: skip
def test_results_and_gradients_equal_stock(options, aggr):
    stock, ours = pair_of(WIDTH, 12, RELATIONS, aggr=aggr, **options)
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(stock, ours, x, *graph())


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_direction_and_two_sides_are_those_of_stock(flow):
    stock, ours = pair_of((WIDTH, 5), 4, RELATIONS, flow=flow)
    x = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
    y = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    if flow == "source_to_target":
        assert_same(stock, ours, (x, y), *graph(500, 20, 30))
    else:  # PyG's RGCNConv sizes its output for the other direction
        stock, ours = pair_of(WIDTH, 4, RELATIONS, flow=flow)
        assert_same(stock, ours, x, *graph(500, 20, 20))


@pytest.mark.parametrize("edges", [0, 1])
def test_graphs_with_hardly_an_edge(edges):
    stock, ours = pair_of(WIDTH, 4, RELATIONS)
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_same(stock, ours, x, *graph(edges))


def test_the_stacked_graph_is_made_once_and_again_when_edges_change(monkeypatch):
    from pyg_accel.layers import rgcn_conv

    calls = []
    stack = rgcn_conv._stack
    monkeypatch.setattr(rgcn_conv, "_stack", lambda *args: calls.append(1) or stack(*args))
    _, ours = pair_of(WIDTH, 4, RELATIONS)
    x, (edge_index, edge_type) = torch.randn(NODES, WIDTH).double(), graph()
    first = ours(x, edge_index, edge_type)
    torch.testing.assert_close(ours(x, edge_index, edge_type), first)
    assert len(calls) == 1
    edge_type.zero_()
    assert not torch.allclose(ours(x, edge_index, edge_type), first)
    assert len(calls) == 2


def test_it_says_what_it_did_and_what_it_left_to_pyg(report_of):
    _, ours = pair_of(WIDTH, 4, RELATIONS)
    edge_index, edge_type = graph()
    ours(torch.randn(NODES, WIDTH).double(), edge_index, edge_type)
    embeddings = StockRGCNConv(NODES, 4, RELATIONS)
    layer = RGCNConv(NODES, 4, RELATIONS)
    layer.load_state_dict(embeddings.state_dict())
    torch.testing.assert_close(
        layer(None, edge_index, edge_type), embeddings(None, edge_index, edge_type)
    )
    rows = report_of()
    assert {row.formula for row in rows} == {"mean_j u0 of every relation", ""}
    assert {row.reason for row in rows} == {"node ids in place of features", ""}


def test_it_is_copied_and_printed_like_stock():
    stock, ours = pair_of(WIDTH, 4, RELATIONS)
    assert repr(copy.deepcopy(ours)) == repr(stock)
    assert pyg_accel.layers.RGCNConv is RGCNConv


def test_relations_out_of_range_are_refused():
    _, ours = pair_of(WIDTH, 4, 3)
    with pytest.raises(IndexError, match=r"outside of \[0, 3\)"):
        ours(torch.randn(5, WIDTH).double(), torch.zeros(2, 1).long(), torch.tensor([3]))
