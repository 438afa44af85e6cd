"""``torch.compile`` of patched models: whole graphs, few of them, and the numbers of stock."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.models import GAT, GraphSAGE

import pyg_accel
from pyg_accel.patching import dynamo_guards as reading
from pyg_accel.settings import settings
from tests.patching.compiling import MODELS, F, batches, graph, quick, results
from tests.user_layers import Layer, says, written

pytestmark = [pytest.mark.usefixtures("always"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", quick(MODELS, "sage-max"))
def test_a_compiled_model_is_accelerated_whole_and_equals_stock(name, report_of):
    model = MODELS[name]()
    given = batches()
    expected = [results(model, model, *batch) for batch in given]
    counter = CompileCounterWithBackend("aot_eager")
    with pyg_accel.patched():
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for batch, right in zip(given, expected, strict=True):
            torch.testing.assert_close(
                results(compiled, model, *batch), right, rtol=1e-4, atol=1e-5
            )
    assert counter.frame_count <= 2
    rows = report_of()
    assert {row.backend for row in rows} == {"torch.compile"}
    assert all(row.formula for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
def test_fifty_sizes_of_batches_take_two_compilations_at_most(name):
    model, counter = MODELS[name](), CompileCounterWithBackend("aot_eager")
    with pyg_accel.patched():
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for i in range(50):
            nodes = 5 + (37 * i) % 101
            x, edges = torch.randn(nodes, F), torch.randint(0, nodes, (2, nodes * (2 + i % 7)))
            torch.testing.assert_close(compiled(x, edges), model(x, edges), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_the_settings_of_the_compiler_are_left_alone():
    before = torch._dynamo.config.save_config(), torch._inductor.config.save_config()
    with pyg_accel.patched():
        assert (torch._dynamo.config.save_config(), torch._inductor.config.save_config()) == before


def test_the_compiled_graph_holds_no_messages():
    model, seen = GraphSAGE(F, 8, 2), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def note(inner: Any, _: Any) -> Any:
            seen.append({str(node.target) for node in inner.graph.nodes})
            return inner.forward

        return aot_autograd(fw_compiler=note)(graph, inputs)

    with pyg_accel.patched():
        x, edges = graph()
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(x, edges)
    assert seen
    assert "pyg_accel.gspmm.default" in seen[0]
    assert not any("index_select" in name or "scatter" in name for name in seen[0])


def test_a_compiled_model_sorts_a_graph_once(built, stored_graphs):
    model, (x, edges) = GraphSAGE(F, 8, 2), graph()
    with pyg_accel.patched():
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(x, edges).sum().backward()
        assert len(built) == 1
        del edges
        assert stored_graphs() == 0


def scaled(self: Any, x_j: Tensor, x_i: Tensor) -> Tensor:
    self.kept = x_j - x_i
    return self.scale * self.kept if self.training else self.kept


def prepared(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    self.scale, self.factor = 7, x.exp().mean()
    return self.propagate(edge_index, x=x)


# Layers whose message reads their attributes, and what these are changed to.
READ: dict[str, tuple[Callable[[], Any], list[dict[str, Any]]]] = {
    "plain attributes": (
        says(scaled, scale=2, kept=None),
        [{}, {"scale": 5}, {"training": False}, {"training": True, "scale": 3}]),
    "numbers that are no integers of the layer": (
        says(lambda self, x_j, x_i: self.options.power * (x_j - x_i) * self.slope,
             options=SimpleNamespace(power=2), slope=0.5),
        [{"slope": a, "options": SimpleNamespace(power=b)}
         for a, b in ((0.5, 2), (0.7, 2), (0.9, 3), (0.5, 5))]),
    "what forward has put aside": (
        written(message=lambda self, x_j, x_i: self.scale * (x_j - x_i) * self.factor,
                forward=prepared), [{"scale": 1}, {"scale": 1}]),
    "a tensor that is no state of the layer": (
        says(lambda self, x_j, x_i: (x_j - x_i) * self.factor),
        [{"factor": torch.tensor(value)} for value in (3.0, 4.0)]),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, *quick([True, False])])
@pytest.mark.parametrize("name", READ)
def test_what_a_message_reads_from_its_layer_is_guarded(name, dynamic):
    make, changes = READ[name]
    layer = make()
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for change in changes:
            for attribute, value in change.items():
                setattr(layer, attribute, value)
            x, edges = graph()
            actual, kept = compiled(x, edges), getattr(layer, "kept", None)
            torch.testing.assert_close(actual, layer(x, edges))
            torch.testing.assert_close(kept, getattr(layer, "kept", None))


@pytest.mark.full
def test_each_layer_of_a_class_computes_with_its_own_state():
    first, second = pyg.SAGEConv(F, F), pyg.SAGEConv(F, F, aggr="max")
    x, edges = graph()
    expected = [layer(x, edges) for layer in (first, second)]
    with pyg_accel.patched():
        for layer, right in zip((first, second), expected, strict=True):
            layer.compile(backend="aot_eager")
            torch.testing.assert_close(layer(x, edges), right)


def test_unpatch_reaches_compiled_models(report_of):
    model, (x, edges) = GraphSAGE(F, 8, 2), graph()
    expected, compiled = model(x, edges), torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edges), expected)
    assert report_of() == []
    with pyg_accel.patched(model):
        torch.testing.assert_close(compiled(x, edges), expected)
        assert {row.backend for row in report_of()} == {"torch.compile"}
    torch.testing.assert_close(compiled(x, edges), expected)


def noted(self: Any, x_j: Tensor, x_i: Tensor) -> Tensor:
    self.seen.append(1)
    return x_j - x_i


LEFT: dict[str, tuple[int, Callable[[], Any], str]] = {
    "no formula": (
        40, says(lambda self, x_j, x_i: (x_j - x_i).sin()), "'sin' on messages of [E, 40]"),
    "an object that a message changes": (
        F, lambda: says(noted, seen=[])(), "a message that changes objects"),
    "statistics that a message changes": (
        F, lambda: pyg.EdgeConv(torch.nn.Sequential(
            torch.nn.Linear(2 * F, 4), torch.nn.BatchNorm1d(4))),
        "a message that changes its layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(LEFT, "no formula", "an object that a message changes"))
def test_what_is_compiled_as_in_stock_has_a_reason(name, report_of):
    """What a message changes is changed once a call."""
    width, make, reason = LEFT[name]
    layer, (x, edges) = make(), graph(width)
    stock = copy.deepcopy(layer)
    right = torch.compile(stock, backend="aot_eager", fullgraph=True)
    expected = [right(x, edges).detach() for _ in range(3)]
    torch._dynamo.reset()
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for calls in range(3):
            torch.testing.assert_close(compiled(x, edges).detach(), expected[calls])
            assert len(getattr(layer, "seen", [1] * (calls + 1))) == calls + 1
    torch.testing.assert_close(dict(layer.named_buffers()), dict(stock.named_buffers()))
    assert {row.reason for row in report_of()} == {f"torch.compile: {reason}"}


def test_small_graphs_are_left_to_pyg_with_the_reason(report_of):
    layer, x = pyg.SAGEConv(F, 4), torch.randn(20, F)
    edges = torch.randint(0, 20, (2, 60))
    settings.always = False
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))
    reasons = {row.reason for row in report_of() if row.reason.startswith("torch.compile")}
    (reason,) = reasons
    assert reason.startswith("torch.compile: small: fewer than")


@pytest.mark.full
def test_a_graph_break_of_pyg_makes_dynamo_read_nothing_of_ours():
    settings.always = False  # a small graph: PyG's own masks break its graph
    counters = torch._dynamo.utils.counters["graph_break"]
    counters.clear()
    model = GAT(F, 8, 2, heads=2)
    with pyg_accel.patched():
        compiled = torch.compile(model, backend="eager", dynamic=True)
        for x, edges in batches():
            compiled(x, edges).sum().backward()
    assert counters  # there was a break to begin with
    assert not [reason for reason in counters if "saved_tensors" in reason]


@pytest.mark.full
def test_a_sparse_matrix_gives_the_results_of_stock(report_of):
    layer, x, adj = pyg.SAGEConv(F, 4), torch.randn(20, F), torch.eye(20).to_sparse_csr()
    expected = layer(x, adj)
    with pyg_accel.patched():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x, adj), expected)
    assert report_of()


@pytest.mark.full
def test_dropout_in_a_message_is_compiled_and_so_is_its_gradient():
    layer = pyg.GATConv(F, 4, heads=2, dropout=0.5, add_self_loops=False)
    x, edges = graph()
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        first, second = compiled(x, edges), compiled(x, edges)
        assert not torch.equal(first, second)
        first.sum().backward()
        layer.eval()
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))


@pytest.mark.full
def test_an_exported_model_runs_without_us():
    layer, (x, edges) = pyg.SAGEConv(F, 4), graph()
    for strict in (True, False):
        with pyg_accel.patched():
            exported = torch.export.export(layer, (x, edges), strict=strict)
        assert not any("pyg_accel" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x, edges), layer(x, edges))


def test_the_default_backend_gives_the_results_of_stock():
    model, (x, edges) = GraphSAGE(F, 8, 2), graph()
    x.requires_grad_()
    expected = results(model, model, x, edges)
    with pyg_accel.patched():
        actual = results(torch.compile(model, fullgraph=True), model, x, edges)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


class Broken(Layer):
    """A layer whose call breaks the graph: what follows runs without a compiler."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (x_j - x_i).relu()


def test_a_trace_is_never_compiled(report_of):
    layer, (x, edges) = Broken(), graph()
    expected, counters = layer(x, edges), torch._dynamo.utils.counters
    counters.clear()
    with pyg_accel.patched():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x, edges), expected)
    assert not any("__torch_function__" in reason for reason in counters["graph_break"])
    assert any(row.formula for row in report_of())


@pytest.mark.parametrize(
    "kind", [pyg.GATConv, pytest.param(pyg.TransformerConv, marks=pytest.mark.full)]
)
def test_dropout_in_a_message_draws_the_numbers_of_stock(kind, report_of):
    layer = kind(F, 4, heads=2, dropout=0.5)
    x, edges = graph()

    def two_calls(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        return [run(x, edges) for _ in range(2)]

    expected = two_calls(layer)
    with pyg_accel.patched():
        actual = two_calls(torch.compile(layer, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert all(row.formula for row in report_of())


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_changed_probability_and_a_replaced_parameter_are_read_anew(dynamic):
    layer = pyg.GATConv(F, 4, heads=2, add_self_loops=False)
    x, edges = graph()

    def called(run: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(1)
        return run(x, edges)

    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for dropout in (0.0, 0.3, 0.6, 0.9, 0.0):
            layer.dropout = dropout
            layer.att_src = torch.nn.Parameter(torch.randn_like(layer.att_src))
            torch.testing.assert_close(called(compiled), called(layer), rtol=1e-4, atol=1e-5)


def test_a_hook_inside_of_a_message_is_called():
    layer = pyg.EdgeConv(torch.nn.Linear(2 * F, 4))
    layer.nn.register_forward_hook(lambda module, given, out: out.relu() + 1)
    x, edges = graph()
    expected = layer(x, edges)
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges), expected)


def test_objects_that_dynamo_finds_while_it_is_asked_for_others():
    """Variables of Dynamo are made when somebody looks at them."""

    class Effects:
        def __init__(self) -> None:
            self.id_to_variable = {0: SimpleNamespace(mutation_type=None)}
            self.store_attr_mutations: dict[object, object] = {}

        def is_modified(self, variable: object) -> bool:
            number = len(self.id_to_variable)
            self.id_to_variable[number] = SimpleNamespace(mutation_type=None)
            return True

    output = SimpleNamespace(side_effects=Effects())
    context: Any = SimpleNamespace(
        _i_will_not_complain_if_bc_breaks_InstructionTranslator=lambda: SimpleNamespace(
            output=output
        )
    )
    assert [*reading._changed(context)] == [0]


def twice() -> Any:
    """Has a part by two names."""
    one = torch.nn.Linear(F, F)
    return says(lambda self, x_i, x_j: self.one(x_j).relu() * self.two(x_i), one=one, two=one)()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "make", [lambda: pyg.GATv2Conv(F, 4, heads=2, share_weights=True), twice], ids=["gatv2", "own"]
)
def test_a_part_with_two_names_has_its_parameters_afterwards(make):
    layer, (x, edge_index) = make(), batches()[0]
    expected, held = layer(x, edge_index), [*layer.parameters()]
    with pyg_accel.patched():
        out = torch.compile(layer, backend="eager")(x, edge_index)
    torch.testing.assert_close(out, expected)
    assert all(now is then for now, then in zip(layer.parameters(), held, strict=True))


@pytest.mark.full
def test_a_layer_that_makes_its_parameters_is_pygs_in_its_first_call(report_of):
    layer, (x, edge_index) = pyg.SAGEConv(-1, 4), batches()[0]
    compiled = torch.compile(layer, backend="eager")
    with pyg_accel.patched():
        out = compiled(x, edge_index)
        reasons = [row.reason for row in report_of()]
    assert reasons == ["torch.compile: parameters whose shape this call will tell"]
    torch.testing.assert_close(out, layer(x, edge_index))


def test_a_matrix_of_every_edge_is_compiled_as_in_stock(report_of):
    """The backend runs the graph on tensors with data, the first pass had others."""
    layer = pyg.NNConv(F, 4, torch.nn.Linear(3, F * 4))
    x, edge_index = batches()[0]
    attr = torch.randn(edge_index.size(1), 3)
    compiled = torch.compile(layer, backend="eager")
    with pyg_accel.patched():
        out = compiled(x, edge_index, attr)
        (row,) = report_of()
    assert "a network on every edge" in row.reason
    torch.testing.assert_close(out, layer(x, edge_index, attr))


@pytest.mark.full
def test_where_pygs_path_breaks_the_graph_it_stays(report_of):
    layer, (x, edge_index) = pyg.SAGEConv(F, 4, aggr="lstm"), batches()[0]
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    compiled = torch.compile(layer, backend="eager")
    with pyg_accel.patched(), torch.no_grad():
        outs = [compiled(x, edge_index) for _ in range(2)]
        reasons = {row.reason for row in report_of()}
    assert "torch.compile: a graph break" in reasons
    for out in outs:
        torch.testing.assert_close(out, layer(x, edge_index))
