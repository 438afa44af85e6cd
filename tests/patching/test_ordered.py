"""Quantiles of groups of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn import aggr

import pyg_accel
from pyg_accel.graph import Graph
from pyg_accel.ops import ordered_groups
from pyg_accel.settings import settings

N, G, F = 400, 12, 5

Function = Callable[[Tensor, Tensor], Any]


def quantiles(q: Any, method: str) -> Function:
    return lambda x, index: aggr.QuantileAggregation(q, method, 2.5)(x, index, dim_size=G + 2)


AGGREGATIONS: dict[str, Function] = {
    "median": lambda x, index: aggr.MedianAggregation()(x, index, dim_size=G + 1),
    "median-of-blocks": lambda x, index: aggr.MedianAggregation()(
        x.view(-1, 1, F), index, dim_size=G, dim=0
    ),
    "median-of-numbers": lambda x, index: aggr.MedianAggregation()(x[:, 0], index, dim=0),
    **{
        f"{method}-{q}": quantiles(q, method)
        for method in ("linear", "lower", "higher", "nearest", "midpoint")
        for q in (0.3, [0.0, 0.25, 1.0])
    },
    "quantiles-of-blocks": lambda x, index: aggr.QuantileAggregation([0.2, 0.5])(
        x.view(-1, F, 1), index, dim=0
    ),
    "several": lambda x, index: aggr.MultiAggregation(["mean", "median", "max"])(x, index),
}


def groups(count: int = N, *, ordered: bool = True, kind: str = "many") -> Tensor:
    if kind == "one":
        return torch.zeros(count, dtype=torch.long)
    if kind == "skewed":
        index = (torch.rand(count) ** 4 * (G - 2)).long()
    else:
        index = torch.randint(0, G - 2, (count,))  # the last ones are empty
    return index.sort().values if ordered else index


def run(function: Function, x: Tensor, index: Tensor) -> list[Tensor]:
    out = function(x, index)
    (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(grad.square().sum(), x)
    return [out, grad, twice]


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["many", "skewed", "one", "unordered"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_results_and_gradients_of_every_order_equal_stock(name, kind, report_of):
    settings.always = True
    x = torch.randn(N, F, dtype=torch.double, requires_grad=True)
    index = groups(ordered=kind != "unordered", kind=kind)
    expected = run(AGGREGATIONS[name], x, index)
    compare = torch.testing.assert_close if name == "several" else assert_equal  # it adds up
    with pyg_accel.patched():
        for _ in range(2):  # new groups, and known ones
            compare(run(AGGREGATIONS[name], x, index), expected)
    assert any(row.formula for row in report_of())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", ["median", "linear-[0.0, 0.25, 1.0]"])
def test_other_dtypes_equal_stock(name, dtype, index_dtype):
    settings.always = True
    x, index = torch.randn(N, F).to(dtype), groups().to(index_dtype)
    with torch.no_grad():
        expected = AGGREGATIONS[name](x, index.long())
        with pyg_accel.patched():
            assert_equal([AGGREGATIONS[name](x, index)], [expected])


@pytest.mark.parametrize("name", ["median", "linear-0.3"])
@pytest.mark.parametrize("what", ["equal", "nan", "infinite"])
def test_equal_numbers_and_what_is_none_equal_stock(name, what):
    settings.always = True
    x = torch.randint(0, 3, (N, F)).float()
    if what != "equal":
        x.view(-1)[::37] = torch.nan if what == "nan" else torch.inf
        x.view(-1)[::41] = torch.nan if what == "nan" else -torch.inf
    x.requires_grad_()
    index = groups()

    def both() -> list[Tensor]:
        out = AGGREGATIONS[name](x, index)
        (grad,) = torch.autograd.grad(out.sum(), x)
        # Which of equal numbers is the quantile, PyG's sort does not say.
        return [out, utils.scatter(grad, index)]

    expected = both()
    with pyg_accel.patched():
        found = both()
    assert_equal(found[:1], expected[:1])
    torch.testing.assert_close(found[1], expected[1])


def test_groups_are_sorted_in_blocks(monkeypatch):
    settings.always = True
    monkeypatch.setattr(ordered_groups, "_NUMBERS", 64)
    x, index = torch.randn(N, F, requires_grad=True), groups(kind="skewed")
    expected = run(AGGREGATIONS["median"], x, index)
    with pyg_accel.patched():
        assert_equal(run(AGGREGATIONS["median"], x, index), expected)


@pytest.mark.parametrize("name", ["median"])
def test_what_does_not_fit_raises_as_in_stock(name):
    settings.always = True
    x, index = torch.randn(N, F), groups()
    wrong: list[Callable[[], Any]] = [
        lambda: AGGREGATIONS[name](x, index[:-1]),
        lambda: AGGREGATIONS[name](x, index.float()),
        lambda: AGGREGATIONS[name](x, index - 1),
        lambda: AGGREGATIONS[name](x[:0], index[:0]),
        lambda: aggr.SortAggregation(3)(x, index.flip(0)),
        lambda: aggr.LSTMAggregation(F, F)(x, index.flip(0)),
        lambda: aggr.MedianAggregation()(x, index, dim_size=3),
    ]

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call().shape
        except Exception as error:
            return type(error), str(error)

    expected = [outcome(call) for call in wrong]
    with pyg_accel.patched():
        assert [outcome(call) for call in wrong] == expected
    assert any(isinstance(result, tuple) for result in expected)


def test_sort_aggregation_is_pygs_by_itself_and_in_a_layer():
    settings.always = True
    x, index = torch.randn(N, F), groups()
    pool, layer = aggr.SortAggregation(7), pyg.SAGEConv(F, 3, aggr="sort", aggr_kwargs={"k": 1})
    edge_index = utils.sort_edge_index(torch.randint(N, (2, 300)), sort_by_row=False)

    def both() -> list[Tensor]:
        return [pool(x, index, dim_size=G + 2), layer(x, edge_index)]

    expected = both()
    with pyg_accel.patched():
        for _ in range(3):
            assert_equal(both(), expected)


@pytest.mark.parametrize("patch", ["everything", "model"])
def test_a_layer_finds_the_groups_of_its_graph_again(patch, monkeypatch):
    settings.always = True
    calls: list[str] = []
    original = Graph._from_coo

    def counted(*args: Any) -> Graph:
        calls.append("_from_coo")
        return original(*args)

    monkeypatch.setattr(Graph, "_from_coo", counted)
    layer = pyg.SAGEConv(F, 3, aggr="median")
    x = torch.randn(50, F, requires_grad=True)
    edge_index = utils.sort_edge_index(torch.randint(50, (2, 300)), sort_by_row=False)

    def both() -> list[Tensor]:
        out = layer(x, edge_index)
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]

    expected = both()
    with pyg_accel.patched(layer if patch == "model" else None):
        for _ in range(3):
            assert_equal(both(), expected)
        edge_index[0] = edge_index[0].flip(0)  # another graph, in the same memory
        found = both()
    assert_equal(found, both())
    assert calls == ["_from_coo"] * 2


@pytest.mark.parametrize("name", ["median"])
def test_compiled_and_transformed_calls_are_what_they_are_in_stock(name):
    settings.always = True
    x, index = torch.randn(N, F), groups()
    expected = AGGREGATIONS[name](x, index)
    with pyg_accel.patched():
        compiled = torch.compile(lambda t: AGGREGATIONS[name](t, index), backend="eager")
        torch.testing.assert_close(compiled(x), expected)
        found, _ = torch.func.vjp(lambda t: AGGREGATIONS[name](t, index), x)
        torch.testing.assert_close(found, expected)


def test_large_calls_are_taken_at_default_settings_and_small_ones_are_not(report_of):
    x = torch.randn(3000, 20, requires_grad=True)
    index = groups(3000)
    median = AGGREGATIONS["median"]
    expected = run(median, x, index)
    with pyg_accel.patched():
        assert_equal(run(median, x, index), expected)
        median(x.detach()[:200], index[:200])
        assert {(row.layer, row.formula, row.calls) for row in report_of()} == {
            ("MedianAggregation", "the sorted numbers of each group", 1)
        }


def test_a_layer_takes_medians_at_default_settings(report_of):
    layer = pyg.SAGEConv(20, 3, aggr=["mean", "median"])
    alone = pyg.SAGEConv(20, 3, aggr="median")
    x, edge_index = torch.randn(4000, 20, requires_grad=True), torch.randint(4000, (2, 100_000))

    def both() -> list[Tensor]:
        outs = [layer(x, edge_index), alone(x, edge_index)]
        return [*outs, *torch.autograd.grad(outs[0].sin().sum() + outs[1].sin().sum(), x)]

    expected = both()
    with pyg_accel.patched():
        for one, other in zip(both(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert {(row.formula, row.backend) for row in report_of()} == {
        ("sum_j u0; quantile_j u0", "cpu+torch"), ("quantile_j u0", "torch")
    }  # fmt: skip


def test_no_message_is_made_for_a_median(monkeypatch, largest_result):
    settings.always = True
    layer, x = pyg.SAGEConv(64, 3, aggr="median"), torch.randn(30, 64)
    edge_index = torch.randint(30, (2, 5000))
    with largest_result() as stock:
        layer(x, edge_index)
    assert stock.numbers >= 5000 * 64
    monkeypatch.setattr(ordered_groups, "_NUMBERS", 5000 * 8)
    with pyg_accel.patched(), largest_result() as ours:
        layer(x, edge_index)
    assert 0 < ours.numbers < 5000 * 64 // 2


def test_hooks_and_methods_of_an_aggregation_are_called(report_of):
    settings.always = True
    layer, x = pyg.SAGEConv(F, 3, aggr="median"), torch.randn(50, F)
    edge_index = torch.randint(50, (2, 300))
    seen = []
    layer.aggr_module.register_forward_hook(lambda *args: seen.append(args[-1]))
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edge_index), expected)
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
    assert not any(row.formula == "quantile_j u0" for row in report_of())
