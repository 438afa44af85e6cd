"""When recordings are made, how many, and what leads to another."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, Sequential

import pyg_accel
from pyg_accel.cuda_graphs.capture import Captured
from pyg_accel.cuda_graphs.engine import Engine
from tests.cuda_graphs.models import Network, module, sampled

pytestmark = pytest.mark.usefixtures("rerun")


def test_an_attribute_set_in_each_call_is_named(reasons):
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)

    counts = module(forward, linear=Linear(3, 3), calls=0)
    fast, x = pyg_accel.graphed(counts), torch.randn(5, 3)
    for _ in range(7):
        fast(x)
    assert reasons() == {"each call changes calls"}
    assert counts.calls == 7


def test_a_changed_model_is_recorded_again(replays):
    eager = Sequential(Linear(3, 3), torch.nn.Dropout(0.5), Linear(3, 3))
    fast, x = pyg_accel.graphed(eager), torch.randn(5, 3)

    def run() -> None:
        for _ in range(6):
            torch.manual_seed(0)
            actual = fast(x)
            torch.manual_seed(0)
            torch.testing.assert_close(actual, eager(x))
            actual.sum().backward()

    run()
    before = replays()
    for change in (
        lambda: eager.eval(),
        lambda: fast.train(),
        lambda: setattr(eager[1], "p", 0.1),
        lambda: setattr(eager[0], "weight", torch.nn.Parameter(torch.ones(3, 3))),
        lambda: setattr(eager[0].weight, "data", torch.zeros(3, 3)),
        lambda: eager[2].requires_grad_(False),
        lambda: setattr(eager, "0", Linear(3, 3)),
    ):
        change()
        run()
        assert replays() > before
        before = replays()
    with torch.no_grad():
        eager[0].weight += 1  # values are read anew, nothing is recorded
    assert len(fast.captures) == 7  # train() led back to the first
    run()
    assert replays() == before + 6


def test_hooks_are_called(reasons):
    hooked, calls = Sequential(Linear(3, 3)), []
    hooked[0].register_forward_hook(lambda *_: calls.append(0))
    fast = pyg_accel.graphed(hooked)
    for _ in range(7):
        fast(torch.randn(2, 3))
    assert len(calls) == 7
    assert reasons() == {"a hook on one of its modules"}


def test_at_most_so_many_recordings():
    fast = pyg_accel.graphed(Linear(3, 3), max_captures=2, dynamic=False)
    for rows in (2, 3, 4, 5, 6):
        for _ in range(5):
            fast(torch.randn(rows, 3))
    assert len(fast.captures) == 2
    fast.release()
    assert fast.captures == []
    for _ in range(5):
        fast(torch.randn(6, 3))
    assert len(fast.captures) == 1


def test_sizes_that_never_come_again_do_not_make_recordings_for_ever(replays, reasons):
    fast = pyg_accel.graphed(sampled().float(), max_captures=2)
    for rows in [10, 11, 12, 13, *(9 + 2**k for k in range(5, 12)), 12, 13, 14]:
        x, edge_index = torch.randn(rows, 6), torch.randint(rows, (2, 3 * rows))
        fast(x, edge_index, torch.rand(3 * rows))
    assert reasons() == {"recaptured too often: 4 captures, 4 replays"}
    assert len(fast.captures) == 2
    assert replays() >= 4 + 3  # any that is large enough will do then


def test_sizes_that_change_are_named_where_they_must_not(reasons):
    fast = pyg_accel.graphed(Linear(3, 3), dynamic=False)
    for rows in range(2, 12):
        fast(torch.randn(rows, 3))
    assert reasons() == {"sizes change, and dynamic=False"}


def test_without_a_gpu_calls_are_eager(monkeypatch, reasons):
    monkeypatch.setattr(Engine, "recorder", Captured)
    fast, x = pyg_accel.graphed(Linear(3, 3)), torch.randn(5, 3)
    for _ in range(6):
        torch.testing.assert_close(fast(x), fast._original(x))
    assert reasons() == {"no CUDA graphs on device 'cpu'"}


def test_the_wrapper_is_the_model_in_all_but_its_calls():
    network = Network(pyg.SAGEConv, pyg.BatchNorm(8))
    fast = pyg_accel.graphed(network)
    assert list(fast.state_dict()) == list(network.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in network.named_parameters()]
    assert fast.first is network.first
    fast.eval()
    assert not network.training and not network.first.training and not fast.training
    network.train()
    assert fast.training
    fast.note = 3
    assert network.note == 3
    fast.double()
    assert network.head[0].weight.dtype == torch.float64
    other = pickle.loads(pickle.dumps(fast))
    assert isinstance(other, pyg_accel.cuda_graphs.Graphed)
    twin = copy.deepcopy(fast)
    assert twin.first is not network.first
    fast.load_state_dict(twin.state_dict())
    assert pyg_accel.graphed(fast)._original is network
