"""``patch()`` on a GPU: the same results and gradients as PyG, and a good citizen of its stream."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

import pyg_accel
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NODES, EDGES, WIDTH = 2000, 30_000, 24
# Sums of some 15 (hubs: 3000) float32 terms in another order, through products of 24.
TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def whatever_the_size() -> None:
    settings.always = True


def pna(width: int) -> Module:
    degrees = torch.ones(64, dtype=torch.long)
    return pyg.PNAConv(width, width, ["mean", "max", "std"], ["identity", "amplification"], degrees)


class Relations(Module):
    """RGATConv, each edge of one of three relations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = pyg.RGATConv(width, 8, num_relations=3, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_index.sum(0) % 3)


class Stacked(Module):
    """HeteroConv of layers of one shape: all relations in one call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.relations = [("a", "to", "a"), ("a", "at", "b"), ("b", "of", "a")]
        self.conv = pyg.HeteroConv(
            {relation: pyg.SAGEConv(width, 16) for relation in self.relations}
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = dict.fromkeys(self.relations, edge_index)
        return torch.cat(list(self.conv({"a": x, "b": x.flip(0)}, edges).values()))


class Types(Module):
    """HGTConv on two types of nodes and three of edges, those of the second type renamed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.relations = [("a", "to", "a"), ("a", "at", "b"), ("b", "of", "a")]
        self.conv = pyg.HGTConv(width, 16, (["a", "b"], self.relations), heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = dict.fromkeys(self.relations, edge_index)
        return torch.cat(list(self.conv({"a": x, "b": x.flip(0)}, edges).values()))


LAYERS: dict[str, Callable[[int], Module]] = {
    "GCN": lambda f: pyg.GCNConv(f, f),
    "SAGE-mean": lambda f: pyg.SAGEConv(f, f),
    "SAGE-max": lambda f: pyg.SAGEConv(f, f, aggr="max"),
    "SAGE-many": lambda f: pyg.SAGEConv(f, f, aggr=["mean", "max", "std"]),
    "GIN": lambda f: pyg.GINConv(Linear(f, f)),
    "GraphConv": lambda f: pyg.GraphConv(f, f),
    "GINE": lambda f: pyg.GINEConv(Linear(f, f), edge_dim=7),
    "ResGated": lambda f: pyg.ResGatedGraphConv(f, f),
    "FiLM": lambda f: pyg.FiLMConv(f, f),
    "CG": lambda f: pyg.CGConv(f, dim=7),
    "EG": lambda f: pyg.EGConv(f, f, aggregators=["mean", "max"], num_heads=4),
    "PNA": pna,
    "GAT": lambda f: pyg.GATConv(f, 8, heads=4),
    "GAT-edges": lambda f: pyg.GATConv(f, 8, heads=4, edge_dim=7),
    "GATv2": lambda f: pyg.GATv2Conv(f, 8, heads=4),
    "GATv2-edges": lambda f: pyg.GATv2Conv(f, 8, heads=4, edge_dim=7),
    "GAT-mean": lambda f: pyg.GATConv(f, 7, heads=3, concat=False, dropout=0.3),
    "Transformer": lambda f: pyg.TransformerConv(f, 8, heads=4, edge_dim=7),
    "Transformer-dropout": lambda f: pyg.TransformerConv(f, 33, heads=8, dropout=0.3, beta=True),
    "SuperGAT": lambda f: pyg.SuperGATConv(f, 8, heads=4).eval(),
    "AGNN": lambda f: pyg.AGNNConv(),
    "RGAT": Relations,
    "HGT": Types,
    "Hetero": Stacked,
}
RELATIONS = {"Hetero", "RGAT"}  # a matrix product per relation is cuBLAS's: torch's own operators
WITH_EDGES = {"GINE", "CG", "GAT-edges", "GATv2-edges", "Transformer"}
MODELS: dict[str, Callable[[], Module]] = {
    "GCN": lambda: GCN(WIDTH, 32, 2, 5),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, 32, 2, 5),
    "GIN": lambda: GIN(WIDTH, 32, 2, 5),
    "GAT": lambda: pyg.GATConv(WIDTH, 8, heads=4),
    "GATv2": lambda: pyg.GATv2Conv(WIDTH, 8, heads=4),
    "Transformer": lambda: pyg.TransformerConv(WIDTH, 8, heads=4),
}


def make_edges(edges: int = EDGES, nodes: int = NODES) -> Tensor:
    """Unsorted, with duplicates, nodes without edges, and one hub."""
    source = torch.randint(nodes, (edges,), device="cuda")
    target = torch.randint(nodes // 2, (edges,), device="cuda")
    target[: edges // 10] = 3
    return torch.stack([source, target])


def step(model: Module, *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of everything that has one, with the same random numbers each time."""
    torch.manual_seed(0)
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out = model(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device="cuda").to(out.dtype))
    grads = [t.grad for t in (*leaves, *model.parameters()) if t.grad is not None]
    model.zero_grad()
    return [out.detach(), *grads]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(ours) == len(theirs)
    for mine, right in zip(ours, theirs, strict=True):
        scale = float(right.abs().max().clamp(min=1.0))
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_pyg(name):
    layer = LAYERS[name](WIDTH).cuda()
    inputs = [torch.randn(NODES, WIDTH, device="cuda"), make_edges()]
    if name in WITH_EDGES:
        inputs.append(torch.randn(EDGES, 7, device="cuda"))
    theirs = step(layer, *inputs)
    pyg_accel.reset_report()
    with pyg_accel.patched():
        ours = step(layer, *inputs)
    backends = {row.backend for row in pyg_accel.report().rows if row.formula}
    expected = {"deferred", "triton"} | ({"reference"} if name in RELATIONS else set())
    assert all({*actual.split("+")} <= expected for actual in backends)
    assert any(row.formula for row in pyg_accel.report().rows)
    assert_close(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_for_nothing_once_it_is_warm(name):
    # Some steps long the graph could still be a batch that is never seen again: see Facts.stays.
    model, x, edges = MODELS[name]().cuda(), torch.randn(NODES, WIDTH, device="cuda"), make_edges()
    optimizer = torch.optim.Adam(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(x, edges).square().mean().backward()
        optimizer.step()

    with pyg_accel.patched():
        for _ in range(30):
            train()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            train()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MODELS)
def test_a_step_can_be_captured_and_replayed(name):
    x, edges = torch.randn(NODES, WIDTH, device="cuda"), make_edges()
    eager = MODELS[name]().cuda()
    captured = copy.deepcopy(eager)

    def make_train(model: Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train() -> None:
            optimizer.zero_grad()
            model(x, edges).square().mean().backward()
            optimizer.step()

        return train

    with pyg_accel.patched():
        first, second = make_train(eager), make_train(captured)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                second()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            second()
        for _ in range(4):
            graph.replay()
        for _ in range(3 + 4):
            first()
    assert_close([*captured.parameters()], [*eager.parameters()])


@pytest.mark.parametrize("count", [6, 1], ids=["new graphs", "one graph"])
@pytest.mark.parametrize("name", ["SAGE-mean", "GCN", "GATv2"])
def test_two_streams_in_turns(name, count):
    """Each has a layer of its own; the graphs that both read were there before."""
    layers = [LAYERS[name](WIDTH).cuda() for _ in range(2)]
    x = torch.randn(NODES, WIDTH, device="cuda")
    graphs = [make_edges() for _ in range(count)] * (6 // count)
    expected = [[step(layer, x, edges) for edges in graphs] for layer in layers]
    streams, results = [torch.cuda.Stream() for _ in layers], [[], []]
    with pyg_accel.patched():
        step(layers[0], x, graphs[0])  # compiles kernels, and one graph may be built
        torch.cuda.synchronize()
        for edges in graphs:
            for layer, stream, actual in zip(layers, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    actual.append(step(layer, x, edges))
        torch.cuda.synchronize()
    for theirs, ours in zip(expected, results, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_autocast_stays_near_float32(name):
    model, x, edges = MODELS[name]().cuda(), torch.randn(NODES, WIDTH, device="cuda"), make_edges()
    theirs = step(model, x, edges)
    with pyg_accel.patched(), torch.autocast("cuda", torch.bfloat16):
        ours = step(model, x, edges)
    error = (ours[0].float() - theirs[0]).norm() / theirs[0].norm()
    assert float(error) < 0.03, float(error)  # bfloat16 keeps 8 bits


def test_results_are_bit_equal_under_deterministic_algorithms():
    model, x, edges = GraphSAGE(WIDTH, 32, 2, 5, aggr="max").cuda(), None, make_edges()
    x = torch.randn(NODES, WIDTH, device="cuda")
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        with pyg_accel.patched():
            runs = [step(model, x, edges) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["GraphSAGE", "GIN", "GATv2", "Transformer"])
def test_compiled_models_are_one_graph_for_all_batches(name):
    torch._dynamo.reset()
    pyg_accel.reset_report()
    model = MODELS[name]().cuda()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    with pyg_accel.patched():
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for nodes, edges in ((2000, 30_000), (1500, 20_000), (1700, 25_001), (900, 15_000)):
            x, index = torch.randn(nodes, WIDTH, device="cuda"), make_edges(edges, nodes)
            torch.testing.assert_close(compiled(x, index), model(x, index), rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= 2
    assert {row.backend for row in pyg_accel.report().rows if "compile" in row.backend}
