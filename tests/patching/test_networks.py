"""Networks on every edge: matrices of edges by algebra, and the rest in blocks of target rows."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MLP
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.aggr import MaxAggregation

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.ops import blocked
from pyg_accel.patching import networks
from pyg_accel.patching.rules import concatenation
from pyg_accel.settings import settings
from tests.user_layers import Weighted, written

N, E = 40, 300


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Mine(Weighted):
    """A user's network of both ends and the edge."""

    def __init__(self, network: nn.Module, aggr: str = "sum") -> None:
        super().__init__(aggr, network=network)

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return self.network(torch.cat([x_i, x_j, w], dim=-1))


def best(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    """Looks at the largest number of a message, and at where it is."""
    out = self.network(torch.cat([x_i, x_j], dim=-1))
    best, place = out.max(dim=-1, keepdim=True)
    least, _ = torch.min(out, 1, True)
    return (out - least) / (best - least + 1) * (1 + place.to(out.dtype))


# A matrix of every edge, chosen by a product of the user's own.
PRODUCT = written(Weighted, message=lambda self, x_j, w: torch.bmm(
    x_j.unsqueeze(1), self.network(w).view(-1, 18, 20)).view(-1, 20))  # fmt: skip
BEST = written(message=best)
# Reads the same features as sources and as targets, and others that are made of them.
NORMALISED_PRODUCT = written(
    propagate_type=dict(x=Any, wave=Any),
    forward=lambda self, x, edge_index: self.propagate(edge_index, x=x, wave=x.sin()),
    message=lambda self, x_i, x_j, wave_j: nn.functional.layer_norm(
        x_i * x_j + wave_j, x_j.shape[1:]),
)  # fmt: skip


@pytest.fixture
def blocks(monkeypatch) -> None:
    """Accelerate graphs of any size, in blocks of few edges; edge features wait for them too."""
    settings.always = True
    monkeypatch.setattr(blocked, "edges_of_a_block", lambda *_: 32)
    monkeypatch.setattr(concatenation, "FEWEST_BYTES", 0)


@pytest.fixture(params=["in blocks", "at once"])
def pieces(request, blocks, monkeypatch) -> None:
    """In blocks; and on all edges at once, as on a GPU with room for it."""
    if request.param == "at once":
        monkeypatch.setattr(networks, "fits_whole", lambda *_: True)


def world(*names: str, nodes: int = N, edges: int = E) -> tuple[Any, ...]:
    """A graph with a hub, duplicates and idle nodes, and what layers take beside it."""
    edge_index = torch.randint(0, nodes - 4, (2, edges))
    edge_index[1, :70] = 3
    edge_index[:, 70:80] = edge_index[:, 80:90]
    made = {
        "x": torch.randn(nodes, 18, dtype=torch.double, requires_grad=True),
        "pos": torch.randn(nodes, 3, dtype=torch.double, requires_grad=True),
        "normal": torch.randn(nodes, 3, dtype=torch.double, requires_grad=True),
        "e": torch.randn(edges, 5, dtype=torch.double, requires_grad=True),
        "edges": edge_index,
    }
    if "history" in names:
        made["history"] = torch.randn(nodes, 3, 18, dtype=torch.double, requires_grad=True)
    return tuple(made[name] for name in names)


X_E, X = ("x", "edges", "e"), ("x", "edges")
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "nn": (lambda: pyg.NNConv(18, 20, mlp(5, 7, 360)), X_E),
    "nn-mean": (lambda: pyg.NNConv(18, 20, mlp(5, 7, 9, 360), aggr="mean"), X_E),
    "nn-linear": (lambda: pyg.NNConv(18, 20, nn.Linear(5, 360, bias=False)), X_E),
    "nn-max": (lambda: pyg.NNConv(18, 20, mlp(5, 360), aggr="max"), X_E),
    "nn-mlp": (lambda: pyg.NNConv(18, 20, MLP([5, 7, 360], norm=None)), X_E),
    "nn-in-place": (lambda: pyg.NNConv(18, 20, nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 360))), X_E),
    "product": (NORMALISED_PRODUCT, X),
    "bmm": (lambda: PRODUCT("mean", network=mlp(5, 7, 360)), X_E),
    "edge": (lambda: pyg.EdgeConv(mlp(36, 20, 24)), X),
    "edge-mean": (lambda: pyg.EdgeConv(mlp(36, 20, 24), aggr="mean"), X),
    "edge-several": (lambda: pyg.EdgeConv(mlp(36, 20, 24), aggr=["sum", "max", "std"]), X),
    "edge-elu": (
        lambda: pyg.EdgeConv(MLP([36, 20, 24, 8], norm=None, act="elu"), aggr="sum"), X),
    "edge-layer-norm": (lambda: pyg.EdgeConv(nn.Sequential(
        nn.Linear(36, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 24))), X),
    "edge-batch-norm-eval": (lambda: pyg.EdgeConv(MLP([36, 20, 24])).eval(), X),
    "edge-dropout-eval": (
        lambda: pyg.EdgeConv(MLP([36, 20, 24], norm=None, dropout=0.5)).eval(), X),
    "point-net": (lambda: pyg.PointNetConv(mlp(21, 20, 24)), ("x", "pos", "edges")),
    "point-net-no-network": (lambda: pyg.PointNetConv(None), ("x", "pos", "edges")),
    "point-gnn": (
        lambda: pyg.PointGNNConv(mlp(18, 3), mlp(21, 20, 24), mlp(24, 18)), ("x", "pos", "edges")),
    "ppf": (
        lambda: pyg.PPFConv(mlp(22, 20, 24), add_self_loops=False),
        ("x", "pos", "normal", "edges")),
    "cg": (lambda: pyg.CGConv(18, 5), X_E),
    "pna": (
        lambda: pyg.PNAConv(
            18, 20, ["mean", "max", "std"], ["identity", "amplification"],
            torch.tensor([4, 5, 9, 9]), edge_dim=5, towers=2, pre_layers=2,
        ),
        X_E,
    ),
    "dna": (lambda: pyg.DNAConv(18), ("history", "edges")),
    "dna-heads": (lambda: pyg.DNAConv(18, heads=3, bias=False), ("history", "edges")),
    "best": (lambda: BEST("mean", network=mlp(36, 20, 24)), X),
    "mine": (lambda: Mine(mlp(41, 20, 24)), X_E),
    "mine-max": (lambda: Mine(mlp(41, 20, 20, 24), aggr="max"), X_E),
}  # fmt: skip


def case(name: str, **sizes: int) -> tuple[Any, tuple[Any, ...]]:
    """A layer, and what it is called with."""
    make, names = LAYERS[name]
    return make().double(), world(*names, **sizes)


@pytest.mark.one_of(5)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_stock(name, same_as_stock, report_of):
    layer, args = case(name)
    same_as_stock(layer, *args)
    assert any("network" in row.formula or "outer" in row.formula for row in report_of())


class Sloped(Mine):
    """Reads numbers of the layer and of the module, and a buffer."""

    def __init__(self) -> None:
        super().__init__(mlp(41, 20, 24))
        self.slope = 0.1
        self.register_buffer("shift", torch.randn(24))

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        out = nn.functional.leaky_relu(super().message(x_i, x_j, w), self.slope)
        return nn.functional.layer_norm(out, (24,), None, self.shift.to(out.dtype), EPSILON)


EPSILON = 1e-5


def scale_parameters(layer: nn.Module) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.5)


def replace_a_weight(layer: nn.Module) -> None:
    part = next(m for m in layer.modules() if isinstance(m, nn.Linear))
    part.weight = nn.Parameter(part.weight.detach() * 2)


def turn_a_network_off(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, part in module._modules.items():
            if isinstance(part, nn.ReLU):
                module._modules[name] = nn.Identity()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameters": scale_parameters,
    "a weight": replace_a_weight,
    "an activation": turn_a_network_off,
    "a number": lambda layer: setattr(layer, "slope", 0.7),
    "a buffer": lambda layer: layer.register_buffer("shift", torch.ones(24)),
    "a buffer in place": lambda layer: layer.shift.mul_(3),
    "a global": lambda layer: globals().__setitem__("EPSILON", EPSILON * 1e4),
    "no gradients": lambda layer: layer.requires_grad_(False),
    "another reduction": lambda layer: setattr(layer, "aggr_module", MaxAggregation()),
}  # fmt: skip


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_network_reads_may_change_between_warm_calls(change, monkeypatch, same_as_stock):
    monkeypatch.setitem(globals(), "EPSILON", 1e-5)
    layer, args = Sloped().double(), world(*X_E)
    with pyg_accel.patched():
        for _ in range(3):
            before = layer(*args)
        with traces() as entered:
            layer(*args)
        assert not entered
        CHANGES[change](layer)
        same_as_stock(layer, *args)
        with traces() as entered:
            assert not torch.equal(layer(*args), before) or change == "no gradients"
        assert not entered


@pytest.mark.one_of(3)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", LAYERS)
def test_programs_serve_graphs_of_other_sizes(name, train):
    make, names = LAYERS[name]
    layer = make().double()
    stock = copy.deepcopy(layer)
    sizes = (40, 300), (40, 300), (60, 300), (60, 500), (45, 501), (90, 333), (40, 900)
    for nodes, edges in sizes:
        args = world(*names, nodes=nodes, edges=edges)
        with pyg_accel.patched(), torch.set_grad_enabled(train), traces() as entered:
            out = layer(*args)
        with torch.set_grad_enabled(train):
            right = stock(*args)
        torch.testing.assert_close(out, right)
        if train:
            leaves = [t for t in (*args, *layer.parameters()) if t.requires_grad]
            others = [t for t in (*args, *stock.parameters()) if t.requires_grad]
            for mine, true in zip(torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True),
                                  torch.autograd.grad(right.sin().sum(), others, allow_unused=True),
                                  strict=True):  # fmt: skip
                torch.testing.assert_close(mine, true)
        assert not entered or edges < 900


@pytest.mark.usefixtures("pieces")
def test_layers_of_a_class_share_a_program_if_their_numbers_are_equal(same_as_stock):
    one, other, third = (Sloped().double() for _ in range(3))
    third.slope = 0.7
    args = world(*X_E)
    with pyg_accel.patched():
        for _ in range(3):
            one(*args)
        with traces() as entered:
            other(*args)
        assert not entered
        same_as_stock(other, *args)
        same_as_stock(third, *args)


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "nn-mean", "nn-max", "edge", "mine"])
@pytest.mark.parametrize("edges", [0, 1])
def test_graphs_with_next_to_nothing_in_them_equal_stock(name, edges, same_as_stock):
    make, names = LAYERS[name]
    x, edge_index, *rest = world(*names)
    rest = [t.detach()[:edges].requires_grad_() for t in rest]
    same_as_stock(make().double(), x, edge_index[:, :edges], *rest)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", ["nn", "nn-max", "edge", "mine-max"])
def test_blocks_of_targets_without_edges_equal_stock(name, same_as_stock, report_of):
    make, names = LAYERS[name]
    args = [torch.cat([t.detach(), t.detach()]).requires_grad_() if name in ("x", "pos") else t
            for name, t in zip(names, world(*names), strict=True)]  # fmt: skip
    same_as_stock(make().double(), *args)
    assert any("in blocks" in row.formula for row in report_of())


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "edge", "mine"])
def test_the_other_flow_and_two_kinds_of_nodes_equal_stock(name, same_as_stock):
    make, names = LAYERS[name]
    layer = make().double()
    layer.flow = "target_to_source"
    same_as_stock(layer, *world(*names))
    if name != "mine":
        layer.flow = "source_to_target"
        x, edge_index, *rest = world(*names)
        edge_index[1] %= 11
        same_as_stock(layer, (x, x.detach()[:11].clone().requires_grad_()), edge_index, *rest)


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "nn-max", "edge-mean", "mine", "product"])
def test_gradients_have_gradients(name):
    layer, args = case(name)

    def twice() -> list[Tensor]:
        leaves = [t for t in args if t.requires_grad]
        (first,) = torch.autograd.grad(layer(*args).sin().sum(), leaves[:1], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [*leaves, *layer.parameters()],
                                        allow_unused=True))  # fmt: skip

    expected = twice()
    with pyg_accel.patched():
        found = twice()
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("blocks")
def test_features_that_no_edge_reads_do_not_matter():
    """Rows of few edges are filled up with zeros, not with what happens to be in memory."""
    layer = pyg.NNConv(18, 20, mlp(5, 7, 360)).double()
    x, edges, e = (t.detach() for t in world(*X_E))
    x[0], x[N - 1] = torch.inf, torch.nan
    reached = layer(x, edges, e)
    with pyg_accel.patched():
        found = layer(x, edges, e)
    torch.testing.assert_close(found, reached, equal_nan=True)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nn", "edge-mean"])
def test_other_dtypes_stay_close_to_stock(name, dtype, same_as_stock):
    make, names = LAYERS[name]
    args = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t
            for t in world(*names)]  # fmt: skip
    same_as_stock(make().to(dtype), *args, rtol=5e-2 if dtype == torch.bfloat16 else 1e-4)


# -- precision ------------------------------------------------------------------------------------


def test_small_differences_of_large_positions_keep_their_digits():
    """The layer of a difference is moved to the nodes only where it loses nothing by that."""
    settings.always = True
    layer = pyg.PointNetConv(mlp(3, 32, 32), add_self_loops=False)
    pos = 1000 + torch.rand(N, 3) / 100
    edges = world("edges")[0]
    expected = layer.double()(None, pos.double(), edges)
    layer.float()
    with pyg_accel.patched():
        found = layer(None, pos, edges)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.one_of(2)
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", ["nn", "nn-mean", "edge", "edge-several", "mine", "cg", "dna"])
def test_no_tensor_of_edges_times_features_is_made(name, largest_result):
    make, names = LAYERS[name]
    layer = make().double()
    edges = torch.randint(0, N, (2, 4000))
    args = [edges if t is None else t for t in (
        None if n == "edges" else torch.randn(4000, 5, dtype=torch.double) if n == "e" else t
        for n, t in zip(names, world(*names), strict=True))]  # fmt: skip

    def largest() -> int:
        with largest_result() as seen:
            layer(*args).sum().backward()
        return seen.numbers

    assert largest() >= 4000 * 18
    with pyg_accel.patched():
        assert largest() < 4000 * 18


# -- what has to look at all edges ----------------------------------------------------------------


class Does(nn.Module):
    """A function of messages as a part of a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, messages: Tensor) -> Tensor:
        return self.function(messages)


DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch-norm": (lambda: nn.BatchNorm1d(20), "'batch_norm' on messages"),
    "dropout": (lambda: nn.Dropout(0.3), "'dropout' on messages"),
    "statistics": (lambda: Does(lambda m: m - m.mean(0)), "'mean' on messages"),
    "softmax": (lambda: nn.Softmax(dim=0), "'softmax' on messages"),
    "largest": (lambda: Does(lambda m: m - m.max(dim=0).values), "'max' on messages"),
    "turned": (lambda: Does(lambda m: m @ m.transpose(0, 1) @ m), "'transpose' on messages"),
}


def with_part(part: nn.Module) -> Any:
    network = nn.Sequential(nn.Linear(36, 20), part, nn.ReLU(), nn.Linear(20, 24))
    return pyg.EdgeConv(network).double()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", DECLINED)
def test_what_looks_at_several_edges_stays_with_pyg(name, report_of):
    make, reason = DECLINED[name]
    layer, args = with_part(make()), world(*X)
    again = copy.deepcopy(layer)
    torch.manual_seed(1)
    expected = layer(*args)
    torch.manual_seed(1)
    with pyg_accel.patched():
        found = again(*args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for one, other in zip(layer.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [reason in row.reason for row in report_of()] == [True]


@pytest.mark.parametrize("name", DECLINED)
def test_programs_of_a_gpu_with_room_look_at_all_edges(name, blocks, monkeypatch, report_of):
    """They write the messages out as PyG does, so that batches, sizes and draws are the same."""
    monkeypatch.setattr(networks, "fits_whole", lambda *_: True)
    layer = with_part(DECLINED[name][0]())
    again = copy.deepcopy(layer)
    pyg_accel.patch(again)
    for number in range(6):
        x, edges = world("x", "edges")
        args = x, edges[:, : E - 9 * (number % 3)]
        results = []
        for each in (layer, again):
            torch.manual_seed(number)
            out = each(*args)
            grads = torch.autograd.grad(out.sin().sum(), [x, *each.parameters()])
            results.append([out, *grads, *each.buffers(), torch.rand(1)])
        torch.testing.assert_close(results[1], results[0])
    assert [row.reason for row in report_of()] == [""]


@pytest.mark.usefixtures("blocks")
def test_a_network_may_read_how_many_edges_there_are(same_as_stock):
    same_as_stock(with_part(Does(lambda m: m * m.size(0))), *world(*X))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", ["nn", "edge"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_hook_on_a_part_of_the_network_sees_what_it_sees_in_stock(name, kind, report_of):
    (layer, args), seen = case(name), []

    def hook(module: nn.Module, given: Any, made: Any) -> None:
        seen.append(made[0].detach().clone() if isinstance(made, tuple) else made.detach().clone())

    last = layer.nn[-1]
    (last.register_forward_hook if kind == "forward" else last.register_full_backward_hook)(hook)
    layer(*args).sum().backward()
    with pyg_accel.patched():
        layer(*args).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
    assert all(row.reason for row in report_of())


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", ["nn", "edge"])
def test_autocast_stays_with_pyg(name, report_of):
    layer, args = case(name)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(*args)
        with pyg_accel.patched():
            torch.testing.assert_close(layer(*args), expected, rtol=0, atol=0)
    assert all("autocast" in row.reason for row in report_of())


@pytest.mark.usefixtures("blocks")
def test_state_and_parameters_are_as_before():
    layer, args = case("nn")
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pyg_accel.patched():
        layer(*args).sum().backward()
        assert layer.state_dict().keys() == before.keys()
    for name, t in layer.state_dict().items():
        torch.testing.assert_close(t, before[name], rtol=0, atol=0)
    assert not hasattr(layer, "_pyg_accel_patched")


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "edge"])
def test_blocks_of_inference_mode_serve_training(name, same_as_stock):
    layer, args = case(name)
    with pyg_accel.patched():
        with torch.inference_mode():
            layer(*args)
        same_as_stock(layer, *args)


@pytest.mark.usefixtures("blocks")
def test_a_checkpoint_runs_blocks_again(same_as_stock):
    layer, args = case("edge")
    expected = torch.autograd.grad(layer(*args).sin().sum(), args[0])[0]
    with pyg_accel.patched():
        out = checkpoint(layer, *args, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), args[0])[0], expected)


# -- at default settings --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nn", "edge"])
def test_large_graphs_run_in_blocks_at_default_settings(name, report_of):
    edges, nodes = (50_000, 5_000) if name == "nn" else (100_000, 2_000)
    layer = LAYERS["nn"][0]() if name == "nn" else pyg.EdgeConv(mlp(128, 20, 24))
    edge_index = torch.randint(0, nodes, (2, edges))
    args = (torch.randn(nodes, 18), edge_index, torch.randn(edges, 5))
    if name == "edge":
        args = (torch.randn(nodes, 64), edge_index)
    expected = layer(*args)
    with pyg_accel.patched():
        for _ in range(3):
            torch.testing.assert_close(layer(*args), expected, rtol=1e-4, atol=1e-4)
    (row,) = report_of()
    assert "in blocks" in row.formula and row.calls == 3


def test_a_plan_of_a_small_graph_is_none_of_a_large_one(report_of, monkeypatch):
    """Features that a layer makes of edges are written out where they are few, and only there."""
    monkeypatch.setattr(concatenation, "FEWEST_BYTES", 1 << 20)
    settings.always = True
    layer, x, formulas = pyg.CGConv(16, 4).eval(), torch.randn(500, 16), []
    sizes = (2_000, 2_000, 40_000, 40_000, 2_000)
    calls = [(x, torch.randint(500, (2, edges)), torch.randn(edges, 4)) for edges in sizes]
    right = [layer(*call) for call in calls]
    with pyg_accel.patched():
        for call, expected in zip(calls, right, strict=True):
            pyg_accel.reset_report()
            torch.testing.assert_close(layer(*call), expected, rtol=1e-4, atol=1e-4)
            formulas += [row.formula for row in report_of()]
    assert ["network" in formula for formula in formulas] == [False, False, True, True, False]


def test_differences_of_a_few_numbers_are_blocks_where_that_is_no_slower(report_of, monkeypatch):
    layer = pyg.PointNetConv(mlp(3, 20, 24), add_self_loops=False)
    args = (None, torch.randn(500, 3), torch.randint(0, 500, (2, 400_000)))
    with pyg_accel.patched():
        with torch.no_grad():
            expected = layer(*args)
        (row,) = report_of()
        assert "a few numbers" in row.reason
        pyg_accel.reset_report()
        monkeypatch.setattr(networks, "free_bytes", lambda device: 0)
        with torch.no_grad():
            torch.testing.assert_close(layer(*args), expected)
        (row,) = report_of()
    assert "in blocks" in row.formula
