"""Layers as users write them, and a comparison of models with them."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg

from pyg_accel.rewrite.optimized import rewritten_layers
from tests.user_layers import Layer, written

N, E = 40, 300


class Base(Layer):
    """A linear layer, and weights that edges may have."""

    propagate_type: ClassVar = dict(x=Any, edge_weight=Any)

    def __init__(self, aggr="sum", bias=True, **parts):
        super().__init__(aggr, lin=pyg.Linear(6, 4, bias=bias), **parts)

    def forward(self, x, edge_index, edge_weight=None):
        return self.send(edge_index, self.lin(x), edge_weight)

    def send(self, edge_index, x, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j / 2


class Before(Base):
    def __init__(self, aggr="sum", bias=True):
        super().__init__(aggr, bias)
        self.bias = torch.nn.Parameter(torch.randn(4))

    def forward(self, x, edge_index, edge_weight=None):
        out = super().forward(x, edge_index, edge_weight)
        return (out + self.bias).relu() + self.lin(x)[:, :1]


Plain = written(Base, forward=lambda self, x, edge_index: self.send(edge_index, self.lin(x)),
                message=lambda self, x_j: x_j)  # fmt: skip


class After(Base):
    def __init__(self, aggr="sum", **parts):
        super().__init__(aggr, gate=torch.nn.Linear(3, 1), **parts)

    def forward(self, x, edge_index, edge_attr):
        weight = self.gate(edge_attr).sigmoid()
        out = self.lin(self.send(edge_index, x, weight))
        return F.dropout(out, 0.5, training=self.training) + x[:, :4]

    def message(self, x_j, edge_weight):
        return edge_weight * x_j


class Both(After):
    def __init__(self):
        super().__init__(first=torch.nn.Linear(6, 5, bias=False))
        self.lin = torch.nn.Linear(5, 4)

    def forward(self, x, edge_index, edge_attr):
        weight = edge_attr.mean(1, keepdim=True)
        return self.lin(self.send(edge_index, self.first(x), weight))


def inputs():
    edge_index = torch.randint(N, (2, E))
    return torch.randn(N, 6, dtype=torch.float64), edge_index


def outcome(module, x, edge_index, *args):
    x = x.clone().requires_grad_()
    args = [a.clone().requires_grad_() for a in args]
    torch.manual_seed(0)
    out = module(x, edge_index, *args)
    grads = torch.autograd.grad(out.square().sum(), [x, *args, *module.parameters()],
                                allow_unused=True)  # fmt: skip
    return [out, *grads]


def agree(layer, conv, *args):
    expected = outcome(conv, *args)
    for _ in range(2):  # the first call is recorded, the second runs what was chosen
        for mine, theirs in zip(outcome(layer, *args), expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def was_decided(layer):
    actual = rewritten_layers(layer)[""]
    return bool(actual.decisions and not actual.reasons)


OTHERS = [lambda self, x_j, edge_weight: x_j * x_j, lambda self, x_j, edge_weight: x_j + 1]
