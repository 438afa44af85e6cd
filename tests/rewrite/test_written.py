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


class Branching(MessagePassing):
    """Every branch that its code takes is taken in the call at hand."""

    scale = 1.0

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(6, 4)
        self.power, self.options, self.half = 1, [1.0], None

    def forward(self, x, edge_index, edge_weight=None):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
        if self.half is not None:
            out = out * self.half
        out += self.options[0]
        return out if self.training else out * GLOBAL

    def message(self, x_j, edge_weight):
        if edge_weight is None:
            return x_j.relu() if self.power == 1 else x_j
        assert isinstance(x_j, torch.Tensor)
        if self.training and x_j.dim() == 2 and x_j.size(-1) == 4:
            return F.dropout(edge_weight, 0.5).view(-1, 1) * x_j
        return self.scale * (edge_weight.view(-1, 1) * x_j)


GLOBAL = 1.0


def test_a_message_takes_its_branches_in_every_call(monkeypatch):
    conv, (x, edge_index) = Branching().double().eval(), inputs()
    weight = torch.rand(E, dtype=torch.float64)
    layer = Associated(conv, Options(train=True))

    def agrees():
        for args in ([], [weight]):
            mine, theirs = (outcome(m, x, edge_index, *args) for m in (layer, conv))
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    agrees()
    assert "the message of Branching is not w * x_j" in next(iter(layer.reasons))
    for name, value in (("power", 2), ("half", 0.5), ("scale", 3.0)):
        monkeypatch.setattr(conv, name, value)
        agrees()
    conv.options[0] = 5.0
    agrees()
    monkeypatch.setattr(f"{__name__}.GLOBAL", 2.0)
    agrees()
    conv.train(), layer.train()
    agrees()
    assert layer.decisions


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -3 * grad


class Twice(Before):
    def forward(self, x, edge_index, edge_weight=None):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
        return self.propagate(edge_index, x=out, edge_weight=None)


class Own(Before):
    def forward(self, x, edge_index, edge_weight=None):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
        return Reversed.apply(out)


class Counted(MessagePassing):
    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = nn.Linear(6, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j, index, size_i, dim_size, ptr=None):
        assert ptr is None and size_i == dim_size
        return x_j / torch.bincount(index, minlength=size_i)[index].view(-1, 1)


class Changed(Before):
    def forward(self, x, edge_index, edge_weight=None):
        h = self.lin(x)
        h += 1
        return self.propagate(edge_index, x=h, edge_weight=edge_weight)


class Detached(Before):
    def forward(self, x, edge_index, edge_weight=None):
        with torch.no_grad():
            h = self.lin(x)
        return self.propagate(edge_index, x=h, edge_weight=edge_weight) + self.lin.bias


class Typed(Before):
    def forward(self, x, edge_index, edge_weight=None):
        h = self.lin(x)
        h = h if type(h) is torch.Tensor else h + 1
        return self.propagate(edge_index, x=h, edge_weight=edge_weight)


class Updated(Before):
    def update(self, out):
        return out.relu() + 1


class Shared(Before):
    def forward(self, x, edge_index, edge_weight=None):
        h = self.lin(x)
        return self.propagate(edge_index, x=h, edge_weight=edge_weight) + h


@pytest.mark.parametrize(
    ("make", "lifted", "reason"),
    [(Twice, True, "changes its features"), (Own, False, "the mode of autograd"),
     (Counted, True, ""), (Changed, False, "changes its features"),
     (Detached, False, "changes its features"), (Typed, False, "asks for the types"),
     (Updated, False, "has its own update"), (Shared, True, "otherwise too")],
)  # fmt: skip
def test_code_that_cannot_wait_for_its_product_gets_what_pyg_computes(make, lifted, reason):
    conv, (x, edge_index) = make().double(), inputs()
    layer = Associated(conv, Options(train=True))
    for _ in range(3):
        mine, theirs = outcome(layer, x, edge_index), outcome(conv, x, edge_index)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert bool(layer.decisions) == lifted
    assert any(reason in why for why in layer.reasons) if reason else not layer.reasons


def test_a_tensor_that_is_kept_has_data():
    class Keeps(Before):
        def forward(self, x, edge_index, edge_weight=None):
            self.last = self.propagate(edge_index, x=self.lin(x), edge_weight=None)
            return {"out": self.last, "twice": [2 * self.last]}

    conv, (x, edge_index) = Keeps().double(), inputs()
    layer = Associated(conv, Options())
    found = layer(x, edge_index)
    assert type(conv.last) is type(found["out"]) is torch.Tensor
    torch.testing.assert_close(found, conv(x, edge_index))


def test_a_product_is_computed_before_its_operands_are_written_to():
    class Writes(Before):
        def forward(self, x, edge_index, edge_weight=None):
            out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
            x.mul_(2)
            edge_weight.view(-1).zero_()
            return out

    conv, (x, edge_index) = Writes().double(), inputs()
    layer, weight = Associated(conv, Options()), torch.rand(E, dtype=torch.float64)
    with torch.no_grad():
        found = layer(x.clone(), edge_index, weight.clone())
        torch.testing.assert_close(found, conv(x.clone(), edge_index, weight.clone()))
    assert not layer.reasons


def test_what_is_left_to_the_layer_in_one_mode_is_rewritten_in_another():
    conv, x, edge_index = Before(), torch.randn(N, 6), torch.randint(N, (2, E))
    layer, weight = Associated(conv, Options()), torch.rand(E)
    with torch.autocast("cpu", torch.bfloat16):  # the weights make messages float32 again
        found = layer(x, edge_index, weight)
        torch.testing.assert_close(found, conv(x, edge_index, weight))
    assert layer.reasons and not layer.decisions
    torch.testing.assert_close(layer(x, edge_index, weight), conv(x, edge_index, weight))
    assert layer.decisions
