"""Layers that users write, whose messages are w * x_j."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch_geometric.utils import softmax

from pyg_accel import optimize
from pyg_accel.rewrite import NotLifted, associations
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options
from tests.rewrite.own_layers import (
    OTHERS,
    After,
    Base,
    Before,
    Both,
    E,
    Plain,
    agree,
    inputs,
    outcome,
    was_decided,
)
from tests.user_layers import Layer, written

pytestmark = pytest.mark.usefixtures("always")  # the graphs are small


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("make", "columns"),
    [(Before, None), (Before, 0), (lambda: Before("mean", bias=False), 0),
     (lambda: Plain("mean", bias=False), None), (After, 3), (lambda: After("mean"), 3), (Both, 3)],
)  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_every_tree_gives_the_result_of_the_layer(make, columns, training):
    conv, (x, edge_index) = make().double().train(training), inputs()
    shape = () if columns is None else ((E,) if columns == 0 else (E, columns))
    args = [] if columns is None else [torch.rand(shape, dtype=torch.float64)]
    actual = associations(conv, x, edge_index, *args, train=True)
    assert len(actual.all) > 1
    for tree in actual.all:
        layer = OptimizedModel(conv, Options(train=True, choose=tree))
        agree(layer, conv, x, edge_index, *args)
        assert not rewritten_layers(layer)[""].reasons


@pytest.mark.parametrize("message", OTHERS)
def test_others_are_left_alone(message):
    conv, (x, edge_index) = written(Before, message=message)().double(), inputs()
    layer = OptimizedModel(conv, Options())
    for _ in range(2):
        torch.testing.assert_close(layer(x, edge_index), conv(x, edge_index))
        reason = f"{type(conv).__name__} has no linear layer beside its aggregation"
        assert reason in next(iter(rewritten_layers(layer)[""].reasons))


def test_a_graph_that_is_made_in_each_call_takes_part():
    looped = written(
        Base, forward=lambda self, x, edge_index: self.send(edge_index.flip(0), self.lin(x))
    )
    conv, (x, edge_index) = looped().double(), inputs()
    layer = OptimizedModel(conv, Options())
    for _ in range(3):
        torch.testing.assert_close(layer(x, edge_index), conv(x, edge_index))
        edge_index = edge_index.roll(1, 1)
    assert was_decided(layer)


# -- attention and sums ---------------------------------------------------------------------------


class Gated(Layer):
    """The gated attention of GaAN, with a gate from the node alone."""

    propagate_type: ClassVar = dict(query=Any, key=Any, value=Any)
    out = 4

    def __init__(self, heads):
        parts = {name: pyg.Linear(6, heads * self.out) for name in ("query", "key", "value")}
        super().__init__("sum", 0, heads=heads, **parts, gate=pyg.Linear(6, heads))

    def forward(self, x, edge_index):
        query, key, value = (
            lin(x).view(-1, self.heads, self.out) for lin in (self.query, self.key, self.value)
        )
        out = self.propagate(edge_index, query=query, key=key, value=value)
        return (out * self.gate(x).sigmoid().unsqueeze(-1)).flatten(1)

    def message(self, query_i, key_j, value_j, index, size_i):
        alpha = softmax((query_i * key_j).sum(-1) / 2, index, num_nodes=size_i)
        return self.weigh(alpha).unsqueeze(-1) * value_j

    def weigh(self, alpha):
        return F.dropout(alpha, 0.5, self.training)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("heads", [1, 2])
def test_user_written_attention_is_lifted(heads):
    conv, (x, edge_index) = Gated(heads).double().eval(), inputs()
    actual = associations(conv, x, edge_index)
    assert len(actual.promoted) == 2  # reuse and recompute
    for tree in actual.all:
        fast = optimize(conv, x, edge_index, choose=tree)
        torch.testing.assert_close(outcome(fast, x, edge_index), outcome(conv, x, edge_index))
        fast.train()
        assert not torch.equal(fast(x, edge_index), fast(x, edge_index))
        fast.eval()


def ahead(self, x, edge_index):
    """Its scores are of two features at once."""
    query, key = (f(x).view(-1, self.heads, self.out) for f in (self.query, self.key))
    return self.propagate(edge_index, query=query + key, key=key, value=key).flatten(1)


def joined(self, x, edge_index):
    """Its features are two linear layers, one after the other, in two heads."""
    return self.send(edge_index, F.linear(self.lin(x), self.second).view(-1, 2, 3).flatten(1))


LIFTED = {
    "scores of two features": (
        written(Gated, forward=ahead, weigh=lambda self, alpha: alpha), (2,), 0),
    "sums of features and their means": (
        written(Base, forward=lambda self, x, edge_index: self.lin(
            0.5 * x + 0.5 * self.send(edge_index, x))), ("mean", False), 2),
    "a bias of one number": (
        written(Base, forward=lambda self, x, edge_index: self.lin(self.send(edge_index, F.linear(
            x, self.first, self.number))), first=torch.randn(6, 6).double(),
            number=torch.randn(1).double()), (), 1),
    "heads of two linear layers": (
        written(Base, forward=joined, second=torch.randn(6, 4).double()), (), 4),
    "heads of two linear layers without a bias": (
        written(Base, forward=joined, second=torch.randn(6, 4).double()), ("sum", False), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LIFTED)
def test_sums_take_part(name):
    make, options, trees = LIFTED[name]
    conv, (x, edge_index) = make(*options).double(), inputs()
    actual = associations(conv, x, edge_index).all
    assert len(actual) > trees
    for tree in actual:
        agree(optimize(conv, x, edge_index, choose=tree), conv, x, edge_index)


def test_attention_that_no_expression_says_runs_as_it_is_and_says_why():
    """Its weights are no factor of what is summed up."""
    sharpened = written(Gated, weigh=lambda self, alpha: alpha.square())
    conv, (x, edge_index) = sharpened(2).double(), inputs()
    with pytest.raises(NotLifted, match="is not linear"):
        associations(conv, x, edge_index)
    fast = optimize(conv, x, edge_index)
    torch.testing.assert_close(fast(x, edge_index), conv(x, edge_index))


# -- any code -------------------------------------------------------------------------------------


# -- arguments ------------------------------------------------------------------------------------
