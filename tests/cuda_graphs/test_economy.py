"""Captures are made as long as they pay: what they cost and save is simulated, so no GPU is needed.

A model's forward pass takes a second by a clock of the tests, eagerly and in trials; a replay takes
what a test says.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv, global_mean_pool

import pyg_accel
from pyg_accel.cuda_graphs import ledger
from pyg_accel.cuda_graphs.capture import Captured, Memory
from pyg_accel.cuda_graphs.engine import Engine
from pyg_accel.runtime import machine
from pyg_accel.settings import settings
from tests.cuda_graphs.models import close, conv, module, same

FREE, MOST = 30, 1.05  # calls, and how much longer than eager ones those after them may take


class Clock:
    """Seconds that have passed, and those that a replay takes."""

    now, replay, captures = 0.0, 0.3, 0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, rerun: type[Captured]) -> Clock:
    clock = Clock()

    class Simulated(rerun):
        repeats = True

        def __init__(self, function: Callable[[], list[Tensor]], inputs: Any, memory: Memory):
            super().__init__(function, inputs, memory)
            clock.captures += 1
            with machine.as_captured():
                for _ in range(3):  # as a capture does: two that warm up, and its own
                    function()

        def forward(self) -> Any:
            before = clock.now
            outs = super().forward()
            clock.now = before + clock.replay
            return outs

    monkeypatch.setattr(ledger, "clock", lambda: clock.now)
    monkeypatch.setattr(Engine, "recorder", Simulated)
    return clock


class Slow(torch.nn.Module):
    """A layer whose forward pass takes a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.conv, self._clock = SAGEConv(6, 4).double(), [clock]

    def forward(self, x: Tensor, edge_index: Tensor, *more: Any, **other: Any) -> Tensor:
        self._clock[0].now += 1.0
        return self.conv(x, edge_index)


def graph(nodes: int, edges: int | None = None) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(nodes, (2, edges or 3 * nodes), generator=numbers)
    return torch.randn(nodes, 6, generator=numbers, dtype=torch.float64), edge_index


def wide(i: int) -> tuple[Any, ...]:
    """Sizes from ten to a thousand."""
    number = float(torch.rand((), generator=torch.Generator().manual_seed(i)))
    return graph(int(10 * 10 ** (2 * number)))


def odd(i: int) -> tuple[Any, ...]:
    """Every third call has one more argument that does not go along with anything."""
    rows = 3 + i % 5 if i % 3 == 0 else 20 + i % 7
    return (*graph(20 + i % 7), torch.ones(rows, 2))


# What a model is called with, by the number of the call.
CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "twelve sizes in turn": lambda i: graph(20 + i % 12),
    "twelve constants in turn, each a kind of its own": lambda i: (*graph(20), i % 12 / 2),
    "an integer that is new in each call": lambda i: (*graph(20), 7 * (i + 1)),
    "twelve sizes in turn, each with an integer of its own": lambda i: (
        *graph(20 + i % 12), 7 * (i % 12)),
    "each size as often as it takes to be captured, and never again": lambda i: graph(20 + i // 4),
    "twelve sizes in turn, each for a while": lambda i: graph(20 + i // 7 % 12),  # they pay little
    "sizes that fit no earlier bucket": lambda i: graph(int(20 * 1.07 ** (i % 90))),
    "sizes from ten to a thousand": wide,
    "odd": odd,
}  # fmt: skip


@pytest.mark.one_of(11)
@pytest.mark.parametrize("replay", [0.3, 0.97, 1.3])
@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("calls", CALLS)
def test_no_pattern_takes_much_longer_than_eager_calls(calls, dynamic, replay, clock):
    clock.replay = replay
    fast = pyg_accel.graphed(Slow(clock), dynamic=dynamic)
    start, worst = 0.0, 0.0
    with torch.no_grad():
        for i in range(400):
            if i == FREE:
                start = clock.now
            fast(*CALLS[calls](i))
            if i >= FREE:
                worst = max(worst, clock.now - start - MOST * (i + 1 - FREE))
    assert clock.now - start <= MOST * (400 - FREE)
    assert worst <= 20  # calls, at any time: some captures of the free calls are compared later


@pytest.mark.parametrize(
    "calls", [name for name in CALLS if name.startswith("twelve sizes in turn")][:2]
)
def test_captures_that_pay_go_on_being_made(calls, clock, replays, reasons):
    """Of twelve sizes in turn eight are captured in the end, and no longer make room."""
    fast = pyg_accel.graphed(Slow(clock), dynamic=False)
    with torch.no_grad():
        for i in range(2000):
            fast(*CALLS[calls](i))
        assert len(fast.captures) == 8
        before, made, replayed = clock.now, clock.captures, replays()
        for i in range(240):
            fast(*CALLS[calls](i))
    assert clock.captures == made and clock.now - before < 0.6 * 240
    assert replays() == replayed + 8 * 20
    assert any(re.fullmatch(f"recaptured too often: {made} captures, [0-9]+ replays", r)
               for r in reasons())  # fmt: skip


@pytest.mark.parametrize("shapes", [2, 5, 8])
def test_shapes_in_rotation_that_fit_are_each_captured_once(shapes, clock, replays):
    fast = pyg_accel.graphed(Slow(clock), dynamic=False)
    with torch.no_grad():
        for i in range(1500):
            fast(*graph(20 + i % shapes))
        assert len(fast.captures) == clock.captures == shapes
        before = replays()
        for i in range(10 * shapes):
            fast(*graph(20 + i % shapes))
    assert replays() == before + 10 * shapes and clock.captures == shapes


def test_replays_slower_than_eager_calls_are_not_used(clock, replays, reasons):
    clock.replay = 1.2
    fast = pyg_accel.graphed(Slow(clock))
    with torch.no_grad():
        for _ in range(12):
            fast(*graph(20))
    assert replays() == 1 and reasons() == {"a replay takes longer than an eager call"}
    assert fast.captures == []


def test_looking_at_calls_that_are_refused_is_paid_for(clock, monkeypatch, replays, reasons):
    """Each look takes half a second, and eager calls take one."""
    find, looks = Engine._find, []

    def slow(self: Engine, *args: Any) -> Any:
        looks.append(0)
        clock.now += 0.5
        return find(self, *args)

    class Waits(Slow):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = super().forward(x, edge_index)
            return out / x.size(0) if self.training else out

    monkeypatch.setattr(Engine, "_find", slow)
    fast, start = pyg_accel.graphed(Waits(clock)), 0.0
    for i in range(400):
        if i == FREE:
            start, looks = clock.now, looks.clear() or looks
        fast(*graph(20 + i % 5))
    assert not replays() and len(reasons()) == 1
    assert clock.now - start <= MOST * (400 - FREE) and len(looks) > 20
    fast.eval()  # is another kind, which is looked at from its first call on
    for i in range(10):
        fast(*graph(20 + i % 5))
    assert replays() == 7


def test_release_starts_again(clock, replays):
    fast = pyg_accel.graphed(Slow(clock), dynamic=False, max_captures=1)
    with torch.no_grad():
        for i in range(16):
            fast(*graph(20 + i // 4))
        fast(*graph(23))
        before = replays()
        fast.release()
        for _ in range(5):
            fast(*graph(40))
    assert replays() == before + 2 and len(fast.captures) == 1


def taking(then: Callable[..., Tensor]) -> torch.nn.Module:
    """The commonest model of a NeighborLoader: the targets are the first nodes."""

    def forward(self: Any, x: Tensor, edge_index: Tensor, batch_size: Any) -> Tensor:
        return then(self, self.last(self.conv(x, edge_index).relu(), edge_index), batch_size)

    return module(
        forward, conv=SAGEConv(6, 8), last=SAGEConv(8, 4), norm=torch.nn.BatchNorm1d(4)
    ).double()


TAKES = {
    "slice": lambda self, x, n: x[:n],
    "narrow": lambda self, x, n: x.narrow(0, 0, n),
    "normalised": lambda self, x, n: self.norm(x[:n]) - x[:n].mean(0),
    "log_softmax": lambda self, x, n: x[:n].log_softmax(-1),
    "all": lambda self, x, n: x,
}
READS = {
    "a factor": lambda self, x, n: x * n,
    "the others": lambda self, x, n: x[n:],
    "half": lambda self, x, n: x[: n // 2],
    "a loop": lambda self, x, n: sum((x.cos() for _ in range(n)), x),
    "the last": lambda self, x, n: x[:n].flip(0).cumsum(0).flip(0),
}


def sampled(calls: int) -> list[tuple[Any, ...]]:
    return [(*graph(60 + 3 * (i % 5), 190 + i % 9), 17 + 2 * (i % 7)) for i in range(calls)]


@pytest.fixture
def uncaptured(clock: Clock, rerun: type[Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "recorder", rerun)


@pytest.mark.parametrize("take", TAKES)
def test_slices_of_a_changing_number_of_first_nodes(take, uncaptured, replayed):
    fast = same(taking(TAKES[take]), sampled(14))
    replayed(14 - 3)
    assert len(fast.captures) <= 2 and "batch_size" in fast.captures[0]


@pytest.mark.parametrize("take", READS)
def test_other_uses_of_an_integer_are_eager_immediately(take, clock, stayed_eager):
    same(taking(READS[take]), sampled(14))
    stayed_eager()
    assert clock.captures == 0


def test_a_number_beyond_the_nodes_takes_all_of_them(uncaptured, replays):
    calls = [(*graph(24, 90), 23), (*graph(24, 90), 24), (*graph(20, 90), 23)]
    same(taking(TAKES["slice"]), [*sampled(9), *calls, *sampled(2)], dynamic=True)
    assert replays() >= 8


def test_a_tensor_that_is_given_twice(uncaptured, replayed):
    eager = conv(lambda self, x, edge_index, h: self.conv(x, edge_index) * h.sigmoid(), 6)
    fast = pyg_accel.graphed(copy.deepcopy(eager))
    for i in range(8):
        actual, (x, edge_index) = [], graph(30 + i)
        for run in (eager, fast):
            leaf = x.clone().requires_grad_()
            out = run(leaf, edge_index, leaf)
            out.square().sum().backward()
            actual.append([out.detach(), leaf.grad])
        close(actual[1], actual[0])
    replayed(5)


@pytest.mark.parametrize("number", [0, -3])
def test_numbers_that_are_no_size(number, uncaptured, replays):
    same(taking(TAKES["slice"]), [*sampled(9), (*graph(66, 194), number), *sampled(2)])
    assert replays() >= 8


def test_calls_of_one_size_with_different_integers_have_separate_recordings(uncaptured, replays):
    """A fixed graph: each number has a recording of its own, none that of another."""
    eager, (x, edge_index) = taking(TAKES["slice"]), graph(40)
    fast = pyg_accel.graphed(eager, dynamic=False)
    with torch.no_grad():
        for i in range(24):
            torch.testing.assert_close(fast(x, edge_index, 9 + i % 2),
                                       eager(x, edge_index, 9 + i % 2))  # fmt: skip
    assert len(fast.captures) == 2 and replays() == 24 - 6


def test_batches_as_dictionaries_with_their_number_of_nodes(uncaptured, replays, stayed_eager):
    def forward(self: Any, b: dict[str, Any]) -> Tensor:
        x = self.conv(b["x"], b["edge_index"]) + b["x"].new_zeros(b["n"], 4)
        return x if "batch" not in b else global_mean_pool(x, b["batch"], 4)

    for pools in (True, False):
        eager = conv(forward)
        fast = pyg_accel.graphed(eager)
        for i in range(30):
            x, edge_index = graph(40 + i % 12)
            given = {"x": x, "edge_index": edge_index, "n": len(x)}
            given |= {"batch": torch.arange(len(x)) % 4} if pools else {}
            torch.testing.assert_close(fast(given), eager(given))
        if pools:  # four graphs are a number of the model's own: eager at once
            stayed_eager()
    assert replays() == 27 and len(fast.captures) <= 2


def test_data_of_a_loader_of_neighbours_with_lists_of_numbers(uncaptured, replayed):
    eager = conv(lambda self, data: self.conv(data.x, data.edge_index)[: data.batch_size])
    fast = pyg_accel.graphed(eager)
    for x, edge_index, seeds in sampled(14):
        nodes, edges = [seeds, 20, len(x) - seeds - 20], [30, edge_index.size(1) - 30]
        data = Data(x=x, edge_index=edge_index, batch_size=seeds, n_id=torch.arange(len(x)),
                    input_id=torch.arange(seeds), num_sampled_nodes=nodes,
                    num_sampled_edges=edges)  # fmt: skip
        torch.testing.assert_close(fast(data), eager(data))
    replayed(11)


def test_a_capture_and_its_warm_up_choose_the_same_kernels_for_any_size(monkeypatch):
    """Kernels for graphs of any size, and no choice that only a call outside of a capture has."""
    seen: list[tuple[bool, bool]] = []

    def forward(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        seen.append((settings.always, machine.is_captured(x)))
        return self.conv(x, edge_index)

    looks = module(forward, conv=GATConv(6, 4, heads=2)).double()
    fast, changes = pyg_accel.graphed(looks), settings.changes
    with torch.no_grad():
        for i in range(6):
            fast(*graph(20 + i))
    assert {(False, False), (True, False), (True, True)} == set(seen)
    assert seen.count((True, True)) >= 3
    assert settings.always is False and not machine.is_captured(torch.ones(1))
    assert settings.changes == changes


@pytest.mark.parametrize("layer", ["SAGE", "GAT"])
def test_small_graphs_run_our_kernels_in_captures_alone(layer, report_of, clock):
    eager = {"SAGE": SAGEConv(6, 8), "GAT": GATConv(6, 4, heads=2)}[layer]
    pyg_accel.patch(eager)
    eager, fast = copy.deepcopy(eager), pyg_accel.graphed(eager)
    for i in range(9):
        x, edge_index = graph(30 + i)
        torch.testing.assert_close(fast(x.float(), edge_index), eager(x.float(), edge_index))
    backends = {row.backend for row in report_of() if row.layer == type(eager).__name__}
    assert {"PyG", "CUDA graph"} < backends and len(backends) > 3 - ("eager" not in backends)


def test_losses_of_linear_models_count_too(clock):
    """Not graphs alone: sizes of anything."""

    def forward(self: Any, x: Tensor) -> Tensor:
        clock.now += 1.0
        return self.linear(x)

    fast = pyg_accel.graphed(module(forward, linear=Linear(3, 3)), max_captures=2, dynamic=False)
    for i in range(300):
        fast(torch.ones(2 + i // 4 % 20, 3))
    assert clock.captures <= 30 // 4 + 300 * 0.05 // 6 + 1
