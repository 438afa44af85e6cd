"""Threads that call patched layers, and begin and end what is in force, at the same time."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv

import pyg_accel
from pyg_accel.patching import layers, overrides, programs, reasons, sampling
from pyg_accel.patching.trace import Trace
from pyg_accel.record.walk import Walk

pytestmark = pytest.mark.usefixtures("always")


@contextmanager
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_thread(function: Callable[[], object]) -> None:
    """Run a function to its end in another thread; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_blocks_of_threads_overlap(x: Tensor, edge_index: Tensor) -> None:
    layer = SAGEConv(6, 4)

    def blocks(thread: int) -> bool:
        stop, installed = time.monotonic() + 0.5, True
        while time.monotonic() < stop and installed:
            with pyg_accel.patched(layer if thread % 2 else None):
                installed = overrides.installed()
                layer(x, edge_index)
        return installed

    with frequent_switches(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(blocks, range(4)))
    assert not overrides.installed()
    assert not reasons.is_active(layer)


def test_sampled_blocks_of_threads_end_in_any_order() -> None:
    entered, left = Event(), Event()

    def first() -> None:
        with pyg_accel.sampled(4):
            entered.set()
            left.wait(10)

    with pyg_accel.patched():
        thread = Thread(target=first)
        thread.start()
        entered.wait(10)
        with pyg_accel.sampled(8):
            left.set()
            thread.join()
            assert sampling.state.key == "8 fastrand row"
        assert sampling.state.key == ""


class Keeps(MessagePassing):
    """Keeps its first messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.first is None:
            self.first = x_j.relu()
        return 2 * x_j


def test_messages_of_another_thread_are_left_to_it(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Keeps()(x, edge_index)
    layer, outs, reduce = Keeps(), [], Trace.reduce

    def call() -> None:  # with gradients, unlike that of the other thread
        outs.append(layer(x, edge_index))

    def while_another_thread_runs(*args: Any) -> list[Tensor]:
        monkeypatch.setattr(Trace, "reduce", reduce)
        in_thread(call)
        return reduce(*args)

    monkeypatch.setattr(Trace, "reduce", while_another_thread_runs)
    with pyg_accel.patched(), torch.no_grad():
        outs.append(layer(x, edge_index))
    for out in outs:
        torch.testing.assert_close(out, expected)
    assert len(outs) == 2
    assert type(layer.first) is Tensor


def test_a_layer_gets_attributes_while_it_is_left(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, copied = GCNConv(6, 4), layers.copied
    expected = layer(x, edge_index)

    def while_another_thread_runs(value: Any, shared: list[Tensor]) -> Any:
        vars(layer)[f"attribute_{len(vars(layer))}"] = 1
        layer.known = 2
        return copied(value, shared)

    monkeypatch.setattr(layers, "copied", while_another_thread_runs)
    layer.known = 1
    with pyg_accel.patched(layer):
        torch.testing.assert_close(layer(x, edge_index), expected)
    assert layer.known == 2


def test_a_layer_gets_attributes_while_it_is_recorded(
    x: Tensor, edge_index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, add = SAGEConv(6, 4), Walk.follow

    def while_another_thread_runs(*args: Any) -> None:
        vars(layer)[f"attribute_{len(vars(layer))}"] = 1
        add(*args)

    expected = layer(x, edge_index)
    monkeypatch.setattr(Walk, "follow", while_another_thread_runs)
    with pyg_accel.patched(layer):
        torch.testing.assert_close(layer(x, edge_index), expected)


def test_threads_add_layers_while_others_look_at_all_of_them(x: Tensor, edge_index: Tensor) -> None:
    layer, held = SAGEConv(6, 4), []
    with pyg_accel.patched():
        layer(x, edge_index)

        def add(_: int) -> None:
            for _ in range(20):
                held.append(SAGEConv(6, 4))
                held[-1](x, edge_index)
                programs.forget()

        with frequent_switches(), ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(4)))
