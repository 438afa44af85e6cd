"""Threads that call layers for the first time at once: one records, none what another does."""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

WIDTH = 8


class Gated(pyg.MessagePassing):
    """A layer of a user's own, with a parameter in its message."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.scale = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(x_i - x_j) * x_j * self.scale


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "sage": lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr=["mean", "max"]),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(WIDTH, WIDTH)),
    "gat": lambda: pyg.GATConv(WIDTH, WIDTH // 2, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, WIDTH // 2, heads=2),
    "transformer": lambda: pyg.TransformerConv(WIDTH, WIDTH // 2, heads=2),
    "pna": lambda: pyg.PNAConv(
        WIDTH, WIDTH, ["mean", "std"], ["identity"], torch.tensor([1, 5, 2])
    ),
    "a user's": Gated,
}


def given(thread: int, call: int) -> tuple[Tensor, Tensor, bool]:
    """Features, a graph, and whether to train: of other sizes and modes in each thread."""
    random = torch.Generator().manual_seed(10 * thread + call)
    nodes, edges = 12 + 7 * thread, 40 + 9 * thread + call
    x = torch.randn(nodes, WIDTH, generator=random, dtype=torch.double)
    return x, torch.randint(nodes, (2, edges), generator=random), (thread + call) % 2 == 0


def outcome(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, train: bool) -> list[Tensor]:
    """The output, and in training the gradients of the features and the parameters."""
    x = x.clone().requires_grad_(train)
    with torch.set_grad_enabled(train):
        out = layer(x, edge_index)
    if not train:
        return [out]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads are switched often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("shared", [True, False], ids=["one layer", "a layer each"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("switching")
def test_two_threads_record_at_once(name, shared, report_of):
    threads, calls = 2, 6
    start = Barrier(threads)
    layers = [LAYERS[name]().double()] * threads
    if not shared:
        layers = [copy.deepcopy(layer) for layer in layers]
    stock = copy.deepcopy(layers[0])
    expected = [[outcome(stock, *given(t, c)) for c in range(calls)] for t in range(threads)]

    def work(thread: int) -> list[list[Tensor]]:
        start.wait(60)
        return [outcome(layers[thread], *given(thread, call)) for call in range(calls)]

    with pyg_accel.patched(), ThreadPoolExecutor(threads) as pool:
        actual = list(pool.map(work, range(threads)))
        pyg_accel.reset_report()  # of calls that PyG ran while the other thread recorded
        again = [[outcome(layers[t], *given(t, c)) for c in range(calls)] for t in range(threads)]
    for ours in (actual, again):
        for right, mine in zip(expected, ours, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-8)
    assert all(row.formula for row in report_of())


@pytest.mark.usefixtures("switching")
def test_threads_that_record_different_layers_do_not_mix_them():
    names = [*LAYERS]
    layers = {name: LAYERS[name]().double() for name in names}
    stock = copy.deepcopy(layers)
    expected = {n: outcome(stock[n], *given(i, 0)) for i, n in enumerate(names)}
    start = Barrier(len(names))

    def work(thread: int) -> list[Tensor]:
        start.wait(60)
        return outcome(layers[names[thread]], *given(thread, 0))

    with ThreadPoolExecutor(len(names)) as pool, pyg_accel.patched():
        actual = dict(zip(names, pool.map(work, range(len(names))), strict=True))
    for name, right in expected.items():
        torch.testing.assert_close(actual[name], right, rtol=1e-8, atol=1e-8)


class Slow(Gated):
    """Takes a while, after it says that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Event()

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.runs.set()
        time.sleep(0.2)
        return super().message(x_i, x_j)


def test_a_checkpoint_repeats_a_call_that_began_while_another_thread_recorded():
    slow, layer = Slow().double(), pyg.SAGEConv(WIDTH, WIDTH, aggr="max").double()
    x, edge_index, _ = given(0, 0)
    expected = outcome(copy.deepcopy(layer), x, edge_index, True)
    x = x.requires_grad_()
    with pyg_accel.patched(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(slow, x, edge_index)
        assert slow.runs.wait(60)
        out = checkpoint(layer, x, edge_index, use_reentrant=False)
        other.result()
        gradients = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])
    torch.testing.assert_close([out.detach(), *gradients], expected)
