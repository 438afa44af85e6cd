"""What looks like a product and is none, or only under conditions: programs give what layers do."""

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, softmax

from pyg_accel.rewrite import NotLifted, associations
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options

N, E = 7, 18


class Sums(MessagePassing):
    def __init__(self, **kwargs):
        super().__init__(aggr="sum", node_dim=0, **kwargs)
        self.lin, self.other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
        self.square = torch.nn.Linear(3, 3)
        self.per_node = torch.nn.Parameter(torch.rand(N, 1))
        self.att = torch.nn.Parameter(torch.rand(1, 3, 3))

    def message(self, x_j):
        return x_j


class MeanByHand(Sums):
    """Targets without edges have a degree of zero."""

    def forward(self, x, edge_index):
        count = degree(edge_index[1], x.size(0), x.dtype).view(-1, 1)
        return self.propagate(edge_index, x=self.lin(x), count=count)

    def message(self, x_j, count_i):
        return x_j / count_i


class DividedBySources(MeanByHand):
    def message(self, x_j, count_j):
        return x_j * count_j.pow(-1).clamp(max=9)


class Overwritten(Sums):
    def forward(self, x, edge_index):
        h = self.lin(x).sin()
        out = self.propagate(edge_index, x=h)
        h = self.change(h)
        return self.square(out) + self.square(h)

    def change(self, h):
        F.relu(h, inplace=True)
        return h


class OverwrittenView(Overwritten):
    def change(self, h):
        h.T.mul_(2)
        return h


class OverwrittenInList(Overwritten):
    def change(self, h):
        torch._foreach_mul_([h], 2)
        return h


class Numbers(Sums):
    """Names of numbers that begin alike."""

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=self.lin(x) * 3.0)
        return out * 3.00001 + self.other(x) * 31.0


class OtherFlow(Sums):
    def __init__(self):
        super().__init__(flow="target_to_source")

    def forward(self, x, edge_index):
        edge_index, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


class ChangedWeights(OtherFlow):
    def __init__(self):
        super(OtherFlow, self).__init__()

    def forward(self, x, edge_index):
        own = torch.linspace(1, 2, edge_index.size(1), dtype=x.dtype) * 2
        edge_index, weight = gcn_norm(edge_index, own, x.size(0), dtype=x.dtype)
        own.mul_(own)
        return self.propagate(edge_index, x=self.lin(x), weight=weight) + own.sum()


class LinearInHeads(Sums):
    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=torch.cat([self.lin(x)] * 3, 1).view(-1, 3, 3))
        return self.square(out).flatten(1)


class Scores(Sums):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(5, 9)

    def forward(self, x, edge_index):
        h = self.lin(x).view(-1, 3, 3)
        return self.propagate(edge_index, x=h, score=self.score(h)).flatten(1)

    def score(self, h):
        return (h * h).sum(-1)

    def message(self, x_j, score_j, index, size_i):
        return x_j * softmax(score_j, index, num_nodes=size_i).unsqueeze(-1)


class ScoresPerNode(Scores):
    def score(self, h):
        return (h * self.att).sum(-1) * self.per_node


LAYERS = [MeanByHand, DividedBySources, Overwritten, OverwrittenView, OverwrittenInList, Numbers,
          OtherFlow, ChangedWeights, LinearInHeads, Scores, ScoresPerNode]  # fmt: skip


def outcome(module, x, edge_index):
    x = x.clone().requires_grad_()
    out = module(x, edge_index)
    parameters = [x, *module.parameters()]
    seed = torch.linspace(0.1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, parameters, seed, allow_unused=True)]


@pytest.mark.one_of(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("make", LAYERS)
def test_programs_give_the_results_of_the_layer(make):
    conv, x = make().double(), torch.randn(N, 5, dtype=torch.float64)
    edge_index = torch.stack([torch.randint(N - 2, (E,)), torch.randint(N - 2, (E,))])
    try:
        trees = associations(conv, x, edge_index, train=True).all
    except NotLifted:
        trees = (None,)
    for tree in trees[:: max(1, len(trees) // 12)]:
        layer = OptimizedModel(conv, Options(train=True, choose=tree))
        for _ in range(3):
            for mine, theirs in zip(outcome(layer, x, edge_index),
                                    outcome(conv, x, edge_index), strict=True):  # fmt: skip
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=str(tree))


def test_a_new_graph_in_each_call_is_decided_for_once():
    class Plain(Sums):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=self.lin(x))

    layer = OptimizedModel(Plain(), Options())
    for _ in range(20):
        layer(torch.randn(N, 5), torch.randint(N, (2, E)))
    assert len(rewritten_layers(layer)[""].decisions) <= 3
