"""Whole steps of training leave padding out of their losses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear

import pyg_accel
from tests.cuda_graphs.models import Network, close

pytestmark = pytest.mark.usefixtures("rerun")

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-4, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
}
LOSSES = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "label smoothing": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "nll_loss": lambda out, y: F.nll_loss(out.log_softmax(-1), y),
    "mse_loss": lambda out, y: F.mse_loss(out, F.one_hot(y, 8).to(out)),
    "sum": lambda out, y: F.mse_loss(out, F.one_hot(y, 8).to(out), reduction="sum"),
    "by hand": lambda out, y: (out - F.one_hot(y, 8)).square().mean(),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 8).to(out)),
}


def stepper(model: torch.nn.Module, loss: str, name: str) -> Callable[..., Any]:
    optimizer = OPTIMIZERS[name](model.parameters())

    def step(x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x, edge_index, edge_attr, batch)[1]
        value = LOSSES[loss](out, y)
        value.backward()
        optimizer.step()
        return value, out

    step.optimizer = optimizer
    return step


@pytest.mark.one_of(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_leaves_padding_out_of_its_loss(loss, optimizer, batches, replays, reasons):
    model = Network(pyg.SAGEConv, pyg.BatchNorm(8)).double()
    eager = copy.deepcopy(model)
    one = stepper(eager, loss, optimizer)
    two = pyg_accel.graphed_step(stepper(model, loss, optimizer), modules=[model])
    for seed, inputs in enumerate(batches + batches):
        y = torch.randint(8, (len(inputs["x"]),), generator=torch.Generator().manual_seed(seed))
        actual, expected = two(**inputs, y=y), one(**inputs, y=y)
        close(actual, [t.detach() for t in expected])
        assert not any(t.requires_grad for t in actual)
    assert not reasons() and replays() >= 10
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-8)


def test_settings_of_an_optimizer_are_part_of_the_kind(batches, replays, reasons):
    model = Network(pyg.SAGEConv).double()
    one = stepper(copy.deepcopy(model), "mse_loss", "SGD")
    inner = stepper(model, "mse_loss", "SGD")
    two = pyg_accel.graphed_step(inner, modules=[model])
    for epoch in range(3):
        for step in (one, inner):
            step.optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        for inputs in batches:
            y = torch.zeros(len(inputs["x"]), dtype=torch.long)
            torch.testing.assert_close(two(**inputs, y=y)[0], one(**inputs, y=y)[0].detach())
    assert not reasons() and replays() >= 15


HIDDEN = Linear(3, 3)


class Holder:
    def __call__(self, x: Tensor) -> Tensor:
        return self.get()(x).sum()

    def get(self) -> torch.nn.Module:
        return globals()["HIDDEN"]


def test_a_step_without_its_modules_is_eager(reasons):
    step = pyg_accel.graphed_step(Holder().__call__)
    for _ in range(6):
        step(torch.randn(2, 3))
    assert reasons() == {"it refers to no module: pass modules="}


@pytest.mark.parametrize("named", [False, True])
def test_optimizers_whose_settings_have_lists(named, replays, reasons):
    """As those of named parameters do, and betas that come from a file of settings."""
    model = Linear(3, 3)
    optimizers = [
        torch.optim.AdamW(model.named_parameters() if named else model.parameters(), amsgrad=True),
        torch.optim.SGD([{"params": [model.weight], "tags": ["a", "b"]}], lr=0.1, momentum=0.5),
    ]
    optimizers[0].param_groups[0]["betas"] = [0.8, 0.9]

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    fast = pyg_accel.graphed_step(step)
    losses = [float(fast(torch.ones(4, 3))) for _ in range(8)]
    assert losses[-1] < losses[0] and not reasons() and replays() > 0
