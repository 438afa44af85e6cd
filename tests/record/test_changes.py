"""Features that a user's layer changes in place after its messages have read them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing

import pyg_accel
from pyg_accel.patching import programs

pytestmark = pytest.mark.usefixtures("always")

N, E, WIDTH = 10, 40, 8
CALLS = 10  # more than records of whole calls are tried
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(1)).double()
MESSAGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda x_i, x_j, e: x_i * x_j,
    "weighted": lambda x_i, x_j, e: x_j * e,
    "relu of a sum": lambda x_i, x_j, e: (x_j + e).relu(),
    "power": lambda x_i, x_j, e: x_j.pow(2),
    "network": lambda x_i, x_j, e: F.linear(torch.cat([x_i, x_j, e], -1), WEIGHT).tanh(),
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, e: x.add_(1),
    "a row": lambda x, e: x.__setitem__(0, 0.0),
    "a view": lambda x, e: x.view(-1).mul_(2),
    "edges": lambda x, e: e.add_(1),
    "nothing": lambda x, e: None,
    "a function that returns it": lambda x, e: F.dropout(x, training=False),
}


class Changes(MessagePassing):
    """Sums messages of projected features, and changes these."""

    def __init__(self, message: str, change: str, *, whole: bool) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)
        self.of_message, self.change, self.whole = MESSAGES[message], CHANGES[change], whole

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        h, e = self.lin(x), self.lin(e)
        if not self.whole:
            float(h.detach().sum())  # no program of a whole call
        out = self.propagate(edge_index, x=h, e=e)
        self.change(h, e)
        return out + h.sum() + e.sum()

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.of_message(x_i, x_j, e)


def outcomes(layer: Changes) -> list[Tensor | None]:
    """Result and gradient of each call; None for what autograd refuses."""
    seen: list[Tensor | None] = []
    for seed in range(CALLS):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(N, WIDTH, generator=generator).double()
        e = torch.randn(E, WIDTH, generator=generator).double()
        layer.zero_grad()
        out = layer(x, EDGES, e)
        try:
            (out * out).sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            seen.append(None)
        else:
            assert layer.lin.weight.grad is not None
            seen += [out.detach(), layer.lin.weight.grad.clone()]
    return seen


@pytest.mark.each
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "propagate"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("message", MESSAGES)
def test_features_changed_after_propagate_have_pygs_gradients_and_errors(
    message: str, change: str, whole: bool
) -> None:
    torch.manual_seed(0)
    layer = Changes(message, change, whole=whole).double()
    expected = outcomes(copy.deepcopy(layer))
    with pyg_accel.patched():
        actual = outcomes(layer)
        (program,) = programs.find(layer, "call" if whole else "propagate").programs
    assert len(actual) == len(expected)
    for mine, right in zip(actual, expected, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right)
    if whole and change == "nothing":
        assert not any(node.target is torch.clone for node in program.graph.nodes)
