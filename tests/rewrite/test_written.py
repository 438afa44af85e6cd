"""Layers that users write, whose messages are w * x_j."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from pyg_accel import ops, optimize
from pyg_accel.rewrite import associations, lifts
from pyg_accel.rewrite.decision import Options
from pyg_accel.rewrite.ir import Attend, Broadcast, Map
from pyg_accel.rewrite.layer import Associated
from pyg_accel.rewrite.rules.common import Parts, edges, inverse_count

N, E = 40, 300


class Before(MessagePassing):
    def __init__(self, aggr="sum", bias=True):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(6, 4, bias=bias)
        self.bias = torch.nn.Parameter(torch.randn(4))

    def forward(self, x, edge_index, edge_weight=None):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
        return (out + self.bias).relu() + self.lin(x)[:, :1]

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j / 2


class Plain(MessagePassing):
    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(6, 4, bias=False)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))


class After(MessagePassing):
    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(6, 4)
        self.gate = torch.nn.Linear(3, 1)

    def forward(self, x, edge_index, edge_attr):
        weight = self.gate(edge_attr).sigmoid()
        out = self.lin(self.propagate(edge_index, x=x, weight=weight))
        return F.dropout(out, 0.5, training=self.training) + x[:, :4]

    def message(self, x_j, weight):
        return weight * x_j


class Both(After):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5, bias=False)
        self.lin = torch.nn.Linear(5, 4)

    def forward(self, x, edge_index, edge_attr):
        weight = edge_attr.mean(1, keepdim=True)
        return self.lin(self.propagate(edge_index, x=self.first(x), weight=weight))


class Quadratic(Before):
    def message(self, x_j, edge_weight):
        return x_j * x_j


class Shifted(Before):
    def message(self, x_j, edge_weight):
        return x_j + 1


class Looped(Before):
    def forward(self, x, edge_index):
        edge_index = edge_index.flip(0)
        return self.propagate(edge_index, x=self.lin(x), edge_weight=None)


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


@pytest.mark.parametrize(
    ("make", "columns"),
    [(Before, None), (Before, 0), (lambda: Before("mean", bias=False), 0), (Plain, None),
     (After, 3), (lambda: After("mean"), 3), (Both, 3)],
)  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_every_tree_computes_what_the_layer_computes(make, columns, training):
    conv, (x, edge_index) = make().double().train(training), inputs()
    shape = () if columns is None else ((E,) if columns == 0 else (E, columns))
    args = [] if columns is None else [torch.rand(shape, dtype=torch.float64)]
    found = associations(conv, x, edge_index, *args, train=True)
    assert len(found.all) > 1
    expected = outcome(conv, x, edge_index, *args)
    for tree in found.all:
        layer = Associated(conv, Options(train=True, choose=tree))
        for mine, theirs in zip(outcome(layer, x, edge_index, *args), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        assert not layer.reasons


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Quadratic, "the message of Quadratic is not w * x_j"),
     (Shifted, "the message of Shifted is not w * x_j"),
     (Looped, "makes another graph")],
)  # fmt: skip
def test_others_are_left_alone(make, reason):
    conv, (x, edge_index) = make().double(), inputs()
    layer = Associated(conv, Options())
    assert torch.equal(layer(x, edge_index), conv(x, edge_index))
    assert reason in next(iter(layer.reasons))


class Gated(MessagePassing):
    """The gated attention of GaAN, with a gate from the node alone."""

    def __init__(self, width, out, heads):
        super().__init__(aggr="sum", node_dim=0)
        self.heads, self.out = heads, out
        self.query, self.key = nn.Linear(width, heads * out), nn.Linear(width, heads * out)
        self.value, self.gate = nn.Linear(width, heads * out), nn.Linear(width, heads)

    def forward(self, x, edge_index):
        query, key, value = (
            lin(x).view(-1, self.heads, self.out) for lin in (self.query, self.key, self.value)
        )
        out = self.propagate(edge_index, query=query, key=key, value=value)
        return (out * self.gate(x).sigmoid().unsqueeze(-1)).flatten(1)

    def message(self, query_i, key_j, value_j, index, size_i):
        alpha = softmax((query_i * key_j).sum(-1), index, num_nodes=size_i)
        return alpha.unsqueeze(-1) * value_j


def test_attention_of_ones_own_is_lifted_by_a_rule():
    @lifts(Gated)
    def gated(conv, call):
        parts = Parts()
        x, a = parts.sources(call), edges(parts, call, "")
        keys = parts.affine("K", conv.key, x, conv.heads)
        queries = parts.affine("Q", conv.query, x, conv.heads)
        values = parts.affine("W", conv.value, x, conv.heads)

        def scores(call, matrix, keys, queries):
            q, k = (t.view(-1, conv.heads, conv.out) for t in (queries, keys))
            return ops.edge_softmax(matrix.graph, ops.sddmm(matrix.graph, q, k))

        def gate(call, out):
            return (out * conv.gate(call.x).sigmoid().unsqueeze(-1)).flatten(1)

        parts.scores["softmax"], parts.calls["gate"] = scores, gate
        parts.sizes["O"] = conv.heads * conv.out
        alpha = Attend("softmax", a, (keys, queries), conv.heads)
        return parts.algebra(Map("gate", alpha @ values, "O"))

    conv, (x, edge_index) = Gated(6, 4, 2).double(), inputs()
    found = associations(conv, x, edge_index)
    assert len(found.promoted) == 2  # reuse and recompute
    for tree in found.all:
        fast = optimize(conv, x, edge_index, choose=tree)
        torch.testing.assert_close(outcome(fast, x, edge_index), outcome(conv, x, edge_index))


def test_a_rule_for_a_layer_of_ones_own_is_registered_by_class():
    class Smoothed(MessagePassing):
        def __init__(self, in_channels, out_channels):
            super().__init__(aggr="mean")
            self.lin = nn.Linear(in_channels, out_channels, bias=False)

        def forward(self, x, edge_index):
            return self.lin(0.5 * x + 0.5 * self.propagate(edge_index, x=x))

    @lifts(Smoothed)
    def smoothed(conv, call):
        parts = Parts()
        half = parts.number("½", 0.5)
        x, w = parts.sources(call), parts.linear("W", conv.lin)
        mean = Broadcast(inverse_count(parts), edges(parts, call) @ x)
        return parts.algebra((half @ x + half @ mean) @ w)

    conv, (x, edge_index) = Smoothed(6, 4).double(), inputs()
    trees = associations(conv, x, edge_index).all
    assert len(trees) > 2
    for tree in trees:
        fast = optimize(conv, x, edge_index, choose=tree)
        torch.testing.assert_close(fast(x, edge_index), conv(x, edge_index))
    with pytest.raises(ValueError, match="a rule for Smoothed already"):
        lifts(Smoothed)(smoothed)
