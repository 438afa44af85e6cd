"""What stock refuses is refused under ``patch()`` too, by the same type of exception."""

from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 12, 40, 4
LAYERS = {
    "sage": lambda: SAGEConv(F, 3),
    "sage-max": lambda: SAGEConv(F, 3, aggr="max"),
    "graph": lambda: GraphConv(F, 3),
    "gcn": lambda: GCNConv(F, 3),
    "gat": lambda: GATConv(F, 3, heads=2),
}


def good() -> tuple[Any, Any]:
    return torch.randn(N, F), torch.randint(0, N, (2, E))


def with_id(value: int, row: int) -> tuple[Any, Any]:
    x, edges = good()
    edges[row, 3] = value
    return x, edges


BAD = {
    "source-too-large": lambda: with_id(N, 0),
    "target-too-large": lambda: with_id(N, 1),
    "far-too-large": lambda: with_id(2**40, 0),
    "negative-source": lambda: with_id(-1, 0),
    "negative-target": lambda: with_id(-1, 1),
    "float-edge-index": lambda: (good()[0], good()[1].float()),
    "bool-edge-index": lambda: (good()[0], good()[1].bool()),
    "three-rows": lambda: (good()[0], torch.zeros(3, E, dtype=torch.long)),
    "one-dimensional": lambda: (good()[0], torch.zeros(E, dtype=torch.long)),
    "three-dimensional": lambda: (good()[0], torch.zeros(2, E, 1, dtype=torch.long)),
    "list-edge-index": lambda: (good()[0], good()[1].tolist()),
    "no-edge-index": lambda: (good()[0], None),
    "number-edge-index": lambda: (good()[0], 3),
    "wrong-width": lambda: (torch.randn(N, F + 1), good()[1]),
    "one-dimensional-x": lambda: (torch.randn(N), good()[1]),
    "list-x": lambda: (good()[0].tolist(), good()[1]),
    "integer-x": lambda: (torch.ones(N, F).long(), good()[1]),
    "mismatched-dtype": lambda: (good()[0].double(), good()[1]),
    "too-few-nodes": lambda: (torch.randn(3, F), good()[1]),
}


def outcome(layer: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return layer(*args, **kwargs)
    except Exception as error:
        return type(error)


def assert_same_outcome(layer: Any, *args: Any, **kwargs: Any) -> None:
    expected = outcome(layer, *args, **kwargs)
    with pyg_accel.patched():
        actual = outcome(layer, *args, **kwargs)
    if isinstance(expected, type):
        assert actual is expected
    else:
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", LAYERS)
def test_bad_input_ends_as_in_stock(name, case):
    assert_same_outcome(LAYERS[name](), *BAD[case]())


@pytest.mark.parametrize("case", ["source-too-large", "negative-target", "wrong-width"])
def test_some_of_these_are_refused_at_all(case):
    with pytest.raises((IndexError, RuntimeError)):
        SAGEConv(F, 3)(*BAD[case]())


@pytest.mark.parametrize(
    "weight",
    [
        torch.rand(E + 1),
        torch.rand(E - 1),
        torch.rand(E, 1),
        torch.rand(E, 2),
        torch.rand(1),
        torch.rand(()),
        torch.rand(N),
        torch.ones(E).long(),
        "text",
        2.0,
    ],
    ids=[
        "one-more",
        "one-less",
        "a-column",
        "two-columns",
        "one",
        "a-number",
        "as-nodes",
        "integers",
        "text",
        "float",
    ],
)
@pytest.mark.parametrize("name", ["graph", "gcn"])
def test_edge_weights_of_odd_shapes_end_as_in_stock(name, weight):
    assert_same_outcome(LAYERS[name](), *good(), weight)


@pytest.mark.parametrize(
    "size", [(N, N), (N + 1, N), (N, N + 1), (N, None), (None, N), (5, 5), (N,), "ab"], ids=str
)
@pytest.mark.parametrize("name", ["sage", "sage-max", "graph"])
def test_sizes_that_do_not_fit_end_as_in_stock(name, size):
    assert_same_outcome(LAYERS[name](), *good(), size=size)


def test_bipartite_features_that_do_not_fit_end_as_in_stock():
    layer, edges = SAGEConv((F, F), 3), torch.randint(0, 6, (2, E))
    for rows in ((6, 6), (6, 9), (9, 6), (6, 3), (3, 6), (6, None)):
        x = tuple(None if n is None else torch.randn(n, F) for n in rows)
        assert_same_outcome(layer, x, edges)
        assert_same_outcome(layer, x, edges, size=(6, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_nan_and_infinite_features_spread_as_in_stock(name, value):
    x, edges = good()
    x[2, 1] = value
    assert_same_outcome(LAYERS[name](), x, edges)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0], ids=str)
@pytest.mark.parametrize("name", ["graph", "gcn"])
def test_nan_and_infinite_weights_spread_as_in_stock(name, value):
    weight = torch.rand(E)
    weight[5] = value
    assert_same_outcome(LAYERS[name](), *good(), weight)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min", "mul", "std"])
def test_zero_weights_of_infinite_features_give_nan_as_in_stock(aggr):
    x, edges = good()
    x[0, 0] = float("inf")
    weight = torch.rand(E)
    weight[edges[0] == 0] = 0.0
    assert_same_outcome(GraphConv(F, 3, aggr=aggr), x, edges, weight)


def test_a_bad_call_does_not_spoil_the_next_one():
    layer, (x, edges) = SAGEConv(F, 3), good()
    expected = layer(x, edges)
    with pyg_accel.patched():
        for case in ("source-too-large", "wrong-width", "three-rows"):
            with pytest.raises((IndexError, RuntimeError, ValueError)):
                layer(*BAD[case]())
        torch.testing.assert_close(layer(x, edges), expected)
