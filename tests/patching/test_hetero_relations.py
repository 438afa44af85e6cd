"""Layers over a hundred edge types: stacked where they are of one shape, and equal to stock."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_accel
from pyg_accel.runtime.machine import as_captured
from pyg_accel.settings import settings

RELATIONS, NODES, EDGES, WIDTH = 100, 60, 2000, 8


pytestmark = pytest.mark.usefixtures("always")


def typed_graph(types: int = 5) -> tuple[dict[str, Any], dict[tuple[str, str, str], Any]]:
    """A hundred edge types between five node types."""
    torch.manual_seed(1)
    names = [f"type{i}" for i in range(types)]
    x = {
        name: torch.randn(20 + 7 * i, WIDTH, dtype=torch.float64, requires_grad=True)
        for i, name in enumerate(names)
    }
    edges = {}
    for relation in range(RELATIONS):
        source, target = names[relation % types], names[relation // types % types]
        count = 0 if relation % 17 == 3 else 1 + relation
        ends = [torch.randint(x[name].size(0), (count,)) for name in (source, target)]
        edges[source, f"to{relation}", target] = torch.stack(ends)
    return x, edges


@pytest.mark.one_of(2)
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_a_layer_an_edge_type_equals_stock(same_as_stock, aggr):
    x, edges = few(typed_graph())

    def layer(relation: int) -> torch.nn.Module:
        if relation % 2:
            return pyg.SAGEConv((WIDTH, WIDTH), 4)
        return pyg.GATConv((WIDTH, WIDTH), 4, add_self_loops=False)

    torch.manual_seed(2)
    layers = {edge_type: layer(i) for i, edge_type in enumerate(edges)}
    same_as_stock(pyg.HeteroConv(layers, aggr=aggr).double(), x, edges)


def hetero(edges: dict[Any, torch.Tensor], make: Any, **options: Any) -> pyg.HeteroConv:
    torch.manual_seed(2)
    return pyg.HeteroConv({edge_type: make() for edge_type in edges}, **options).double()


ALIKE = {
    "SAGE": lambda: pyg.SAGEConv(WIDTH, 4),
    "SAGE-max": lambda: pyg.SAGEConv((WIDTH, WIDTH), 4, aggr="max"),
    "SAGE-bare": lambda: pyg.SAGEConv(WIDTH, 4, root_weight=False, bias=False),
    "GraphConv": lambda: pyg.GraphConv(WIDTH, 4),
}


@pytest.mark.each
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ALIKE)
def test_layers_of_one_shape_for_a_hundred_edge_types_are_one_call(
    same_as_stock, report_of, name, aggr
):
    x, edges = typed_graph()
    same_as_stock(hetero(edges, ALIKE[name], aggr=aggr), x, edges)
    (row,) = report_of()
    assert (row.layer, row.calls) == ("HeteroConv", 1)
    assert row.formula.endswith(f"_j u0, {RELATIONS} relations")


def test_the_graphs_of_a_capture_are_stacked_if_they_are_known(report_of):
    """Stacking waits for the device, which no CUDA graph can; PyG's loop does not."""
    x, edges = typed_graph()
    layer = hetero(edges, ALIKE["SAGE"])
    expected = layer(x, edges)
    with pyg_accel.patched():
        with as_captured():
            layer(x, edges)
        assert not [row for row in report_of() if row.layer == "HeteroConv"]
        layer(x, edges)
        with as_captured():
            actual = layer(x, edges)
    assert [row.calls for row in report_of() if row.layer == "HeteroConv"] == [2]
    for name, out in expected.items():
        torch.testing.assert_close(actual[name], out)


def few(typed: tuple[Any, Any], relations: int = 18) -> tuple[Any, Any]:
    """The first relations of five types; that of number 3 has no edges."""
    x, edges = typed
    edges = dict(list(edges.items())[:relations])
    named = {name for key in edges for name in (key[0], key[-1])}
    return {name: t for name, t in x.items() if name in named}, edges


def shared() -> Callable[[], torch.nn.Module]:
    conv = ALIKE["SAGE"]()
    return lambda: conv


def with_other_aggregations(kind: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        conv = kind(WIDTH, 4, aggr="mean")
        conv.aggr_module = pyg.aggr.SumAggregation()
        return conv

    return make


def without(edges: Any, type_: str) -> Any:
    return {key: ei[:, :0] if type_ in ("", *key) else ei for key, ei in edges.items()}


# What is one call: how relations are reduced, the layers, and the edges.
STACKED: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    **{f"reduced by {aggr}": (aggr, lambda: ALIKE["SAGE"], dict)
       for aggr in ("sum", "mean", "max", "min", "prod", "cat", None)},
    "one layer for several relations": ("sum", shared, dict),
    **{f"aggregations that {kind.__name__} has": (
        "sum", lambda kind=kind: with_other_aggregations(kind), dict)
       for kind in (pyg.SAGEConv, pyg.GraphConv)},
    "no edges": ("sum", lambda: ALIKE["SAGE"], lambda edges: without(edges, "")),
    "no nodes": ("sum", lambda: ALIKE["SAGE"], lambda edges: without(edges, "type1")),
    "types without edges": ("sum", lambda: ALIKE["SAGE"], lambda edges: {
        key: edges[key] for number, key in enumerate(edges) if number % 3}),
}  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", STACKED)
def test_stacked_relations_equal_stock(same_as_stock, report_of, name):
    aggr, make, change = STACKED[name]
    x, edges = few(typed_graph())
    if name == "no nodes":
        x["type1"] = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = change(edges)
    same_as_stock(hetero(edges, make(), aggr=aggr), x, inputs)
    (row,) = report_of()
    reduce = "sum" if "aggregations" in name else "mean"
    assert (row.layer, row.formula) == ("HeteroConv", f"{reduce}_j u0, {len(inputs)} relations")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", [pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv])
def test_attention_is_a_call_of_each_layer(same_as_stock, report_of, kind):
    x, edges = few(typed_graph(), 6)
    options = {} if kind is pyg.TransformerConv else {"add_self_loops": False}
    same_as_stock(hetero(edges, lambda: kind(WIDTH, 3, heads=2, **options)), x, edges)
    assert {row.layer for row in report_of() if row.formula} == {kind.__name__}
    assert sum(row.calls for row in report_of()) == len(edges)


def changed(edges: Any, change: Callable[[Any], Any]) -> pyg.HeteroConv:
    layer = hetero(edges, ALIKE["SAGE"])
    change(layer)
    return layer


def first(layer: pyg.HeteroConv) -> Any:
    return next(iter(layer.convs.values()))


def own_forward(layer: pyg.HeteroConv) -> None:
    conv = first(layer)
    conv.forward = lambda *args, forward=conv.forward: 2 * forward(*args)


def own_step(layer: pyg.HeteroConv) -> None:
    conv = first(layer)
    conv.edge_update = lambda *args, step=conv.edge_update, **inputs: 2 * step(*args, **inputs)


def new_roots(layer: pyg.HeteroConv) -> None:
    for conv in layer.convs.values():
        conv.lin_r = pyg.Linear(WIDTH, 4).double()


def of_widths(edges: Any) -> pyg.HeteroConv:
    widths = iter([5] + [4] * len(edges))
    return hetero(edges, lambda: pyg.SAGEConv(WIDTH, next(widths)), aggr="cat")


UNLIKE: dict[str, Callable[[Any], pyg.HeteroConv]] = {
    "a normalised result": lambda edges: (lambda conv: hetero(edges, lambda: conv))(
        pyg.SAGEConv(WIDTH, 4, normalize=True)
    ),
    "a step for an edge": lambda edges: changed(edges, own_step),
    "projected": lambda edges: hetero(edges, lambda: pyg.SAGEConv(WIDTH, 4, project=True)),
    "hooks": lambda edges: changed(
        edges, lambda layer: first(layer).lin_l.register_forward_hook(lambda *_: None)
    ),
    "hooks of an aggregation": lambda edges: changed(
        edges, lambda layer: first(layer).aggr_module.register_forward_hook(lambda *a: 2 * a[-1])
    ),
    "a forward of its own": lambda edges: changed(edges, own_forward),
    "a bias of the root": lambda edges: changed(edges, new_roots),
    "several aggregations": lambda edges: hetero(
        edges, lambda: pyg.SAGEConv(WIDTH, 4, aggr=["max", "mean"])
    ),
    "widths": of_widths,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", UNLIKE)
def test_layers_that_cannot_be_stacked_are_calls_of_their_own(same_as_stock, report_of, name):
    x, edges = few(typed_graph(), 6)
    same_as_stock(UNLIKE[name](edges), x, edges)
    assert "HeteroConv" not in {row.layer for row in report_of()}


def test_features_by_relation_are_those_of_its_layer(same_as_stock, report_of):
    x, edges = few(typed_graph())
    key = next(iter(edges))
    same_as_stock(hetero(edges, ALIKE["SAGE"]), {**x, key: 2 * x[key[0]].detach()}, edges)
    assert "HeteroConv" not in {row.layer for row in report_of()}


def test_autocast_is_left_to_the_layers(report_of):
    x, edges = few(typed_graph())
    layer, x = hetero(edges, ALIKE["SAGE"]).float(), {name: t.float() for name, t in x.items()}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = layer(x, edges)
        with pyg_accel.patched():
            actual = layer(x, edges)
    for name, out in expected.items():
        torch.testing.assert_close(actual[name], out, rtol=0.05, atol=0.05)
    assert "HeteroConv" not in {row.layer for row in report_of()}


def with_ids(edges: Any, change: Callable[[Any, Any], Any]) -> Any:
    """With other ids in the first relation that has some edges."""
    key = next(key for key in edges if edges[key].size(1) > 3)
    return edges | {key: change(edges[key].clone(), key)}


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("bad", [-1, 1000])
def test_ids_out_of_range_raise_what_stock_raises(end, bad, raises_as_stock):
    x, edges = typed_graph()

    def wrong(edge_index: Any, key: Any) -> Any:
        edge_index[end, 3] = bad
        return edge_index

    raises_as_stock(hetero(edges, ALIKE["SAGE"]), x, with_ids(edges, wrong))


def test_ids_of_another_type_are_refused_when_relations_are_stacked():
    x, edges = typed_graph()
    edges = with_ids(edges, lambda edge_index, key: edge_index + x[key[0]].size(0))
    with pyg_accel.patched(), pytest.raises((IndexError, RuntimeError, ValueError)):
        hetero(edges, ALIKE["SAGE"])(x, edges)


def test_a_compiled_model_has_a_call_for_each_relation():
    x, edges = typed_graph()
    few = dict(list(edges.items())[:3])
    layer = hetero(few, ALIKE["SAGE"])
    right = layer(x, few)
    with pyg_accel.patched():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for name, out in compiled(x, few).items():
            torch.testing.assert_close(out, right[name])


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_what_nobody_reads_has_no_gradients(aggr):
    x, edges = typed_graph()
    edges = {key: ei for key, ei in edges.items() if (key[0], key[2]) != ("type0", "type3")}
    layer = hetero(edges, ALIKE["SAGE"], aggr=aggr)

    def has_gradients() -> dict[str, bool]:
        everything = dict(layer.named_parameters()) | x
        for tensor in everything.values():
            tensor.grad = None
        layer(x, edges)["type3"].sum().backward()
        return {name: tensor.grad is not None for name, tensor in everything.items()}

    right = has_gradients()
    assert right["type1"] and not right["type0"]
    with pyg_accel.patched():
        assert has_gradients() == right


@pytest.mark.parametrize(("edges_each", "stacked"), [(40_000, True), (20, False)])
def test_a_few_relations_are_stacked_where_they_are_large_together(report_of, edges_each, stacked):
    settings.always = False
    x = {"a": torch.randn(300, WIDTH), "b": torch.randn(200, WIDTH)}
    ends = {"a": 300, "b": 200}
    keys = [("a", "to", "b"), ("b", "of", "b")]
    edges = {
        key: torch.stack([torch.randint(ends[name], (edges_each,)) for name in (key[0], key[2])])
        for key in keys
    }
    layer = hetero(edges, ALIKE["SAGE"]).float()
    right = layer(x, edges)
    with pyg_accel.patched():
        for _ in range(3):  # graphs that may be new ones, at first
            ours = layer(x, edges)
    for name in right:
        torch.testing.assert_close(ours[name], right[name], rtol=1e-4, atol=1e-4)
    assert ("HeteroConv" in {row.layer for row in report_of()}) == stacked


def test_lazy_layers_find_their_sizes_first(same_as_stock):
    x, edges = typed_graph()
    layer = hetero(edges, lambda: pyg.SAGEConv((-1, -1), 4))
    with pyg_accel.patched():
        layer(x, edges)
    same_as_stock(layer, x, edges)


def test_a_transformer_over_a_hundred_edge_types_equals_stock(same_as_stock):
    x, edges = typed_graph()
    layer = pyg.HGTConv(WIDTH, WIDTH, (list(x), list(edges)), heads=2)
    same_as_stock(layer.double(), x, edges)
