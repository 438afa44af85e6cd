"""Layers whose code is recorded: messages that patch() reads, factors, sums, several hops."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.utils import degree

from pyg_accel import optimize, plan
from pyg_accel.layers import to_maxk
from pyg_accel.rewrite import NotLifted, associations
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options
from tests.user_layers import Weighted, written

N, E = 40, 300
pytestmark = pytest.mark.usefixtures("always")  # the graphs are small


class Base(Weighted):
    """Two linear layers of 6 features, one of 12, and a factor."""

    def __init__(self, aggr="sum", **options):
        super().__init__(
            aggr, lin=torch.nn.Linear(6, 4), root=torch.nn.Linear(6, 4, bias=False),
            wide=torch.nn.Linear(12, 4), scale=torch.nn.Parameter(torch.tensor([0.5])), **options,
        )  # fmt: skip

    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=self.lin(x), w=w)

    def message(self, x_j, w):
        return x_j * w.view(-1, 1)


def normalised(self, x, edge_index, w):
    norm = degree(edge_index[0], x.size(0), x.dtype).clamp(min=1).pow(-0.5)
    return self.propagate(edge_index, x=self.lin(x), norm=norm) * self.scale


def between(self, x, edge_index, w):
    x = torch.cat([x.relu(), x], dim=-1)
    out = self.propagate(edge_index, x=x.tanh(), w=w)
    return self.wide(0.5 * out + x) * degree(edge_index[1], x.size(0), x.dtype).view(-1, 1)


def hops(self, x, edge_index, w):
    h = x
    for _ in range(2):
        h = 0.9 * self.propagate(edge_index, x=h, w=w) + 0.1 * x
    return self.lin(h) @ self.root.weight[:, :3] + x.mean(dim=1, keepdim=True)


def biases_alone(self, x, edge_index, w):
    """Two linear layers between two hops: some trees sum up what their biases make by itself."""
    h = self.second(self.first(self.propagate(edge_index, x=x, w=w)))
    return self.propagate(edge_index, x=h, w=w)


NORMALISED = written(
    Base, forward=normalised, propagate_type=dict(x=Any, norm=Any),
    message=lambda self, x_j, norm_i, norm_j: norm_j.view(-1, 1) * norm_i.view(-1, 1) * x_j,
)  # fmt: skip
BIASES = written(Base, forward=biases_alone)
AVERAGED = written(Base, forward=hops, message=lambda self, x_j, w: x_j * w.view(-1, 1) * 2)
LAYERS = {
    "biases alone": lambda: BIASES(
        "mean", first=torch.nn.Linear(6, 2), second=torch.nn.Linear(2, 5)),
    "two ends": written(
        Base, propagate_type=dict(a=Any, b=Any, w=Any),
        forward=lambda self, x, edge_index, w: (
            self.propagate(edge_index, a=self.lin(x), b=self.root(x), w=w) - 2 * self.root(x)),
        message=lambda self, a_j, b_i, w: (a_j - b_i) / w.unsqueeze(-1)),
    "normalised": lambda: NORMALISED(node_dim=0),
    "inside": written(
        Base,
        forward=lambda self, x, edge_index, w: (
            self.propagate(edge_index, x=x, w=w) / 3 + self.root(x)),
        message=lambda self, x_j, w: -self.lin(x_j) * w.view(-1, 1)),
    "concatenated": written(
        Base, propagate_type=dict(x=Any),
        forward=lambda self, x, edge_index, w: self.propagate(edge_index, x=x),
        message=lambda self, x_i, x_j: self.wide(torch.cat([x_i, x_j], dim=-1))),
    "between": written(Base, forward=between),
    "hops": written(Base, forward=hops),
    "averaged": lambda: AVERAGED("mean", flow="target_to_source"),
}  # fmt: skip


def inputs():
    edge_index = torch.randint(N - 3, (2, E))
    return torch.randn(N, 6).double(), edge_index, torch.rand(E).double() + 0.5


def outcome(module, x, edge_index, weight):
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    out = module(x, edge_index, weight)
    leaves = [x, weight, *module.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", LAYERS)
def test_every_tree_of_a_recorded_layer_gives_its_result(name):
    conv, args = LAYERS[name]().double(), inputs()
    trees = associations(conv, *args, train=True).all
    assert len(trees) > 1
    expected = outcome(conv, *args)
    for tree in trees[:: max(1, len(trees) // 24)]:
        layer = OptimizedModel(conv, Options(train=True, choose=tree))
        for _ in range(2):
            for mine, theirs in zip(outcome(layer, *args), expected, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert not rewritten_layers(layer)[""].reasons
        assert rewritten_layers(layer)[""].decisions


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions_are_those_of_the_layer(name, dtype):
    conv, args = LAYERS[name](), inputs()
    args = [t.float() if t.is_floating_point() else t for t in args]
    layer = OptimizedModel(conv, Options())
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        mine, theirs = layer(*args), conv(*args)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def overwrites(self, x, edge_index, w):
    h = self.lin(x)
    out = self.root(x) + self.propagate(edge_index, x=h)
    h += 1
    h.view(-1).mul_(2)
    again = self.propagate(edge_index, x=h)
    h.tanh_()
    return out + again + h


def stays(self, x, edge_index, w):
    h = self.lin(x)
    out = self.propagate(edge_index, x=h)
    seen = h.view(-1, 2)
    seen *= 3
    return self.wide(torch.cat([out, h, out], dim=-1)) + self.root(x)


@pytest.mark.parametrize("forward", [overwrites, stays])
def test_features_that_are_overwritten_are_read_before(forward):
    own = written(Base, forward=forward, propagate_type=dict(x=Any), message=lambda self, x_j: x_j)
    conv, args = own().double(), inputs()
    layer = OptimizedModel(conv, Options(train=True))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(layer(*args), conv(*args), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(outcome(layer, *args), outcome(conv, *args))


def test_a_first_layer_in_front_of_maxk_multiplies_first_where_that_narrows():
    x, edge_index = torch.randn(300, 64), torch.randint(300, (2, 30_000))
    model = to_maxk(pyg.GraphSAGE(64, 16, 3, 4), k=4)
    fast = optimize(model, x, edge_index, train=True)
    torch.testing.assert_close(fast(x, edge_index), model(x, edge_index), rtol=1e-4, atol=1e-4)
    chosen = [next(t.tree for t in layer.trees if t.chosen) for layer in plan(fast).layers]
    assert chosen[0] == "(mean(A·(X·W)) + (X·V) + b)"
    assert all("maxk(X)" in tree for tree in chosen[1:])


def test_layers_of_pyg_without_a_rule_take_part_where_they_are_linear():
    actual = associations(pyg.LEConv(6, 4))
    assert "X W" in str(next(iter(actual.all))).replace("·", " ") and len(actual.all) > 1
    with pytest.raises(NotLifted, match="not linear"):
        associations(pyg.ResGatedGraphConv(6, 4))
    with pytest.raises(NotLifted, match="does not run on such arguments"):
        associations(pyg.GINEConv(torch.nn.Linear(6, 4), edge_dim=3))


def test_arguments_may_have_any_names():
    renamed = written(
        Base, propagate_type=dict(h=Any, w=Any), message=lambda self, w, h_j: w * h_j,
        forward=lambda self, edges, h, weights: (
            self.propagate(edges, h=self.lin(h), w=weights.view(-1, 1)) + self.root(h)),
    )  # fmt: skip
    conv, (x, edge_index, weight) = renamed().double(), inputs()
    layer = OptimizedModel(conv, Options(train=True))
    args = edge_index, x, weight
    torch.testing.assert_close(layer(*args), conv(*args))
    actual = rewritten_layers(layer)[""]
    assert actual.decisions and not actual.reasons


def test_differences_are_computed_per_edge():
    difference = written(Base, message=lambda self, x_i, x_j, w: w.view(-1, 1) * (x_i - x_j))
    conv, args = difference().double(), inputs()
    layer = OptimizedModel(conv, Options())
    torch.testing.assert_close(layer(*args), conv(*args))
    actual = rewritten_layers(layer)[""]
    assert "is not linear" in next(iter(actual.reasons)) and not actual.decisions


def test_sizes_and_values_may_change_between_calls():
    conv, args = LAYERS["normalised"]().double(), inputs()
    layer = OptimizedModel(conv, Options())
    for rows in (N, N + 30, 7):
        x, edge_index = torch.randn(rows, 6).double(), torch.randint(rows, (2, 5 * rows))
        torch.testing.assert_close(layer(x, edge_index, None), conv(x, edge_index, None))
        with torch.no_grad():
            conv.scale.mul_(2)
    assert layer(*args) is not None and not rewritten_layers(layer)[""].reasons


@pytest.mark.parametrize("loops", [False, True])
def test_attention_recorded_on_a_graph_of_one_edge_serves_other_graphs(loops):
    """The row of a parameter is then one for each edge, and one for all of them."""
    conv = pyg.GATv2Conv(6, 4, heads=2, add_self_loops=loops).double()
    layer = OptimizedModel(conv, Options())
    x = torch.randn(N, 6).double()
    for edge_index in (torch.tensor([[3], [5]]), torch.randint(N, (2, E))):
        torch.testing.assert_close(layer(x, edge_index), conv(x, edge_index))
    assert rewritten_layers(layer)[""].decisions
