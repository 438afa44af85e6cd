"""Layers over many relations: a hundred, of very different sizes, some of them empty."""

import copy
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.settings import settings

RELATIONS, NODES, EDGES, WIDTH = 100, 60, 2000, 8

pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture
def homogeneous() -> tuple[Any, ...]:
    """Features, edges, and their relations: some have hundreds of edges, some none."""
    torch.manual_seed(1)
    edge_type = (RELATIONS * torch.rand(EDGES) ** 3).long() // 2 * 2  # of every second, no edge
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(NODES, (2, EDGES)), edge_type


options_of_matrices = pytest.mark.parametrize(
    "options", [{}, {"num_bases": 4}, {"num_blocks": 4}], ids=["full", "bases", "blocks"]
)


@pytest.mark.each
@pytest.mark.parametrize("kind, more", [
    (pyg.FastRGCNConv, {"aggr": "mean"}), (pyg.FastRGCNConv, {"aggr": "add"}), (pyg.RGATConv, {}),
], ids=str)  # fmt: skip
@options_of_matrices
def test_a_matrix_of_a_relation_for_each_edge_equals_stock(
    same_as_stock, homogeneous, kind, more, options
):
    layer = kind(WIDTH, WIDTH, RELATIONS, **options, **more)
    same_as_stock(layer.double(), *homogeneous)


@pytest.mark.parametrize("kind", [pyg.FastRGCNConv, pyg.RGATConv])
@options_of_matrices
def test_programs_serve_other_edges_relations_and_weights(kind, options, homogeneous):
    layer = kind(WIDTH, WIDTH, RELATIONS, **options).double()
    stock = copy.deepcopy(layer)
    x, edges, types = homogeneous

    def matrices(model: Any) -> torch.Tensor:
        return model.basis if hasattr(model, "basis") else model.weight

    def change_weights() -> None:
        for model in (layer, stock):
            with torch.no_grad():
                matrices(model).mul_(-1.5)

    def some(nodes: int, count: int) -> tuple[Any, ...]:
        x = torch.randn(nodes, WIDTH, dtype=torch.float64, requires_grad=True)
        ids = torch.randint(RELATIONS, (count,))
        return x, torch.randint(nodes, (2, count)), ids

    few = some(9, 31)
    calls = [(x, edges, types)] * 3 + [(x, edges, types.flip(0)), (x, edges.flip(0), types)]
    calls += [some(80, 2000), some(80, 1111), some(9, 30), few, few, some(300, 5)]
    for number, call in enumerate(calls):
        if number == 9:
            few[2].fill_(3)
        if number in (2, 9):
            change_weights()
        with pyg_accel.patched():
            with traces() as entered:
                out = layer(*call)
            if kind is pyg.RGATConv or "num_blocks" not in options:  # those of a sum are not ours
                assert not entered or number < 7, number
        right = stock(*call)
        torch.testing.assert_close(out, right)
        for mine, true in zip(
            torch.autograd.grad(out.sin().sum(), [call[0], matrices(layer)]),
            torch.autograd.grad(right.sin().sum(), [call[0], matrices(stock)]),
            strict=True,
        ):
            torch.testing.assert_close(mine, true)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("bad", [-1, 1000])
def test_ids_out_of_range_raise_what_stock_raises(end, bad, homogeneous, raises_as_stock):
    x, edge_index, edge_type = homogeneous
    edge_index[end, 3] = bad
    raises_as_stock(pyg.RGCNConv(WIDTH, 4, RELATIONS).double(), x, edge_index, edge_type)


def test_relations_that_are_bytes_raise_what_stock_raises(homogeneous, raises_as_stock):
    x, edge_index, edge_type = homogeneous
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS).double()
    raises_as_stock(layer, x, edge_index, edge_type.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_type_of_stock(dtype, homogeneous):
    x, edge_index, edge_type = homogeneous
    layer, x = pyg.RGCNConv(WIDTH, 4, RELATIONS).to(dtype), x.detach().to(dtype)
    expected = layer(x, edge_index, edge_type)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edge_index, edge_type), expected, rtol=0.05, atol=0.05)


def test_means_stay_those_of_each_relation_where_they_are_not_one_call(homogeneous):
    """With pyg-lib and so many relations PyG takes means over all of them together."""
    x, edge_index, edge_type = homogeneous
    layer, x = pyg.RGCNConv(WIDTH, 4, 300), x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, edge_index, edge_type)
        with pyg_accel.patched():
            out = layer(x, edge_index, edge_type)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def formulas(rows: list[Any]) -> list[str]:
    return [row.formula for row in rows]


@pytest.mark.each
@pytest.mark.parametrize(
    "options",
    [{}, {"num_bases": 4}, {"num_blocks": 4}, {"root_weight": False, "bias": False}],
    ids=["full", "bases", "blocks", "bare"],
)
@pytest.mark.parametrize("aggr", ["mean", "add", "max", "min"])
def test_all_relations_are_one_call(same_as_stock, homogeneous, report_of, options, aggr):
    same_as_stock(pyg.RGCNConv(WIDTH, 12, RELATIONS, aggr=aggr, **options).double(), *homogeneous)
    reduce = {"add": "sum"}.get(aggr, aggr)
    assert formulas(report_of()) == [f"{reduce}_j u0, {RELATIONS} relations"]
    assert report_of()[0].calls == 1


def pairs(x: Any, edge_index: Any, edge_type: Any) -> tuple[Any, ...]:
    y = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    return (x, y), torch.stack([edge_index[0], edge_index[1] // 2]), edge_type


GRAPHS = {
    "two kinds of nodes": ({"in_channels": (WIDTH, 5)}, pairs),
    "the other flow": ({"flow": "target_to_source"}, lambda *inputs: inputs),
    "no edge": ({}, lambda x, edges, types: (x, edges[:, :0], types[:0])),
    "one edge": ({}, lambda x, edges, types: (x, edges[:, :1], types[:1])),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_relations_of_other_graphs_equal_stock(same_as_stock, homogeneous, report_of, name):
    options, inputs = GRAPHS[name]
    layer = pyg.RGCNConv(**{"in_channels": WIDTH} | options, out_channels=4,
                         num_relations=RELATIONS)  # fmt: skip
    same_as_stock(layer.double(), *inputs(*homogeneous))
    assert "relations" in report_of()[0].formula


def test_relations_that_change_in_place_are_seen(homogeneous):
    x, edge_index, edge_type = homogeneous
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS).double()
    with pyg_accel.patched():
        first = layer(x, edge_index, edge_type)
        assert torch.equal(layer(x, edge_index, edge_type), first)
        edge_type.zero_()
        second = layer(x, edge_index, edge_type)
    torch.testing.assert_close(second, layer(x, edge_index, edge_type))
    assert not torch.allclose(first, second)


def test_relations_are_reduced_by_the_aggregation_that_a_layer_has(
    same_as_stock, homogeneous, report_of
):
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS, aggr="mean").double()
    layer.aggr_module = pyg.aggr.SumAggregation()
    same_as_stock(layer, *homogeneous)
    layer.aggr = "max"  # says nothing, once a layer has been made
    same_as_stock(layer, *homogeneous)
    assert {row.formula for row in report_of()} == {f"sum_j u0, {RELATIONS} relations"}


class Twice(pyg.RGCNConv):
    """A message of its own, which no stacked kernel knows."""

    def message(self, x_j, edge_type_ptr):
        return 2 * x_j


def test_what_the_stacked_kernels_do_not_know_is_a_call_a_relation(
    same_as_stock, homogeneous, report_of
):
    x, edge_index, edge_type = homogeneous
    for layer, inputs in (
        (Twice(WIDTH, 4, RELATIONS), x),
        (pyg.RGCNConv(NODES, 4, RELATIONS), None),
    ):
        pyg_accel.reset_report()
        same_as_stock(layer.double(), inputs, edge_index, edge_type)
        assert not any("relations" in row.formula for row in report_of())


@pytest.mark.parametrize("what", ["hook", "message"])
def test_whoever_waits_for_calls_of_each_relation_gets_them(same_as_stock, homogeneous, what):
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS).double()
    if what == "hook":
        layer.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        layer.message = lambda x_j, edge_type_ptr: 2 * x_j
    same_as_stock(layer, *homogeneous)


def test_relations_of_a_small_graph_are_stacked_at_default_settings(homogeneous, report_of):
    settings.always = False
    x, edge_index, edge_type = homogeneous
    with pyg_accel.patched():
        pyg.RGCNConv(WIDTH, 4, RELATIONS).double()(x, edge_index, edge_type)
        assert formulas(report_of()) == [f"mean_j u0, {RELATIONS} relations"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_bases": 3, "concat": False},
        {"num_blocks": 4},
        {"attention_mode": "multiplicative-self-attention", "dim": 2},
        {"attention_mechanism": "within-relation"},
        {"mod": "additive"},
        {"mod": "f-scaled"},
        {"edge_dim": 3},
    ],
    ids=str,
)
def test_attention_over_relations_has_no_matrix_an_edge(
    same_as_stock, homogeneous, report_of, options
):
    x, edge_index, edge_type = homogeneous
    x = torch.randn(NODES, 24, dtype=torch.float64, requires_grad=True)
    layer = pyg.RGATConv(24, 20, RELATIONS, heads=4, **options).double()
    edge_attr = torch.randn(EDGES, 3, dtype=torch.float64) if "edge_dim" in options else None
    same_as_stock(layer, x, edge_index, edge_type, edge_attr)
    (row,) = report_of()
    assert "u" in row.formula, "products are read from pairs, not from edges"


@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_a_matrix_an_edge_is_read_from_pairs(same_as_stock, homogeneous, report_of, aggr):
    x, edge_index, edge_type = homogeneous
    x = torch.randn(NODES, 24, dtype=torch.float64, requires_grad=True)
    same_as_stock(pyg.FastRGCNConv(24, 20, RELATIONS, aggr=aggr).double(), x, edge_index, edge_type)
    assert any("u" in row.formula for row in report_of())


class Typed(pyg.MessagePassing):
    """A matrix per relation at both ends, a function of the product, and more than a product."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.weight = torch.nn.Parameter(torch.randn(RELATIONS, 24, 20))

    def forward(self, x, edge_index, edge_type):
        return self.propagate(edge_index, x=x, edge_type=edge_type)

    def message(self, x_i, x_j, edge_type):
        matrix = self.weight[edge_type]
        sent = torch.bmm(x_j.unsqueeze(1), matrix).squeeze(1)
        there = torch.bmm(x_i.unsqueeze(1), matrix).squeeze(1)
        return torch.relu(sent) * there[:, :1] + matrix[:, 0]


@pytest.mark.parametrize("edges", [0, 1, EDGES])
def test_products_of_both_ends_in_a_layer_of_ones_own(same_as_stock, homogeneous, edges):
    x = torch.randn(NODES, 24, dtype=torch.float64, requires_grad=True)
    _, edge_index, edge_type = homogeneous
    same_as_stock(Typed().double(), x, edge_index[:, :edges], edge_type[:edges])


@pytest.mark.parametrize("kind, error", [
    (pyg.RGCNConv, (RuntimeError, "out of bounds")), (pyg.RGATConv, (IndexError, "relation ids")),
])  # fmt: skip
def test_relations_out_of_range_are_refused(homogeneous, kind, error):
    x, edge_index, edge_type = homogeneous
    layer = kind(WIDTH, 24, RELATIONS).double()
    with pyg_accel.patched(), pytest.raises(error[0], match=error[1]):
        layer(x, edge_index, edge_type + 50)
