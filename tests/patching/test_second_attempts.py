"""A message that is a formula in one call and none in the next changes what it does once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch_geometric.nn import EdgeConv, MessagePassing

import pyg_accel
from pyg_accel.runtime import report as call_report

N, E, F = 500, 12_000, 24


class Layer(MessagePassing):
    """A layer whose message is a formula unless it is given features of edges."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin, self.norm = Linear(F, 1), torch.nn.BatchNorm1d(1)
        self.register_buffer("moving", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.calls, self.seen, self.plain = 0, {"sizes": []}, torch.zeros(1)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Any) -> Tensor:
        gate = torch.sigmoid(self.norm(self.lin(x_i - x_j)))
        self.calls += 1
        self.seen["sizes"].append(x_j.size(0))
        self.moving.lerp_(gate.detach().mean(), 0.1)
        self.replaced = self.replaced + gate.detach().mean()
        self.plain = self.plain + 1
        gate = torch.nn.functional.dropout(gate, 0.5, self.training)
        return gate * x_j if e is None else gate * torch.sin(x_j + e)

    def state(self) -> list[Any]:
        own = [self.calls, self.seen, self.plain, *self.buffers(), torch.rand(1)]
        return [t.clone() if isinstance(t, Tensor) else t for t in own]


def after(patched: bool, inputs: list[bool]) -> list[Any]:
    """Outputs of calls with features of edges or without, and what the layer is like afterwards."""
    torch.manual_seed(0)
    layer, x, e = Layer(), torch.randn(N, F), torch.randn(E, F)
    edge_index = torch.randint(0, N, (2, E))
    outs = []
    handle = pyg_accel.patch() if patched else None
    for features in inputs:
        outs.append(layer(x, edge_index, e if features else None).detach())
    if handle is not None:
        handle.remove()
    return [*outs, *layer.state()]


@pytest.mark.parametrize(
    "inputs",
    [[False, False], [True, True], [False, True, True], [False, False, True, False]],
    ids=["formula", "none", "formula-none", "formula-none-formula"],
)
def test_state_is_changed_once_a_call(inputs):
    torch.testing.assert_close(after(True, inputs), after(False, inputs), rtol=1e-3, atol=1e-3)


def test_verification_leaves_the_state_of_one_call(monkeypatch):
    right = after(False, [False, False])
    monkeypatch.setenv("PYG_ACCEL_VERIFY", "1")
    torch.testing.assert_close(after(True, [False, False]), right, rtol=1e-3, atol=1e-3)


IN_PLACE: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
    "features-of-edges": lambda layer, e, weight, index: e.mul_(0.5),
    "a-view-of-them": lambda layer, e, weight, index: e.view(-1)[::2].add_(1),
    "an-item": lambda layer, e, weight, index: e.__setitem__(0, 1.0),
    "an-activation": lambda layer, e, weight, index: torch.nn.functional.relu(e, inplace=True),
    "past-autograd": lambda layer, e, weight, index: e.detach().mul_(0.5),
    "out": lambda layer, e, weight, index: torch.add(e, 1, out=e),
    "a-tensor-of-the-layer": lambda layer, e, weight, index: layer.plain.add_(1),
    "in-a-list": lambda layer, e, weight, index: layer.plain_list[0].add_(1),
    "a-parameter": lambda layer, e, weight, index: layer.weight.data.clamp_(max=0.1).add_(1),
    "the-graph": lambda layer, e, weight, index: index.flip(0).sum() and index.add_(1).fmod_(N),
}


class InPlace(MessagePassing):
    """A layer whose message changes a tensor that it was given, and then is no formula."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__(aggr="sum")
        self.change, self.plain, self.plain_list = change, torch.zeros(1), [torch.zeros(1)]
        self.weight = torch.nn.Parameter(torch.ones(F))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, index: Tensor) -> Tensor:
        self.change(self, e, x_j, index)
        return torch.sin(x_i + x_j) * e * self.weight


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("times", [1, 2])
def test_a_tensor_that_a_message_was_given_is_changed_once(name, times):
    def run(patched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x, e = InPlace(IN_PLACE[name]), torch.randn(N, F), torch.randn(E, F)
        edge_index = torch.randint(0, N, (2, E))
        handle = pyg_accel.patch() if patched else None
        with torch.no_grad():
            outs = [layer(x, edge_index, e) for _ in range(times)]
        if handle is not None:
            handle.remove()
        return [*outs, e, edge_index, layer.plain, *layer.plain_list, layer.weight.detach()]

    torch.testing.assert_close(run(True), run(False))


def test_a_parameter_without_a_shape_gets_it_once(report_of):
    def run(patched: bool) -> list[Any]:
        torch.manual_seed(0)
        layer = EdgeConv(
            torch.nn.Sequential(torch.nn.LazyLinear(20), torch.nn.Tanh(), Linear(20, 20))
        )
        x, edge_index = torch.randn(N, F), torch.randint(0, N, (2, E))
        handle = pyg_accel.patch() if patched else None
        outs = [layer(x, edge_index).detach() for _ in range(2)]
        if handle is not None:
            handle.remove()
        return [*outs, torch.rand(1)]

    torch.testing.assert_close(run(True), run(False))
    assert any("shape this call will tell" in row.reason for row in report_of())


def test_graphs_of_many_sizes_have_one_row_in_the_report(report_of):
    with pyg_accel.patched():
        for more in range(5):
            layer = EdgeConv(torch.nn.Sequential(Linear(48, 20), torch.nn.BatchNorm1d(20)))
            layer(torch.randn(400, 24), torch.randint(0, 400, (2, 10_500 + more)))
    (row,) = report_of()
    assert (row.reason, row.calls) == ("'batch_norm' on messages of [E, 20]", 5)


def test_a_report_has_a_bounded_number_of_rows(report_of):
    for n in range(2 * call_report._MOST_ROWS):
        call_report.record("Layer", f"mul(u0,{n})", "cpu", "", 1.0)
        call_report.record("Layer", "", "PyG", f"for {n} reasons", 1.0)
    rows = report_of()
    assert len(rows) <= call_report._MOST_ROWS + 2
    assert sum(row.calls for row in rows) == 4 * call_report._MOST_ROWS
    assert sum(row.calls for row in rows if row.formula) == 2 * call_report._MOST_ROWS
    assert {row.layer for row in rows} == {"Layer", "(others)"}
