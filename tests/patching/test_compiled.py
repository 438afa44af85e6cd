"""``torch.compile`` of patched models: whole graphs, few of them, and the numbers of stock."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import pyg_accel
from pyg_accel.ops.csr import GRAPHS
from pyg_accel.settings import settings

pytestmark = [pytest.mark.usefixtures("always"), pytest.mark.slow]

F = 6


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Two(torch.nn.Module):
    def __init__(self, make: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(F, 8), make(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: GCN(F, 8, 2),
    "sage": lambda: GraphSAGE(F, 8, 2),
    "sage-max": lambda: GraphSAGE(F, 8, 2, aggr="max"),
    "gin": lambda: GIN(F, 8, 2),
    "gat": lambda: GAT(F, 8, 2, heads=2),
    "gatv2": lambda: Two(lambda i, o: pyg.GATv2Conv(i, o // 2, heads=2)),
    "transformer": lambda: Two(lambda i, o: pyg.TransformerConv(i, o // 2, heads=2)),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    found = []
    for nodes in (20, 30, 12, 40, 25):
        x = torch.randn(nodes, F, requires_grad=True)
        found.append((x, torch.randint(0, nodes, (2, 3 * nodes))))
    return found


def results(run: Callable[..., Tensor], model: torch.nn.Module, x: Tensor, edges: Tensor) -> Any:
    out = run(x, edges)
    return out, *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_fifty_sizes_of_batches_take_two_compilations_at_most(name):
    model, counter = MODELS[name](), CompileCounterWithBackend("aot_eager")
    with pyg_accel.patched():
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for i in range(50):
            nodes = 5 + (37 * i) % 101
            x, edges = torch.randn(nodes, F), torch.randint(0, nodes, (2, nodes * (2 + i % 7)))
            torch.testing.assert_close(compiled(x, edges), model(x, edges), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_the_compiler_is_set_as_before_once_patching_is_off():
    config = torch._dynamo.config
    before = config.capture_dynamic_output_shape_ops
    with pyg_accel.patched():
        assert config.capture_dynamic_output_shape_ops
    assert config.capture_dynamic_output_shape_ops == before


def test_the_compiled_graph_holds_no_messages():
    model, seen = GraphSAGE(F, 8, 2), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def note(inner: Any, _: Any) -> Any:
            seen.append({str(node.target) for node in inner.graph.nodes})
            return inner.forward

        return aot_autograd(fw_compiler=note)(graph, inputs)

    with pyg_accel.patched():
        x, edges = torch.randn(20, F), torch.randint(0, 20, (2, 60))
        with torch.no_grad():
            torch.compile(model, backend=backend, fullgraph=True)(x, edges)
    assert seen
    assert "pyg_accel.gspmm.default" in seen[0]
    assert not any("index_select" in name or "scatter" in name for name in seen[0])


def test_a_compiled_model_sorts_a_graph_once(monkeypatch):
    built = []
    right = pyg_accel.Graph._from_coo
    monkeypatch.setattr(
        pyg_accel.Graph, "_from_coo", lambda *args: (built.append(1), right(*args))[1]
    )
    model, x, edges = GraphSAGE(F, 8, 2), torch.randn(20, F), torch.randint(0, 20, (2, 60))
    with pyg_accel.patched():
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            compiled(x, edges).sum().backward()
        assert len(built) == 1
        del edges
        assert len(GRAPHS) == 0


class Scaled(pyg.MessagePassing):
    """A layer whose message depends on plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kept = 2, None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        self.kept = x_j - x_i
        return self.scale * self.kept if self.training else self.kept


def test_what_a_message_reads_from_its_layer_is_guarded():
    layer, x, edges = Scaled(), torch.randn(20, F), torch.randint(0, 20, (2, 60))
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for change in ({}, {"scale": 5}, {"training": False}, {"training": True, "scale": 3}):
            vars(layer).update(change)
            found, kept = compiled(x, edges), layer.kept
            torch.testing.assert_close(found, layer(x, edges))
            torch.testing.assert_close(kept, layer.kept)


def test_each_layer_of_a_class_computes_with_its_own_state():
    first, second = pyg.SAGEConv(F, F), pyg.SAGEConv(F, F, aggr="max")
    x, edges = torch.randn(20, F), torch.randint(0, 20, (2, 60))
    expected = [layer(x, edges) for layer in (first, second)]
    with pyg_accel.patched():
        for layer, right in zip((first, second), expected, strict=True):
            layer.compile(backend="aot_eager")
            torch.testing.assert_close(layer(x, edges), right)


def test_unpatch_reaches_compiled_models(report_of):
    model, x, edges = GraphSAGE(F, 8, 2), torch.randn(20, F), torch.randint(0, 20, (2, 60))
    expected, compiled = model(x, edges), torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(x, edges), expected)
    assert report_of() == []
    with pyg_accel.patched(model):
        torch.testing.assert_close(compiled(x, edges), expected)
        assert {row.backend for row in report_of()} == {"torch.compile"}
    torch.testing.assert_close(compiled(x, edges), expected)


def test_what_has_no_formula_is_compiled_as_in_stock_with_the_reason(report_of):
    class Sine(Scaled):
        def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
            return (x_j - x_i).sin()

    layer, x, edges = Sine(), torch.randn(20, 40), torch.randint(0, 20, (2, 60))
    expected = layer(x, edges)
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, edges), expected)
    (row,) = report_of()
    assert row.reason == "torch.compile: 'sin' on messages of [E, 40]"


def test_small_graphs_are_left_to_pyg_with_the_reason(report_of):
    layer, x = pyg.SAGEConv(F, 4), torch.randn(20, F)
    edges = torch.randint(0, 20, (2, 60))
    settings.always = False
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))
    assert {row.reason for row in report_of()} == {
        "small: fewer than 10000 edges",
        "torch.compile: small: fewer than 10000 edges",
    }


def test_a_sparse_matrix_gives_the_results_of_stock(report_of):
    layer, x, adj = pyg.SAGEConv(F, 4), torch.randn(20, F), torch.eye(20).to_sparse_csr()
    expected = layer(x, adj)
    with pyg_accel.patched():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x, adj), expected)
    assert report_of()


def test_dropout_in_a_message_is_compiled_and_so_is_its_gradient():
    layer = pyg.GATConv(F, 4, heads=2, dropout=0.5, add_self_loops=False)
    x, edges = torch.randn(20, F), torch.randint(0, 20, (2, 60))
    with pyg_accel.patched():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        first, second = compiled(x, edges), compiled(x, edges)
        assert not torch.equal(first, second)
        first.sum().backward()
        layer.eval()
        torch.testing.assert_close(compiled(x, edges), layer(x, edges))


def test_an_exported_model_runs_without_us():
    layer, x, edges = pyg.SAGEConv(F, 4), torch.randn(20, F), torch.randint(0, 20, (2, 60))
    for strict in (True, False):
        with pyg_accel.patched():
            exported = torch.export.export(layer, (x, edges), strict=strict)
        assert not any("pyg_accel" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(x, edges), layer(x, edges))


def test_the_default_backend_gives_the_results_of_stock():
    model, x, edges = GraphSAGE(F, 8, 2), torch.randn(20, F), torch.randint(0, 20, (2, 60))
    x.requires_grad_()
    expected = results(model, model, x, edges)
    with pyg_accel.patched():
        found = results(torch.compile(model, fullgraph=True), model, x, edges)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
