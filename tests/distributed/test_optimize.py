"""Models that optimize() has rewritten, on several ranks, against one process in float64."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data, HeteroData

import pyg_accel
from pyg_accel.rewrite.optimized import rewritten_layers


def shared(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES, MODELS = shared("test_layers"), shared("test_models")
F, H, mlp, graph, run, same = (
    getattr(CASES, name) for name in ("F", "H", "mlp", "graph", "run", "same")
)
LAYERS: dict[str, Any] = {
    "GCN": (lambda: nn.GCNConv(F, H),),
    "GCN wide": (lambda: nn.GCNConv(F, 3 * F),),
    "GCN weighted": (lambda: nn.GCNConv(F, H, improved=True), "edge_weight"),
    "SAGE": (lambda: nn.SAGEConv(F, H, project=True),),
    "SAGE wide": (lambda: nn.SAGEConv(F, 3 * F, aggr="sum"),),
    "Graph": (lambda: nn.GraphConv(F, H), "edge_weight"),
    "GIN": (lambda: nn.GINConv(torch.nn.Linear(F, H), train_eps=True),),
    "LG": (lambda: nn.LGConv(),),
    "SG": (lambda: nn.SGConv(F, H, K=2),),
    "SSG": (lambda: nn.SSGConv(F, H, alpha=0.1, K=2),),
    "TAG": (lambda: nn.TAGConv(F, H, K=2),),
    "APPNP": (lambda: nn.APPNP(2, 0.1),),
    "of a user": (lambda: Users(),),
    "MaxK": (lambda: pyg_accel.MaxKSAGEConv(F, H, k=2),),
    "MaxK GCN": (lambda: pyg_accel.MaxKGCNConv(F, H, k=2),),
    "MaxK GIN": (lambda: pyg_accel.MaxKGINConv(torch.nn.Linear(F, H), k=2),),
}  # fmt: skip
# Layers that make their calls themselves, on all ranks: after the exchange of their features.
LEFT: dict[str, Any] = {
    "GAT": (lambda: nn.GATConv(F, H, heads=2),),
    "GCN cached": (lambda: nn.GCNConv(F, H, cached=True),),
    "Cheb": (lambda: nn.ChebConv(F, H, K=3),),
    "GIN with a norm": (lambda: nn.GINConv(
        torch.nn.Sequential(torch.nn.Linear(F, H), nn.BatchNorm(H)), train_eps=True),),
    "ARMA": (lambda: nn.ARMAConv(F, H, num_stacks=2, num_layers=2),),
    "RGCN": (lambda: nn.RGCNConv(F, H, num_relations=3), "edge_type"),
    "RGCN bases": (lambda: nn.RGCNConv(F, H, num_relations=5, num_bases=2), "edge_type"),
    "picks edges": (lambda: Picks(), "edge_weight"),
    "small reads numbers": (lambda: Small(),),
}  # fmt: skip


class Users(nn.MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(F, H)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x))


class Picks(Users):
    """Has fewer edges than it was called with: each rank a number of its own."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return super().forward(x, edge_index[:, edge_weight > 0.5])


class Small(Users):
    """Cannot be recorded on few nodes."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return out * (float(out.sum()) > -torch.inf) if x.size(0) < 15 else out


class Net(torch.nn.Module):
    """A layer behind a linear map, or in front of all: on features that stay as they are."""

    def __init__(self, layer: str, first: bool) -> None:
        super().__init__()
        self.before = None if first else torch.nn.Linear(F, F)
        self.conv = (LAYERS | LEFT)[layer][0]()
        self.last = torch.nn.LazyLinear(2)

    def forward(self, x: Tensor, edge_index: Tensor, more: Tensor | None = None) -> Tensor:
        h = x if self.before is None else torch.tanh(self.before(x))
        h = self.conv(h, edge_index) if more is None else self.conv(h, edge_index, more)
        return self.last(h)


def arguments(layer: str, data: Data) -> list[Tensor]:
    names = (LAYERS | LEFT)[layer][1:]
    return [data.x, data.edge_index, *(data[n].sigmoid() if n == "edge_weight" else data[n]
                                       for n in names)]  # fmt: skip


def compare(
    device: torch.device, layer: str, first: bool, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        data = graph(device)
        model = Net(layer, first).to(device)
        with torch.no_grad():
            model(*arguments(layer, data))
        many = copy.deepcopy(model)
        inputs = arguments(layer, data)
        expected = [run(model, *inputs) for _ in range(3)]
        fast = pyg_accel.optimize(many, *inputs, train=True)
        spread, share = pyg_accel.distribute(fast, graph(device), **(options or {}))
        inputs = arguments(layer, share)
        (conv,) = rewritten_layers(fast).values()
        conv.decisions.clear()
        received = []
        for wanted in expected:  # the first is recorded, what the second keeps serves the third
            same(run(spread, *inputs), wanted)
            received.append(spread.wire.traffic["halo"].received)
            spread.wire.traffic["halo"].received = 0
        with torch.no_grad():
            wanted = model.eval()(*arguments(layer, data))
            torch.testing.assert_close(spread.eval()(*inputs), wanted, rtol=0, atol=1e-12)
        halo = int((share.edge_index[0].unique() >= share.num_nodes).sum())
        return {
            "tree": str(conv.decisions[-1].choice.tree) if conv.decisions else "",
            "reasons": list(conv.reasons), "received": received, "halo": halo,
        }  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    "first", [False, pytest.param(True, marks=pytest.mark.full)], ids=["learned", "static"]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rewritten_layer_on_two_ranks_is_that_of_one_process(two, layer, first):
    actual = two(compare, layer=layer, first=first)
    assert actual[0]["tree"] and actual[0]["tree"] == actual[1]["tree"]
    assert not any(each["reasons"] for each in actual)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("layer", LEFT)
def test_layers_that_are_left_to_themselves_exchange_before_their_products(two, layer):
    parts = (torch.arange(30) > 4).long()
    first, second = two(compare, layer=layer, first=False, options={"partition": parts})
    assert not first["tree"] and not second["tree"]
    assert first["reasons"] == second["reasons"] != []


UNEVEN = [torch.ones(30, dtype=torch.int64), (torch.arange(30) > 0).long()]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("parts", UNEVEN,
                         ids=["an empty rank", "a rank of one node"])  # fmt: skip
@pytest.mark.parametrize("layer", ["GCN", "SAGE", "MaxK"])
def test_uneven_ranks_run_the_same_tree(two, layer, parts):
    actual = two(compare, layer=layer, first=False, options={"partition": parts})
    assert actual[0]["tree"] and actual[0]["tree"] == actual[1]["tree"]


def widths(device: torch.device, into: int, out: int) -> tuple[int, int]:
    """Bytes that a step received, and halo nodes."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(3000, (2, 12_000), generator=generator)
    data = Data(x=torch.randn(3000, 16, generator=generator), edge_index=edges).to(device)
    model = nn.Sequential("x, edge_index", [
        (torch.nn.Linear(16, into), "x -> x"), (nn.GCNConv(into, out), "x, edge_index -> x"),
    ]).to(device)  # fmt: skip
    fast = pyg_accel.optimize(copy.deepcopy(model), data.x, data.edge_index, train=True)
    spread, share = pyg_accel.distribute(fast, data, partition="given")
    for _ in range(2):  # the first call is recorded, the second derives what it reads of the graph
        out = spread(share.x, share.edge_index)
    torch.testing.assert_close(out, model(data.x, data.edge_index), rtol=1e-4, atol=1e-5)
    spread.wire.traffic["halo"].received = 0
    spread(share.x, share.edge_index).sum().backward()
    halo = int((share.edge_index[0].unique() >= share.num_nodes).sum())
    return spread.wire.traffic["halo"].received, halo


@pytest.mark.parametrize(("into", "out"), [(128, 8), (8, 128)])
def test_the_narrower_of_x_and_xw_travels(two, into, out):
    actual = two(widths, into=into, out=out)
    rows = sum(halo for _, halo in actual)
    assert rows > 1000
    assert sum(received for received, _ in actual) == 2 * rows * 4 * min(into, out)  # and back


def test_features_that_stay_are_exchanged_and_aggregated_once(two):
    for actual in two(compare, layer="GCN wide", first=True):
        columns = actual["received"][1] / (8 * actual["halo"])
        assert columns in (F, F + 1)  # with degrees, where the tree scales edges by them
        assert actual["received"][2] == 0


def steps(device: torch.device, compiled: bool) -> str:
    torch.set_default_dtype(torch.float64)
    try:
        data = MODELS.graph()
        alone = MODELS.MODELS["JK"]().to(device)
        fast = pyg_accel.optimize(copy.deepcopy(alone), data.x.to(device),
                                  data.edge_index.to(device), train=True)  # fmt: skip
        expected = MODELS.trained(alone, MODELS.graph().to(device), MODELS.loss_of)
        spread, share = pyg_accel.distribute(fast, data)
        for layer in rewritten_layers(fast).values():
            layer.decisions.clear()
        run = torch.compile(spread, backend="eager") if compiled else spread
        actual = MODELS.trained(run, share, MODELS.loss_of)
        actual = {name.replace("_orig_mod.module.", ""): t for name, t in actual.items()}
        MODELS.assert_same(actual, expected)
        plan = str(pyg_accel.plan(fast))
        assert "exchange hx" in plan and "h = " in plan
        layers = rewritten_layers(fast).values()
        return "; ".join(str(layer.decisions[-1].choice.tree) for layer in layers)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.heavy(True)
@pytest.mark.parametrize("compiled", [False, True])
def test_three_steps_of_a_rewritten_model(two, compiled):
    first, second = two(steps, compiled=compiled)
    assert first and first == second


class Shared(torch.nn.Module):
    """One layer on the edges of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = torch.nn.Linear(F, F), nn.SAGEConv(F, H)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        h = torch.tanh(self.lin(x["a"]))
        return self.conv(h, edges["a", "r", "a"]) + self.conv(h, edges["a", "s", "a"])


def of_one_size(device: torch.device) -> tuple[list[int], int]:
    torch.set_default_dtype(torch.float64)
    try:
        data, nodes = HeteroData(), torch.arange(20)
        data["a"].x = torch.randn(20, F)
        data["a", "r", "a"].edge_index = torch.stack([torch.randint(20, (40,)), nodes.repeat(2)])
        targets = torch.cat([nodes, nodes[:10]])
        data["a", "s", "a"].edge_index = torch.stack([torch.randint(20, (30,)), targets])
        data, model = data.to(device), Shared().to(device)
        inputs = data.x_dict, data.edge_index_dict
        fast = pyg_accel.optimize(copy.deepcopy(model), *inputs, train=True)
        expected = model(*inputs)
        (conv,) = rewritten_layers(fast).values()
        conv.decisions.clear()
        spread, share = pyg_accel.distribute(fast, data, partition={"a": (nodes >= 10).long()})
        for _ in range(3):
            out = spread(share.x_dict, share.edge_index_dict)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        return [e.size(1) for e in share.edge_index_dict.values()], len(conv.decisions)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_on_two_graphs_that_are_of_one_size_on_one_rank(two):
    assert two(of_one_size) == [([20, 20], 2), ([20, 10], 2)]


def cached(device: torch.device) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        data = graph(device)
        model = nn.GCN(F, 8, 2, 3, cached=True).to(device)
        expected = model(data.x, data.edge_index)
        spread, share = pyg_accel.distribute(model, data)
        torch.testing.assert_close(spread(share.x, share.edge_index), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_results_that_layers_cached_of_the_whole_graph_are_dropped(two):
    two(cached)


def other_way_round(device: torch.device) -> str:
    data = graph(device)
    spread, share = pyg_accel.distribute(nn.GCN(F, 8, 2, 3).to(device), data)
    with pytest.raises(ValueError, match="before distribute") as error:
        pyg_accel.optimize(spread, share.x, share.edge_index)
    return str(error.value)


def test_a_distributed_model_is_not_rewritten(two):
    two(other_way_round)
