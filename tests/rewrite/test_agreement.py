"""What else a rewritten model shares with the plain one: options, hooks, modes, buffers, errors."""

import warnings

import pytest
import torch
import torch_geometric.nn as nn
from torch.nn.utils import prune

from pyg_accel import optimize, plan

N, E = 30, 200


def example(width=8):
    torch.manual_seed(0)
    return torch.randn(N, width), torch.randint(N, (2, E))


def agree(fast, model, *args):
    torch.testing.assert_close(fast(*args), model(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [lambda alpha: nn.APPNP(3, alpha), lambda alpha: nn.SSGConv(8, 4, alpha, K=3)],
    ids=["appnp", "ssg"],
)
def test_stored_aggregates_of_static_features_depend_on_scalars(make):
    x, edge_index = example()
    for alpha in (0.1, 0.7):
        conv = make(alpha)
        fast = optimize(conv, x, edge_index, static=("x",))
        agree(fast, conv, x, edge_index)
        agree(fast, conv, x, edge_index)


class Linear(nn.MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(8, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))


class Doubled(Linear):
    def propagate(self, edge_index, size=None, **kwargs):
        return 2 * super().propagate(edge_index, size=size, **kwargs)


class DoubledGCN(nn.GCNConv):
    def propagate(self, edge_index, size=None, **kwargs):
        return 2 * super().propagate(edge_index, size=size, **kwargs)


WATCHERS = {
    "message": (lambda: nn.SAGEConv(8, 4, aggr="sum"), "register_message_forward_hook"),
    "propagate": (lambda: nn.SAGEConv(8, 4), "register_propagate_forward_hook"),
    "aggregate": (lambda: nn.SAGEConv(8, 4), "register_aggregate_forward_hook"),
    "edge_update": (lambda: nn.GATConv(8, 4), "register_edge_update_forward_hook"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", WATCHERS)
def test_hooks_of_message_passing_are_called(name, late):
    x, edge_index = example()
    make, register = WATCHERS[name]
    conv = make()
    if late:
        fast = optimize(conv, x, edge_index)
    getattr(conv, register)(lambda _, inputs, out: 3 * out)
    if not late:
        fast = optimize(conv, x, edge_index)
    agree(fast, conv, x, edge_index)
    assert any("forward hook" in reason for reason in plan(fast).layers[0].reasons)


def test_hooks_of_the_backward_pass_and_on_inner_modules_are_called():
    x, edge_index = example()
    conv = nn.SAGEConv(8, 4)
    fast = optimize(conv, x, edge_index)
    called = []
    conv.register_full_backward_pre_hook(lambda *_: called.append("pre"))
    conv.lin_l.register_full_backward_hook(lambda *_: called.append("inner"))
    fast(x.requires_grad_(), edge_index).sum().backward()
    assert called == ["pre", "inner"]


def test_pruning_and_parametrizing_after_rewriting_take_effect():
    x, edge_index = example()
    model = nn.GraphSAGE(8, 6, 2)
    fast = optimize(model, x, edge_index, train=True)
    prune.random_unstructured(model.convs[0].lin_l, "weight", 0.5)
    torch.nn.utils.parametrizations.weight_norm(model.convs[1].lin_r)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        fast(x, edge_index).sum().backward()
        optimizer.step()
        agree(fast, model, x, edge_index)


def test_replaced_modules_and_changed_options_take_effect():
    x, edge_index = example()
    model = nn.GraphSAGE(8, 6, 2)
    fast = optimize(model, x, edge_index)
    model.convs[0].lin_l = nn.Linear(8, 6)
    agree(fast, model, x, edge_index)
    conv = nn.APPNP(3, 0.1)
    fast = optimize(conv, x, edge_index, static=("x",))
    conv.alpha, conv.K = 0.5, 2
    agree(fast, conv, x, edge_index)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("make", [Doubled, lambda: DoubledGCN(8, 4)], ids=["own", "subclass"])
def test_an_own_propagate_is_the_layer_s(make):
    x, edge_index = example()
    conv = make()
    fast = optimize(conv, x, edge_index)
    agree(fast, conv, x, edge_index)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_message_set_on_the_instance_is_called(late):
    x, edge_index = example()
    conv = nn.GCNConv(8, 4)
    if late:
        fast = optimize(conv, x, edge_index)
    conv.message = lambda x_j, edge_weight: 5 * x_j
    if not late:
        fast = optimize(conv, x, edge_index)
    agree(fast, conv, x, edge_index)


def test_a_layer_that_was_explained_is_rewritten_again():
    x, edge_index = example()
    conv = nn.GCNConv(8, 4)
    conv.explain = True
    conv.explain = False
    assert not plan(conv, x, edge_index).layers[0].reasons


def test_function_transforms_see_the_layer():
    x, edge_index = example()
    model = nn.GraphSAGE(8, 6, 2)
    fast = optimize(model, x, edge_index)
    parameters = dict(model.named_parameters())

    def gradient(module):
        def loss(inputs):
            return torch.func.functional_call(module, inputs, (x, edge_index)).square().sum()

        return torch.func.grad(loss)(parameters)

    for actual, expected in zip(gradient(fast).values(), gradient(model).values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_modes_inside_of_layers_are_those_of_the_model():
    x, edge_index = example()
    conv = nn.GINConv(nn.MLP([8, 8, 8], dropout=0.5))
    fast = optimize(conv, x, edge_index)
    fast.eval()
    assert not conv.nn.norms[0].training
    agree(conv, fast, x, edge_index)
    for module in fast.modules():
        if not isinstance(module, torch.nn.BatchNorm1d):
            module.train()
    assert not torch.equal(fast(x, edge_index), fast(x, edge_index))


@pytest.mark.parametrize(
    "conv",
    [nn.APPNP(3, 0), nn.APPNP(3, 1), nn.APPNP(0, 0.5), nn.SSGConv(8, 4, 1, K=2),
     nn.SSGConv(8, 4, 0.1, K=0)],
    ids=str,
)  # fmt: skip
def test_whole_numbers_and_no_hops(conv):
    x, edge_index = example()
    agree(optimize(conv, x, edge_index), conv, x, edge_index)


@pytest.mark.parametrize("rows", [N, N - 10])
def test_a_reverse_flow_between_two_sets_of_nodes(rows):
    x, edge_index = example()
    y = torch.randn(rows, 8)
    conv = nn.SAGEConv((8, 8), 4, flow="target_to_source", root_weight=rows == N)
    agree(optimize(conv, (x, y), edge_index), conv, (x, y), edge_index)


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.spare = nn.SAGEConv(8, 2)
        self.c = nn.SAGEConv(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.d = self.c
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("unread", torch.randn(3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x, edge_index):
        x = self.norm(self.c(x - self.mean, edge_index)).relu() @ torch.eye(8)
        return self.d(x, edge_index)


class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 2)
        self.inner = Holder()

    def forward(self, x, edge_index):
        return self.head(self.inner(x, edge_index))


def test_buffers_that_code_reads_are_shared():
    x, edge_index = example()
    model = Around().eval()
    fast = optimize(model, x, edge_index)
    model.inner.mean = torch.ones(8)
    agree(fast, model, x, edge_index)
    assert [n for n, _ in fast.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(fast.state_dict()) == list(model.state_dict())
    model = Holder()
    fast = optimize(model, x, edge_index)
    model.double()
    assert fast.mean.dtype == torch.float64


class Filter(Linear):
    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return edge_attr * x_j


class Scaled(Linear):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))

    def message(self, x_j):
        return self.scale * x_j


class Arguments(Linear):
    def message(self, x_j, index, ptr, dim_size):
        return 2 * x_j * (index.view(-1, 1) + dim_size)


class Constant(Linear):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)) @ torch.eye(4)

    def message(self, x_j):
        return 2 * x_j


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("make", "reason"), [
    (Filter, "is not linear"), (Scaled, "no linear layer beside"), (Constant, ""),
    (Arguments, "no "),
])  # fmt: skip
def test_layers_of_users_are_rewritten_or_left_alone(make, reason):
    x, edge_index = example()
    args = (x, edge_index, torch.rand(E, 4))[: 3 if make is Filter else 2]
    conv = make()
    fast = optimize(conv, *args)
    agree(fast, conv, *args)
    actual = plan(fast).layers[0].reasons
    assert reason in "; ".join(actual) if reason else not actual


@pytest.mark.one_of(2)
@pytest.mark.parametrize("make", [nn.GCNConv, nn.TAGConv, nn.SAGEConv, nn.GATConv, nn.GraphConv,
                                  lambda i, o: nn.ChebConv(i, o, 3)])  # fmt: skip
def test_precision_is_that_of_the_layer(make):
    x, edge_index = example()
    conv = make(8, 4)
    fast = optimize(conv, x, edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = fast(x, edge_index), conv(x, edge_index)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_weights_of_edges_may_be_more_precise():
    x, edge_index = example()
    conv, weight = nn.GCNConv(8, 4), torch.rand(E, dtype=torch.float64)
    fast = optimize(conv, x, edge_index, weight)
    actual, expected = fast(x, edge_index, weight), conv(x, edge_index, weight)
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_edge_types_out_of_range_are_the_layer_s_to_refuse():
    x, edge_index = example()
    conv, types = nn.RGCNConv(8, 4, 3), torch.randint(3, (E,))
    fast = optimize(conv, x, edge_index, types)
    types = types + 2
    with pytest.raises((IndexError, RuntimeError, ValueError)) as expected:
        conv(x, edge_index, types)
    with pytest.raises(expected.type):
        fast(x, edge_index, types)


class Keyword(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.SAGEConv(8, 4)

    def forward(self, x, edge_index, *args):
        return self.c(x, edge_index)


def test_static_features_that_no_layer_gets_cause_a_warning():
    class Twice(Keyword):
        def forward(self, x, edge_index, *args):
            return super().forward(2 * x, edge_index)

    x, edge_index = example()
    with pytest.warns(UserWarning, match=r"static=\['x'\] has no effect: no layer gets x as it is"):
        optimize(Twice(), x, edge_index, static=("x",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(Keyword(), x, edge_index, static=("x",))
    optimize(nn.SAGEConv(8, 4), x, edge_index, static=None)
