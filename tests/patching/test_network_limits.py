"""Networks on every edge: precision, memory, what has to look at all edges, sizes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import conv as pyg

import pyg_accel
from pyg_accel.patching import networks
from pyg_accel.patching.rules import concatenation
from pyg_accel.settings import settings
from tests.patching.edge_networks import LAYERS, E, N, X, case, mlp, world


def test_small_differences_of_large_positions_keep_their_digits():
    """The layer of a difference is moved to the nodes only where it loses nothing by that."""
    settings.always = True
    layer = pyg.PointNetConv(mlp(3, 32, 32), add_self_loops=False)
    pos = 1000 + torch.rand(N, 3) / 100
    edges = world("edges")[0]
    expected = layer.double()(None, pos.double(), edges)
    layer.float()
    with pyg_accel.patched():
        actual = layer(None, pos, edges)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-6)


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
        actual = again(*args)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
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

    def hook(module: nn.Module, inputs: Any, made: Any) -> None:
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
