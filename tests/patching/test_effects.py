"""A message that does what cannot be taken back runs once a call, on ordinary tensors."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as fn
from torch_geometric.nn import EdgeConv, MessagePassing

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 60, 400, 24
CALLS: list[int] = []
COUNTS = {"calls": 0}
SEEN = torch.zeros(1)
FUNCTIONS = {"tanh": torch.tanh, "twice": lambda t: 2 * t}
TOTAL = 0
GENERATOR = torch.Generator()


class Counter:
    """An object outside of the layer."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


COUNTER, DRAW = Counter(), random.random


class Layer(MessagePassing):
    def __init__(self, message: Callable[..., Tensor]) -> None:
        super().__init__(aggr="mean")
        self.says = message
        self.generator, self.counter = torch.Generator().manual_seed(3), Counter()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.says(self, x_i, x_j)

    def helper(self, x: Tensor) -> Tensor:
        return x * random.random()


def no_formula(x: Tensor) -> Tensor:
    return x.cumsum(0)


def appended(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    CALLS.append(1)
    return no_formula(j)


def counted(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return no_formula(j)


def assigned(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return no_formula(j)


def imported(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    from random import random as draw

    return no_formula(j * draw())


def changed(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    SEEN.add_(1)
    return no_formula(j)


def of_the_layer(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    self.counter.count()
    return no_formula(j)


def a_closure(self: Layer, i: Tensor, j: Tensor) -> Tensor:
    def inner(t: Tensor) -> Tensor:
        return t * random.random()

    return no_formula(inner(j))


EFFECTS: dict[str, Callable[..., Tensor]] = {
    "numpy": lambda self, i, j: no_formula(j * torch.from_numpy(np.random.rand(len(j), 1)).float()),
    "python": lambda self, i, j: no_formula(j * random.random()),
    "a helper": lambda self, i, j: no_formula(self.helper(j)),
    "its generator": lambda self, i, j: no_formula(
        j * torch.rand(len(j), 1, generator=self.generator)
    ),
    "a generator": lambda self, i, j: no_formula(j * torch.rand(len(j), 1, generator=GENERATOR)),
    "printed": lambda self, i, j: (print("message"), no_formula(j))[1],
    "time": lambda self, i, j: (time.time(), no_formula(j))[1],
    "appended": appended,
    "counted": counted,
    "assigned": assigned,
    "imported": imported,
    "changed": changed,
    "of the layer": of_the_layer,
    "a closure": a_closure,
    "another's method": lambda self, i, j: (COUNTER.count(), no_formula(j))[1],
    "its bound method": lambda self, i, j: (DRAW(), no_formula(j))[1],
}


def run(message: Callable[..., Tensor], patched: bool) -> list[Any]:
    """What three calls return and leave behind."""
    CALLS.clear()
    COUNTS["calls"] = globals()["TOTAL"] = 0
    SEEN.zero_()
    COUNTER.calls = 0
    GENERATOR.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    layer, x, edges = Layer(message), torch.randn(N, F), torch.randint(0, N, (2, E))
    handle = pyg_accel.patch() if patched else None
    outs = [layer(x, edges) for _ in range(3)]
    if handle is not None:
        handle.remove()
    state = [*CALLS, COUNTS["calls"], TOTAL, SEEN.clone(), layer.counter.calls, COUNTER.calls]
    drawn = [torch.rand(1, generator=g) for g in (None, GENERATOR, layer.generator)]
    return [*outs, *state, *drawn, random.random(), np.random.rand()]


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_message_does_outside_of_its_layer_is_done_once(name, capsys):
    stock, text = run(EFFECTS[name], patched=False), capsys.readouterr().out
    patched = run(EFFECTS[name], patched=True)
    assert capsys.readouterr().out == text
    torch.testing.assert_close(patched, stock)


class Noisy(torch.nn.Module):
    """A network of the user with numbers of NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(x).cumsum(0)

    def noise(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


def test_a_network_that_draws_numbers_of_numpy_runs_once():
    def outputs() -> list[Any]:
        np.random.seed(0)
        return [EdgeConv(Noisy())(x, edges), np.random.rand()]

    x, edges = torch.randn(N, F), torch.randint(0, N, (2, E))
    stock = outputs()
    with pyg_accel.patched():
        torch.testing.assert_close(outputs(), stock)


# What a message may ask of a tensor where the answer tells which tensor it is.
QUESTIONS: dict[str, Callable[..., Any]] = {
    "type": lambda i, j: type(j) is Tensor,
    "class": lambda i, j: j.__class__ is Tensor,
    "leaf": lambda i, j: j.is_leaf,
    "leaf of both": lambda i, j: (i + j).is_leaf,
    "requires_grad": lambda i, j: (i * j).requires_grad,
    "id": lambda i, j: id(j) == id(j),
    "data_ptr": lambda i, j: j.data_ptr() == j.data_ptr(),
    "getattr": lambda i, j: getattr(j, "data_ptr")() == j.data_ptr(),  # noqa: B009
    "storage": lambda i, j: j.untyped_storage().nbytes() == j.numel() * 4,
    "grad_fn": lambda i, j: j.grad_fn is None,
    "version": lambda i, j: j._version == 0,
    "base": lambda i, j: j._base is None,
    "view": lambda i, j: j._is_view(),
    "grad": lambda i, j: j.grad is None,
    "stride": lambda i, j: j.stride() == (F, 1),
    "text": lambda i, j: str(j).startswith("tensor"),
    "isinstance": lambda i, j: isinstance(j, Tensor),
}


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("grad", ["off", "none", "features"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_message_that_asks_what_its_tensors_are_gets_the_answer_of_stock(name, grad):
    asks = QUESTIONS[name]
    layer = Layer(lambda self, i, j: 2 * j if asks(i, j) else 3 * j)
    x = torch.randn(N, F, requires_grad=grad != "none")
    edges = torch.randint(0, N, (2, E))
    with torch.set_grad_enabled(grad != "off"):
        stock = layer(x, edges)
        with pyg_accel.patched():
            for _ in range(2):
                torch.testing.assert_close(layer(x, edges), stock)


SHIFT = torch.full((F,), 0.5)
HARMLESS: dict[str, Callable[..., Tensor]] = {
    "functional": lambda self, i, j: fn.relu(i - j),
    "a function": lambda self, i, j: FUNCTIONS["twice"](j) + FUNCTIONS["tanh"](i),
    "a tensor": lambda self, i, j: j * SHIFT,
    "builtins": lambda self, i, j: max(2.0, float(abs(-3))) * j if isinstance(i, Tensor) else j,
    "own containers": lambda self, i, j: sum([t.relu() for t in (i, j)]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_message_that_reads_functions_and_constants_is_accelerated(name, report_of):
    layer, x, edges = Layer(HARMLESS[name]), torch.randn(N, F), torch.randint(0, N, (2, E))
    layer.counter = None
    stock = layer(x, edges)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edges), stock, rtol=1e-4, atol=1e-5)
    assert [row.reason for row in report_of()] == [""]


def test_the_report_says_what_a_message_reads(report_of):
    layer, x, edges = Layer(EFFECTS["python"]), torch.randn(N, F), torch.randint(0, N, (2, E))
    with pyg_accel.patched():
        layer(x, edges)
    assert [row.reason for row in report_of()] == ["a message that reads 'random'"]


class Cycle(MessagePassing):
    """A layer with containers that contain themselves."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.list, self.table = [], {"two": 2.0}
        self.list.append(self.list)
        self.table["table"] = self.table

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.table["two"] * len(self.list)


def test_containers_that_contain_themselves_are_read_once():
    layer, x, edges = Cycle(), torch.randn(N, F), torch.randint(N, (2, E))
    expected = layer(x, edges)
    with pyg_accel.patched():
        for _ in range(3):
            torch.testing.assert_close(layer(x, edges), expected)
        layer.table["two"] = 3.0
        torch.testing.assert_close(layer(x, edges), 1.5 * expected)
