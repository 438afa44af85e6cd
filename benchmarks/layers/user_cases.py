"""Layers as users write them, for :mod:`benchmarks.layers.modes`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter, softmax

from benchmarks.layers.cases import Case, Inputs, mlp

SCALE = 2.0


class UserLayer(MessagePassing):
    """A linear layer, then messages that subclasses write."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**({"aggr": "sum"} | kwargs))
        self.lin = Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))


class ModuleConstant(UserLayer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.relu(x_i - x_j) * SCALE


class Branch(UserLayer):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


def _gated(x_i: Tensor, x_j: Tensor) -> Tensor:
    return torch.sigmoid(x_i) * x_j


class Helper(UserLayer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _gated(x_i, x_j)


class EdgeNetwork(UserLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, aggr="max")
        self.network = mlp(2 * width, width, width)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.network(torch.cat([x_i, x_j - x_i], dim=-1))


class Softmax(UserLayer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = (x_i * x_j).sum(dim=-1, keepdim=True)
        return softmax(score, index, num_nodes=size_i) * x_j


class SoftmaxByHand(UserLayer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = (x_i * x_j).sum(dim=-1, keepdim=True)
        largest = scatter(score.detach(), index, dim_size=size_i, reduce="max")
        weight = (score - largest[index]).exp()
        return weight / scatter(weight, index, dim_size=size_i)[index] * x_j


class EdgeUpdate(UserLayer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, alpha=alpha)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid((x_i * x_j).sum(dim=-1, keepdim=True))

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * x_j


class ScatterInForward(UserLayer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x))
        return out + scatter(x[edge_index[0]], edge_index[1], dim_size=x.size(0), reduce="max")

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class TwoPropagates(UserLayer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        near = self.propagate(edge_index, x=self.lin(x))
        return self.propagate(edge_index, x=torch.relu(near)) + near

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class OwnAggregate(UserLayer):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.relu(x_j)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="mean")


def closure(width: int) -> Module:
    """Make a layer whose message reads a name of this function."""
    scale = 0.5

    class Closure(UserLayer):
        def message(self, x_j: Tensor) -> Tensor:
            return scale * x_j

    return Closure(width)


def _weight(g: Inputs) -> tuple[Any, ...]:
    return g.x, g.edge_index, g.edge_weight


USER_CASES: dict[tuple[str, str], Case] = {
    ("user", "a constant of the module"): Case(ModuleConstant),
    ("user", "a branch on an argument"): Case(Branch),
    ("user", "a branch on an argument, taken"): Case(Branch, _weight),
    ("user", "a helper function"): Case(Helper),
    ("user", "an MLP on every edge"): Case(EdgeNetwork),
    ("user", "softmax attention"): Case(Softmax),
    ("user", "softmax attention by hand"): Case(SoftmaxByHand),
    ("user", "edge_update"): Case(EdgeUpdate),
    ("user", "scatter in forward"): Case(ScatterInForward),
    ("user", "two propagates"): Case(TwoPropagates),
    ("user", "its own aggregate"): Case(OwnAggregate),
    ("user", "a closure"): Case(closure),
}
