"""Layers that take self-loops out are padded without waiting for the device, and stay exact."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn as pyg
from torch_geometric.utils import (
    add_self_loops,
    get_self_loop_attr,
    remove_self_loops,
    scatter,
    segregate_self_loops,
)

import pyg_accel
from pyg_accel.cuda_graphs.entry import Entry
from pyg_accel.layers import MaxKGCNConv
from pyg_accel.patching import overrides
from pyg_accel.patching.dynamo_guards import Look
from pyg_accel.runtime.machine import as_captured
from tests.cuda_graphs.models import Inputs, module, outcome, same, some

WIDTH = 8


class Waits(RuntimeError):
    """What a capture would end with on a GPU."""


class NoWaits(Look):  # one of ours: under a mode of the user calls are PyG's
    """Refuses what waits for a GPU: numbers in Python, and sizes that depend on data."""

    def __init__(self, waits: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # patch() looks for equal graphs too, but not in a capture.
        looks = func is torch.ops.aten.equal.default and overrides.installed()
        if not looks and self._waits(func, [*args, *(kwargs or {}).values()]):
            raise Waits(f"it waits for the device ({func})")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch, rerun: Any, waits: Any) -> None:
    compute = Entry.compute

    def checked(self: Entry) -> list[Tensor]:
        with NoWaits(waits), as_captured():
            return compute(self)

    monkeypatch.setattr(Entry, "compute", checked)


def graph(nodes: int, edges: int, loops: int, seed: int) -> Inputs:
    """A graph of which a third of the nodes have no edges but self-loops, some several of them."""
    numbers = torch.Generator().manual_seed(seed)
    ends = torch.randint(2 * nodes // 3, (2, edges), generator=numbers)
    ends[1] += ends[0] == ends[1]  # none by chance
    where = torch.randperm(edges, generator=numbers)[:loops]
    ends[:, where] = torch.randint(nodes // 2, nodes, (loops,), generator=numbers)
    double = {"generator": numbers, "dtype": torch.float64}
    return {
        "x": torch.randn(nodes, WIDTH, **double),
        "edge_index": ends,
        "edge_attr": torch.rand(edges, 3, **double) + 0.1,
        "edge_weight": torch.rand(edges, **double) + 0.1,
    }


@pytest.fixture
def batches() -> list[Inputs]:
    """The first ones, by which padding is judged, have no self-loops."""
    return [graph(40 + seed, 150 + seed % 4, 0 if seed < 6 else 9 * seed, seed)
            for seed in range(10)]  # fmt: skip


class Network(torch.nn.Module):
    """A layer twice, with features or weights of edges."""

    def __init__(self, make: Callable[[], torch.nn.Module], edges: str = "") -> None:
        super().__init__()
        self.first, self.second, self.edges = make(), make(), edges

    def forward(self, x: Tensor, edge_index: Tensor, *more: Tensor, **edges: Tensor) -> Tensor:
        given = [edges[self.edges]] if self.edges else []
        x = self.first(x, edge_index, *given)
        return self.second(x.sigmoid(), edge_index, *given)


GRAPH = ("x", "edge_index")


def attention(kind: type[torch.nn.Module], **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: kind(WIDTH, WIDTH // 2, heads=2, **options)


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "AGNN": (pyg.AGNNConv, ""),
    "APPNP": (lambda: pyg.APPNP(2, 0.1), ""),
    "ARMA": (lambda: pyg.ARMAConv(WIDTH, WIDTH, 2, 2), "edge_weight"),
    "Cheb": (lambda: pyg.ChebConv(WIDTH, WIDTH, 3), ""),
    "Cheb with weights": (lambda: pyg.ChebConv(WIDTH, WIDTH, 3), "edge_weight"),
    "Cheb, largest degree": (lambda: pyg.ChebConv(WIDTH, WIDTH, 3, normalization=None), ""),
    "Cheb, random walk": (lambda: pyg.ChebConv(WIDTH, WIDTH, 3, normalization="rw"), ""),
    "EG": (lambda: pyg.EGConv(WIDTH, WIDTH, aggregators=["symnorm"]), ""),
    "FeaSt": (lambda: pyg.FeaStConv(WIDTH, WIDTH, 2), ""),
    "GAT": (attention(pyg.GATConv), ""),
    "GAT, mean of features": (attention(pyg.GATConv, edge_dim=3), "edge_attr"),
    "GAT, sum of features": (attention(pyg.GATConv, edge_dim=3, fill_value="add"), "edge_attr"),
    "GAT, largest features": (attention(pyg.GATConv, edge_dim=3, fill_value="max"), "edge_attr"),
    "GAT, a number": (attention(pyg.GATConv, edge_dim=1, fill_value=0.5), "edge_weight"),
    "GATv2": (attention(pyg.GATv2Conv, edge_dim=3), "edge_attr"),
    "GCN": (lambda: pyg.GCNConv(WIDTH, WIDTH), ""),
    "GCN with weights": (lambda: pyg.GCNConv(WIDTH, WIDTH), "edge_weight"),
    "GCN, improved": (lambda: pyg.GCNConv(WIDTH, WIDTH, improved=True), "edge_weight"),
    "GCN, mean": (lambda: pyg.GCNConv(WIDTH, WIDTH, aggr="mean"), "edge_weight"),
    "GCN, max": (lambda: pyg.GCNConv(WIDTH, WIDTH, aggr="max"), ""),
    "GCN, against the edges": (
        lambda: pyg.GCNConv(WIDTH, WIDTH, flow="target_to_source"), "edge_weight"
    ),
    "MaxKGCN": (lambda: MaxKGCNConv(WIDTH, WIDTH, k=4), ""),
    "PDN": (lambda: pyg.PDNConv(WIDTH, WIDTH, 3, 4), "edge_attr"),
    "SG": (lambda: pyg.SGConv(WIDTH, WIDTH, 2), "edge_weight"),
    "TAG": (lambda: pyg.TAGConv(WIDTH, WIDTH), "edge_weight"),
}  # fmt: skip


CASES = [
    pytest.param(name, patched, id=f"{name}-{'patched' if patched else 'stock'}",
                 marks=[pytest.mark.full] if patched and name not in ("GCN with weights", "GAT")
                 else [])
    for name in LAYERS for patched in (False, True)
]  # fmt: skip


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name, patched", CASES)
def test_layers_that_take_self_loops_out(name, patched, batches, replayed, request):
    make, edges = LAYERS[name]
    model = Network(make, edges).double()
    if patched:
        request.getfixturevalue("always")
        pyg_accel.patch(model)
    same(model, some(batches, *GRAPH, *[edges][: bool(edges)]))
    replayed(len(batches) - 3)


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_new_graphs_of_one_size_are_padded_after_all(name, replayed):
    batches = some([graph(40, 150, 3 * seed, seed) for seed in range(10)], *GRAPH)
    same(Network(LAYERS[name][0]).double(), batches)
    # Three calls to warm up, a fourth that cannot be recorded as it is.
    replayed(len(batches) - 4)


@pytest.mark.each
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["GCN with weights", "GAT, mean of features", "Cheb"])
def test_inference(name, context, batches, replayed):
    make, edges = LAYERS[name]
    model = Network(make, edges).double().eval()
    fast = pyg_accel.graphed(model)
    with context():
        for inputs in batches:
            torch.testing.assert_close(fast(**inputs), model(**inputs))
    replayed(len(batches) - 3)


def test_dropout_of_attention(batches, replayed):
    model = Network(attention(pyg.GATConv, dropout=0.5)).double()
    fast, batches = pyg_accel.graphed(model), some(batches, *GRAPH)
    for inputs in batches:
        fast(**inputs).sum().backward()
    replayed(len(batches) - 3)
    with torch.no_grad():
        drawn = torch.stack([fast(**inputs) for _ in range(400)])
        assert (drawn[0] != drawn[1]).any()
        expected = torch.stack([model(**inputs) for _ in range(400)])
    error = (drawn.var(0) + expected.var(0)).div(400).sqrt().clamp(min=1e-9)
    assert ((drawn.mean(0) - expected.mean(0)) / error).abs().max() < 6


def exact(nodes: int, edges: int, loops: int, seed: int) -> Inputs:
    return some([graph(nodes, edges, loops, seed)], *GRAPH, "edge_weight")[0]


@pytest.mark.parametrize("name", ["GCN with weights", "GAT, a number", "Cheb with weights"])
def test_a_bucket_that_is_full_and_edges_that_are_all_self_loops(name, replays, reasons):
    make, edges = LAYERS[name]
    model = Network(make, edges).double()
    calls = [exact(40, 140, 0, seed) for seed in range(6)]
    fast = pyg_accel.graphed(copy.deepcopy(model), dynamic=True)
    for inputs in calls:
        fast(**inputs)
    assert fast.captures == ["replayed: up to 48 nodes, 152 edge_index"]
    odd = [exact(47, 152, 0, 6), exact(47, 152, 20, 7), exact(47, 152, 152, 8),
           exact(40, 150, 150, 9), exact(47, 3, 3, 10)]  # fmt: skip
    same(model, [*calls, *odd], dynamic=True)
    assert not reasons()


def test_weights_below_zero(batches, replayed):
    """Padding is made of the first edge: its degrees would have no root."""
    for inputs in batches:
        inputs["edge_weight"] = inputs["edge_weight"] * 0.1
        inputs["edge_weight"][0] = -0.9
    model = Network(*LAYERS["GCN with weights"]).double()
    calls = some(batches, *GRAPH, "edge_weight")
    same(model, calls)
    assert all(t.isfinite().all() for call in calls for t in outcome(model, call))
    replayed(len(batches) - 3)


def test_products_over_edges(replayed):
    """Of fifty edges of padding they would be infinite, and gradients not a number."""
    model = Network(attention(pyg.GATConv, edge_dim=1, fill_value="mul"), "edge_weight").double()
    calls = [exact(40, 140, 0, seed) for seed in range(6)] + [exact(47, 105, 9, 6)]
    for inputs in calls:
        inputs["edge_weight"] = inputs["edge_weight"] * 1e7
    same(model, calls, dynamic=True)
    assert all(t.isfinite().all() for call in calls for t in outcome(model, call))
    replayed(len(calls) - 3)


def own(edges: Callable[..., Any]) -> torch.nn.Module:
    """A layer that a user wrote."""

    def forward(self: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_index, edge_attr = edges(self, edge_index, edge_attr, x.size(0))
        x = self.linear(x)
        weight = edge_attr if edge_attr.dim() == 1 else edge_attr.sum(-1)
        return x + scatter(x[edge_index[0]] * weight.view(-1, 1), edge_index[1], 0, x.size(0))

    return module(forward, linear=Linear(WIDTH, WIDTH), norm=torch.nn.BatchNorm1d(3)).double()


def _divided(self, edge_index, edge_attr, nodes):
    edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    return edge_index, 1 / edge_attr


def _ends(self, edge_index, edge_attr, nodes):
    row, col = edge_index
    row, col = torch.stack([col, row])
    mask = row != col
    return torch.stack([row[mask], col[mask]]), edge_attr[mask]


def _only_loops(self, edge_index, edge_attr, nodes):
    *_, edge_index, edge_attr = segregate_self_loops(edge_index, edge_attr)
    return edge_index, edge_attr


def _of_nodes(self, edge_index, edge_attr, nodes):
    loops = get_self_loop_attr(edge_index, edge_attr, nodes)
    return edge_index, edge_attr * loops[edge_index[1]]


def _twice(self, edge_index, edge_attr, nodes):
    for _ in range(2):
        edge_index, edge_attr = add_self_loops(edge_index, edge_attr, "mean", nodes)
        edge_index, edge_attr = remove_self_loops(edge_index.flip(0), edge_attr)
    return add_self_loops(edge_index, edge_attr, 2.0, nodes)


def _doubled(self, edge_index, edge_attr, nodes):
    edge_attr = edge_attr * 1
    edge_attr[edge_index[0] == edge_index[1]] *= 2
    edge_attr[edge_index[0] != edge_index[1]] = 0.5
    return edge_index, edge_attr


def _normalised(self, edge_index, edge_attr, nodes):
    edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    edge_attr = self.norm(edge_attr) + edge_attr.mean(0) / edge_attr.std(0)
    return edge_index, edge_attr - edge_attr.max(dim=0).values


def _apart(self, edge_index, edge_attr, nodes):
    edge_index, edge_attr, _, loops = segregate_self_loops(edge_index, edge_attr)
    return edge_index, edge_attr + loops.sum(0)


def _backwards(self, edge_index, edge_attr, nodes):
    turned = edge_index.flip(1)
    edge_index, attr = remove_self_loops(edge_index, edge_attr)
    attr = attr / attr.mean(0)
    turned, other = remove_self_loops(turned, edge_attr.flip(0))
    return torch.cat([edge_index, turned], 1), torch.cat([attr, other / other.mean(0)])


def _by_name(self, edge_index, edge_attr, nodes):
    """What is not recognised is not padded either, and nothing raises."""
    kept = torch.ne(input=edge_index[0], other=edge_index[1])
    none = torch.logical_not(input=torch.clone(input=kept))
    weight = torch.cat(tensors=[kept.unsqueeze(1), ~none.unsqueeze(1)], dim=1).all(1).to(edge_attr)
    return torch.flip(input=edge_index, dims=(0,)), edge_attr * weight.unsqueeze(1)


def _types(self, edge_index, edge_attr, nodes):
    types = (edge_attr[:, 0] * 2).long().clamp(max=2)  # rows of a table, which has no more
    edge_index, types = remove_self_loops(edge_index, types)
    return edge_index, self.linear.weight[:3][types]


OWN = [_divided, _ends, _only_loops, _of_nodes, _twice, _doubled, _normalised, _apart,
       _backwards, _by_name, _types]  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("edges", OWN, ids=lambda f: f.__name__.strip("_"))
def test_user_written_layers(edges, batches, replayed):
    if edges is _divided:
        batches.append(graph(40, 150, 150, 10))
        for inputs in batches:
            inputs["edge_attr"][inputs["edge_index"][0] == inputs["edge_index"][1]] = 0
    same(own(edges), some(batches, *GRAPH, "edge_attr"))
    replayed(len(batches) - 3)


def _counted(self, edge_index, edge_attr, nodes):
    edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    return edge_index, edge_attr / len(edge_attr)


def _sorted(self, edge_index, edge_attr, nodes):
    edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
    return edge_index, edge_attr.flip(0).cumsum(0)


def _by_type(self, edge_index, edge_attr, nodes):
    mask = edge_attr[:, 0] > 0.5
    return edge_index[:, mask], edge_attr[mask]


@pytest.mark.parametrize("edges", [_counted, _sorted, _by_type])
def test_models_that_see_removed_edges_stay_eager(edges, batches, stayed_eager):
    same(own(edges), some(batches, *GRAPH, "edge_attr"))
    stayed_eager()


def test_layers_that_cannot_be_padded_stay_eager(batches, stayed_eager):
    same(Network(lambda: pyg.ClusterGCNConv(WIDTH, WIDTH)).double(), some(batches, *GRAPH))
    stayed_eager()


def test_a_graph_that_is_no_argument_is_not_padded(batches, replays, reasons):
    fixed = module(
        lambda self, x, edge_index: (
            self.conv(x, edge_index) + self.other(self.table, self.edges).sum(0)),
        conv=pyg.GCNConv(WIDTH, WIDTH), other=pyg.GCNConv(WIDTH, WIDTH),
        edges=torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]]), table=torch.randn(3, WIDTH),
    ).double()  # fmt: skip
    same(fixed, some(batches, *GRAPH))
    assert replays() == 0 and all("it waits for the device" in reason for reason in reasons())


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_sampled_batches_whose_targets_are_some_of_the_nodes_stay_eager(
    name, batches, replays, reasons
):
    def forward(self: Any, x: Tensor, edge_index: Tensor, batch_size: int) -> Tensor:
        x = self.first(x, edge_index)
        targets = edge_index[:, : 2 * batch_size] % batch_size
        return self.second((x, x[:batch_size]), targets)

    trimmed = module(forward, first=LAYERS[name][0](), second=pyg.GATConv((WIDTH, WIDTH), WIDTH))
    same(trimmed.double(), [batch | {"batch_size": 20 + i}
                            for i, batch in enumerate(some(batches, *GRAPH))])  # fmt: skip
    assert replays() == 0 and reasons()


@pytest.mark.parametrize("name", ["GCN", "GAT, mean of features"])
def test_a_step_of_training(name, batches, replays, reasons):
    make, edges = LAYERS[name]

    def stepper(model: torch.nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)

        def step(x: Tensor, edge_index: Tensor, edge_attr: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edge_index, edge_attr=edge_attr), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    model = Network(make, edges).double()
    eager = copy.deepcopy(model)
    one, two = stepper(eager), pyg_accel.graphed_step(stepper(model), modules=[model])
    for given in some(batches + batches, *GRAPH, "edge_attr"):
        y = torch.arange(len(given["x"])) % WIDTH
        torch.testing.assert_close(two(**given, y=y), one(**given, y=y).detach())
    assert not reasons() and replays() >= 10
    for param, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-8)
