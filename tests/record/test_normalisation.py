"""Normalisation by degrees of nodes in programs for a GPU: the results of weights of edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

import pyg_accel
from pyg_accel import Graph, ops, use_backend
from pyg_accel.ops import by_edge
from pyg_accel.patching import programs
from pyg_accel.record.normalisation import node_scales
from pyg_accel.record.program import LayerProgram

N, F = 40, 6
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(F, F),
    "gcn, target to source": lambda: pyg.GCNConv(F, F, flow="target_to_source"),
    "gcn without loops": lambda: pyg.GCNConv(F, F, add_self_loops=False),
    "sg": lambda: pyg.SGConv(F, F, K=2),
    "ssg": lambda: pyg.SSGConv(F, F, 0.1, K=2),
    "tag": lambda: pyg.TAGConv(F, F, K=2),
    "appnp": lambda: pyg.APPNP(2, 0.1),
    "light": lambda: pyg.LGConv(),
    "gcn2": lambda: pyg.GCN2Conv(F, 0.1),
    "fa": lambda: pyg.FAConv(F),
    "fa, target to source": lambda: pyg.FAConv(F, flow="target_to_source", add_self_loops=False),
}
ATTENTION: dict[str, Callable[[], torch.nn.Module]] = {
    "gat": lambda: pyg.GATConv(F, 4, 2),
    "gatv2": lambda: pyg.GATv2Conv(F, 4, 2),
    "agnn": lambda: pyg.AGNNConv(),
}


def graph(nodes: int = N) -> Tensor:
    """Edges with loops, several of one node too, duplicates and nodes without edges."""
    edges = torch.randint(nodes - 3, (2, 150))
    edges[0, :12] = edges[1, :12]
    edges[:, 1] = edges[:, 0]
    edges[:, 21] = edges[:, 20]
    return edges


@pytest.fixture
def by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a CPU that are made like those for a GPU."""
    finish = LayerProgram.__post_init__

    def post_init(program: LayerProgram) -> None:
        program.by_nodes = True
        finish(program)

    monkeypatch.setattr(LayerProgram, "__post_init__", post_init)


@pytest.fixture
def by_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are not built on a CPU either."""
    describe = Graph._describe

    def on_a_gpu(graph: Graph, *args: Any) -> None:
        describe(graph, *args)
        graph.is_cuda = True

    monkeypatch.setattr(Graph, "_describe", on_a_gpu)
    monkeypatch.setattr(by_edge, "BUILD_SECONDS", float("inf"))


@pytest.mark.parametrize("name", LAYERS | ATTENTION)
@pytest.mark.parametrize("unbuilt", [False, True])
@pytest.mark.parametrize("sizes", [(N,), (N, N + 9, N - 5)], ids=["one size", "sizes"])
def test_results_and_gradients_are_those_of_pyg(
    name: str, sizes: tuple[int, ...], unbuilt: bool, by_nodes: None, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    if unbuilt:
        request.getfixturevalue("by_edges")
    layer = (LAYERS | ATTENTION)[name]().double()
    graphs = [(graph(nodes), nodes) for nodes in sizes * 4]

    def run(edges: Tensor, nodes: int) -> list[Tensor]:
        features = torch.linspace(-3, 3, nodes * F, dtype=torch.float64).view(nodes, F)
        features.requires_grad_()
        args = (
            (features, features) if isinstance(layer, (pyg.GCN2Conv, pyg.FAConv)) else (features,)
        )
        out = layer(*args, edges)
        return [out, *torch.autograd.grad(out.square().sum(), [features, *layer.parameters()])]

    expected = [run(*each) for each in graphs]
    with pyg_accel.patched(layer), use_backend("reference" if unbuilt else "auto"):
        for each, right in zip(graphs, expected, strict=True):
            torch.testing.assert_close(run(*each), right)
        known = programs.find(layer, "call")
    assert known is not None
    for program in known.programs:
        codes = [f.__code__.co_consts + f.__code__.co_names for f in program._functions]
        assert "remembered" not in str(codes)
    assert known.programs


@pytest.mark.parametrize("name", ["gcn", "gat", "gatv2"])
def test_layers_on_edges_by_triton(name: str, by_nodes: None, by_edges: None) -> None:
    layer, x, edges = (LAYERS | ATTENTION)[name](), torch.randn(N, F, requires_grad=True), graph()

    def run() -> list[Tensor]:
        out = layer(x, edges)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    expected = run()
    with pyg_accel.patched(layer), use_backend("triton"):
        for _ in range(2):
            torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_the_layer_returns_stay(by_nodes: None) -> None:
    class Returns(pyg.GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Any = None) -> Any:
            edges, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
            return self.propagate(edges, x=x, edge_weight=weight), weight

    layer, x, edges = Returns(F, F), torch.randn(N, F), graph()
    expected = layer(x, edges)
    with pyg_accel.patched(layer):
        for _ in range(3):
            torch.testing.assert_close(layer(x, edges), expected)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("target", [0, 1])
def test_scales_are_products_of_weights(target: int, loops: bool) -> None:
    edges = graph()
    flow = "source_to_target" if target else "target_to_source"
    matrix = Graph.of_edges(edges, target, N, N, loops=N if loops else None)
    scale = node_scales(matrix, loops, torch.float64)
    weighted, weight = gcn_norm(edges, None, N, False, loops, flow, torch.float64)
    right = torch.zeros(N, N, dtype=torch.float64)
    right.index_put_((weighted[target], weighted[1 - target]), weight, accumulate=True)
    actual = ops.spmm(matrix, torch.eye(N, dtype=torch.float64))
    torch.testing.assert_close(scale * actual * scale.t(), right)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("loops", [0, 3, N])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_graphs_replace_self_loops(reduce: str, loops: int, backend: str, by_edges: None) -> None:
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    edges = graph().to(device)
    x = torch.randn(N, F, dtype=torch.float64, device=device, requires_grad=True)
    listed = add_self_loops(remove_self_loops(edges)[0], num_nodes=N)[0]
    listed = listed[:, : listed.size(1) - N + loops]
    with use_backend(backend):
        actual = Graph.of_edges(edges, 1, N, N, loops=loops)
        results = []
        for matrix in (actual, Graph.of_edges(listed, 1, N, N)):
            out = ops.gspmm(matrix, "relu(add(u0,v1))", [x, x.sin()], reduce=reduce)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        assert not actual.built
    torch.testing.assert_close(results[0], results[1])
    assert actual.build().num_edges == listed.size(1)
    with use_backend("reference"):
        torch.testing.assert_close(
            ops.gspmm(actual, "relu(add(u0,v1))", [x, x.sin()], reduce=reduce), results[0][0]
        )
