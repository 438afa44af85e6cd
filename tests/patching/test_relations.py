"""Layers over many relations: a hundred, of very different sizes, some of them empty."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.errors import VerificationError
from pyg_accel.patching import hetero as relations_of_types
from pyg_accel.patching import relations
from pyg_accel.runtime.machine import as_captured
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
@pytest.mark.parametrize("kind", [pyg.RGCNConv, pyg.FastRGCNConv, pyg.RGATConv])
@options_of_matrices
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_layers_with_a_matrix_a_relation_equal_stock(
    same_as_stock, homogeneous, kind, options, aggr
):
    if kind is pyg.RGATConv and aggr != "add":
        pytest.skip("attention is a sum")
    if kind is pyg.FastRGCNConv and aggr == "max":
        pytest.skip("PyG has no maximum there")
    layer = kind(
        WIDTH, WIDTH, RELATIONS, **options, **({} if kind is pyg.RGATConv else {"aggr": aggr})
    )
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
            found = layer(x, edges)
    assert [row.calls for row in report_of() if row.layer == "HeteroConv"] == [2]
    for name, out in expected.items():
        torch.testing.assert_close(found[name], out)


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
    given = change(edges)
    same_as_stock(hetero(edges, make(), aggr=aggr), x, given)
    (row,) = report_of()
    reduce = "sum" if "aggregations" in name else "mean"
    assert (row.layer, row.formula) == ("HeteroConv", f"{reduce}_j u0, {len(given)} relations")


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
    conv.edge_update = lambda *args, step=conv.edge_update, **given: 2 * step(*args, **given)


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
            found = layer(x, edges)
    for name, out in expected.items():
        torch.testing.assert_close(found[name], out, rtol=0.05, atol=0.05)
    assert "HeteroConv" not in {row.layer for row in report_of()}


def raises_as_stock(layer: torch.nn.Module, *args: Any) -> None:
    with pytest.raises((ValueError, RuntimeError, IndexError)) as stock:
        layer(*args)
    with pyg_accel.patched(), pytest.raises(stock.type):
        layer(*args)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("bad", [-1, 1000])
def test_ids_out_of_range_raise_what_stock_raises(end, bad, homogeneous):
    x, edge_index, edge_type = homogeneous
    xs, edges = typed_graph()
    wrong = edge_index.clone()
    wrong[end, 3] = bad
    key = next(key for key in edges if edges[key].size(1) > 3)
    edges[key] = edges[key].clone()
    edges[key][end, 3] = bad
    raises_as_stock(pyg.RGCNConv(WIDTH, 4, RELATIONS).double(), x, wrong, edge_type)
    raises_as_stock(hetero(edges, ALIKE["SAGE"]), xs, edges)


def test_relations_that_are_bytes_raise_what_stock_raises(homogeneous):
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


def test_ids_of_another_type_are_refused_when_relations_are_stacked():
    x, edges = typed_graph()
    key = next(key for key in edges if edges[key].size(1) > 3)
    edges[key] = edges[key] + x[key[0]].size(0)
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


def test_stacked_layers_are_verified_when_asked(monkeypatch):
    x, edges = few(typed_graph())
    settings.verify = True
    layer = hetero(edges, ALIKE["SAGE"])
    with pyg_accel.patched():
        layer(x, edges)
        wrong = relations_of_types.relational_spmm
        monkeypatch.setattr(
            relations_of_types, "relational_spmm", lambda *a, **k: wrong(*a, **k) + 1
        )
        with pytest.raises(VerificationError):
            layer(x, edges)


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
    "the other flow": ({"flow": "target_to_source"}, lambda *given: given),
    "no edge": ({}, lambda x, edges, types: (x, edges[:, :0], types[:0])),
    "one edge": ({}, lambda x, edges, types: (x, edges[:, :1], types[:1])),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_relations_of_other_graphs_equal_stock(same_as_stock, homogeneous, report_of, name):
    options, given = GRAPHS[name]
    layer = pyg.RGCNConv(**{"in_channels": WIDTH} | options, out_channels=4,
                         num_relations=RELATIONS)  # fmt: skip
    same_as_stock(layer.double(), *given(*homogeneous))
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
    for layer, given in (
        (Twice(WIDTH, 4, RELATIONS), x),
        (pyg.RGCNConv(NODES, 4, RELATIONS), None),
    ):
        pyg_accel.reset_report()
        same_as_stock(layer.double(), given, edge_index, edge_type)
        assert not any("relations" in row.formula for row in report_of())


@pytest.mark.parametrize("what", ["hook", "message"])
def test_whoever_waits_for_calls_of_each_relation_gets_them(same_as_stock, homogeneous, what):
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS).double()
    if what == "hook":
        layer.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        layer.message = lambda x_j, edge_type_ptr: 2 * x_j
    same_as_stock(layer, *homogeneous)


def test_verification_covers_relations(homogeneous, monkeypatch):
    layer = pyg.RGCNConv(WIDTH, 4, RELATIONS).double()
    settings.verify = True
    with pyg_accel.patched():
        copy.deepcopy(layer)(*homogeneous)
        pyg_accel.unpatch()  # the program of the class has the function
        pyg_accel.patch()
        monkeypatch.setattr(relations, "relational_spmm", lambda *_, **__: torch.ones(NODES, 4))
        with pytest.raises(VerificationError, match="RGCNConv"):
            layer(*homogeneous)


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
