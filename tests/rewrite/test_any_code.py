"""Layers with any code and arguments of any kind: an optimized model is the model."""

import copy
import operator
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex

from pyg_accel import optimize, plan
from pyg_accel.rewrite import associations
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options
from tests.rewrite.own_layers import (
    OTHERS,
    Base,
    Before,
    Both,
    E,
    N,
    Plain,
    agree,
    inputs,
    was_decided,
)
from tests.user_layers import written

pytestmark = pytest.mark.usefixtures("always")  # the graphs are small


class Branching(Base):
    """Every branch that its code takes is taken in the call at hand."""

    scale = 1.0

    def forward(self, x, edge_index, edge_weight=None):
        out = super().forward(x, edge_index, edge_weight)
        if self.half is not None:
            out = out * self.half
        out += self.options[0]
        return out if self.training else out * GLOBAL

    def message(self, x_j, edge_weight):
        if edge_weight is None:
            return x_j.relu() if self.power == 1 else x_j
        if self.training and x_j.dim() == 2 and x_j.size(-1) == 4:
            return F.dropout(edge_weight, 0.5).view(-1, 1) * x_j
        return self.scale * (edge_weight.view(-1, 1) * x_j)


GLOBAL = 1.0


def test_a_message_takes_its_branches_in_every_call(monkeypatch):
    conv, (x, edge_index) = Branching(power=1, options=[1.0], half=None).double().eval(), inputs()
    weight = torch.rand(E, dtype=torch.float64)
    layer = OptimizedModel(conv, Options(train=True))

    def agrees():
        for args in ([], [weight]):
            agree(layer, conv, x, edge_index, *args)

    agrees()
    for name, value in (("power", 2), ("half", 0.5), ("scale", 3.0)):
        monkeypatch.setattr(conv, name, value)
        agrees()
    conv.options[0] = 5.0
    agrees()
    monkeypatch.setattr(f"{__name__}.GLOBAL", 2.0)
    agrees()
    conv.train(), layer.train()
    agrees()
    assert rewritten_layers(layer)[""].decisions


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -3 * grad


def typed(self, x, edge_index):
    h = self.lin(x)
    h = h if type(h) is torch.Tensor else h + 1
    return self.send(edge_index, h)


def detached(self, x, edge_index):
    with torch.no_grad():
        h = self.lin(x)
    return self.send(edge_index, h) + self.lin.bias


def shared(self, x, edge_index):
    h = self.lin(x)
    return self.send(edge_index, h) + h


def again(self, x, edge_index):
    h = self.lin(x)
    return self.send(edge_index, h).relu() + h.tanh()


ANY_CODE = {
    "two calls": {"forward": lambda self, x, e: self.send(e, self.send(e, self.lin(x)))},
    "a derivative of its own": {
        "forward": lambda self, x, e: Reversed.apply(self.send(e, self.lin(x)))},
    "degrees": {  # PyG cannot render the propagate of this one
        "propagate": pyg.MessagePassing.propagate,
        "message": lambda self, x_j, index, size_i, dim_size, ptr=None: (
            x_j / torch.bincount(index, minlength=size_i)[index].view(-1, 1))},
    "a change in place": {
        "forward": lambda self, x, e: self.send(e, operator.iadd(self.lin(x), 1))},
    "an update": {"update": lambda self, out: out.relu() + 1},
    **{f.__name__: {"forward": f} for f in (typed, detached, shared, again)},
}  # fmt: skip


@pytest.mark.parametrize("name", ANY_CODE)
def test_models_with_any_code_give_the_results_of_pyg(name):
    conv, (x, edge_index) = written(Before, **ANY_CODE[name])().double(), inputs()
    layer = OptimizedModel(conv, Options(train=True))
    for _ in range(3):
        agree(layer, conv, x, edge_index)
    actual = rewritten_layers(layer)[""]
    assert actual.decisions or actual.reasons


def test_a_product_is_computed_before_its_operands_are_written_to():
    def writes(self, x, edge_index, edge_weight):
        edge_weight = 2 * edge_weight
        out = self.send(edge_index, self.lin(x), edge_weight)
        edge_weight.view(-1).zero_()
        return out

    conv, (x, edge_index) = written(Base, forward=writes)().double(), inputs()
    layer, weight = OptimizedModel(conv, Options()), torch.rand(E, dtype=torch.float64)
    with torch.no_grad():
        actual = layer(x, edge_index, weight)
        torch.testing.assert_close(actual, conv(x, edge_index, weight))


def test_precisions_that_meet_give_that_of_the_layer():
    conv, x, edge_index = Before(), torch.randn(N, 6), torch.randint(N, (2, E))
    layer, weight = OptimizedModel(conv, Options()), torch.rand(E)
    with torch.autocast("cpu", torch.bfloat16):  # the weights make messages float32 again
        for _ in range(2):
            actual, expected = layer(x, edge_index, weight), conv(x, edge_index, weight)
            torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)
    for _ in range(2):
        torch.testing.assert_close(layer(x, edge_index, weight), conv(x, edge_index, weight))
    assert rewritten_layers(layer)[""].decisions


class Counted(Base):
    """Its forward can be followed, and its message."""

    propagate_type: ClassVar = dict(x=Any)

    def __init__(self):
        super().__init__(norm=torch.nn.BatchNorm1d(4), inner=torch.nn.BatchNorm1d(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.count, self.seen = 0, []

    def forward(self, x, edge_index):
        self.calls += 1
        self.count += 1
        self.seen.append(self.count)
        return self.drop(self.norm(self.propagate(edge_index, x=self.lin(self.prepare(x)))))

    def prepare(self, x):
        return x

    def drop(self, out):
        return F.dropout(out, 0.5, training=self.training)

    def message(self, x_j):
        return x_j


class Normalised(Counted):
    """Its message cannot be followed."""

    def prepare(self, x):
        return F.dropout(x, 0.2)

    def drop(self, out):
        return super().drop(out + torch.rand_like(out))

    def message(self, x_j):
        return self.inner(x_j)


def state(conv):
    return {k: v.clone() for k, v in conv.state_dict().items()}, conv.count, list(conv.seen)


@pytest.mark.parametrize("make", [Normalised, Counted])
@pytest.mark.parametrize("training", [False, True])
def test_side_effects_of_a_call_happen_once(make, training):
    conv, (x, edge_index) = make().double().train(training), inputs()
    mine = copy.deepcopy(conv)
    layer, seen = OptimizedModel(mine, Options(train=True)), mine.seen
    for _ in range(3):
        torch.manual_seed(1)
        expected, drawn = conv(x, edge_index), torch.rand(1)
        torch.manual_seed(1)
        actual = layer(x, edge_index)
        assert torch.equal(torch.rand(1), drawn)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state(mine), state(conv), rtol=1e-10, atol=1e-10)
    assert mine.seen is seen == [1, 2, 3]


def test_recording_for_products_restores_state():
    noisy = written(Base, forward=lambda self, x, edge_index: F.dropout(
        self.norm(self.send(edge_index, self.lin(x))), 0.5, self.training))  # fmt: skip
    conv, (x, edge_index) = noisy(norm=torch.nn.BatchNorm1d(4)).double(), inputs()
    before = {name: value.clone() for name, value in conv.state_dict().items()}
    drawn = torch.get_rng_state()
    assert associations(conv, x, edge_index).all
    torch.testing.assert_close(dict(conv.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_threads_do_not_see_each_other_s_calls():
    conv, (x, edge_index) = Before().double(), inputs()
    layer, started, done = OptimizedModel(conv, Options()), threading.Event(), threading.Event()
    expected = conv(x, edge_index)

    class Waits(torch.nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                started.set()
                assert done.wait(60)
            return x

    conv.lin = torch.nn.Sequential(Waits(), conv.lin)
    actual = []
    thread = threading.Thread(target=lambda: actual.append(layer(x, edge_index)))
    thread.start()
    assert started.wait(60)
    torch.testing.assert_close(layer(x, edge_index), expected)
    assert "propagate" not in vars(conv) and "propagate" not in vars(
        rewritten_layers(layer)[""].layer
    )
    done.set()
    thread.join()
    torch.testing.assert_close(actual[0], expected)


def test_arguments_come_in_any_order_and_kind():
    def named(self, x, edge_index, *more, scale=1.0, edge_weight=None, **options):
        out = self.send(edge_index, self.lin(x), edge_weight)
        return out * scale + len(more) + options.get("shift", 0.0)

    conv, (x, edge_index) = written(Base, forward=named)().double(), inputs()
    weight = torch.rand(E, dtype=x.dtype)
    layer = OptimizedModel(conv, Options())
    for args, kwargs in (
        ((), {"edge_index": edge_index, "x": x}),
        ((x,), {"edge_weight": weight, "scale": 2.0, "edge_index": edge_index}),
        ((x, edge_index, 1, 2), {"shift": 3.0, "edge_weight": weight}),
        ((x, edge_index), {"other": None}),
    ):
        actual, expected = layer(*args, **kwargs), conv(*args, **kwargs)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        assert associations(conv, *args, **kwargs).all
    assert was_decided(layer)


def graphs():
    edge_index = torch.randint(N, (2, E))
    yield "int32", N, edge_index.int()
    yield "no edges", N, edge_index[:, :0]
    yield "no nodes", 0, edge_index[:, :0]
    yield "one node", 1, edge_index * 0
    yield "view", N, torch.stack([edge_index, edge_index], -1)[..., 1]
    yield "EdgeIndex", N, EdgeIndex(edge_index, sparse_size=(N, N))
    coo = torch.sparse_coo_tensor(edge_index, torch.ones(E, dtype=torch.double), (N, N))
    yield "COO", N, coo.coalesce()
    yield "CSR", N, coo.to_sparse_csr()
    yield "smaller", N // 2, edge_index[:, :100] // 2
    yield "out of range", N // 2, edge_index
    yield "negative", N, edge_index - 1
    yield "malformed", N, edge_index[0]
    yield "float", N, edge_index.double()


def attempt(module, *args):
    try:
        return module(*args)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError) as e:
        return type(e)


@pytest.mark.parametrize("make", [Before, Plain, written(Before, message=OTHERS[0])])
def test_graphs_of_any_kind_give_the_results_of_the_layer(make):
    conv, (x, edge_index) = make().double(), inputs()
    fast = optimize(conv, x, edge_index)
    for name, nodes, graph in graphs():
        for _ in range(2):
            mine, theirs = attempt(fast, x[:nodes], graph), attempt(conv, x[:nodes], graph)
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=name)
            else:
                assert isinstance(mine, type) and issubclass(mine, Exception), name


class Stacked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        square = Plain("mean")
        square.lin = pyg.Linear(6, 6)
        self.first, self.same = Both(), pyg.Sequential("x, e", [(square, "x, e -> x")])
        self.again = self.same

    def forward(self, x, edge_index, edge_attr):
        x = self.again(self.same(x, edge_index).sigmoid(), edge_index)
        return self.first(x, edge_index, edge_attr)


def second(module, args):
    x, *rest = args
    x = x.clone().requires_grad_()
    params = [p for p in module.parameters() if p.requires_grad]
    (first,) = torch.autograd.grad(module(x, *rest).square().sum(), [x], create_graph=True)
    return torch.autograd.grad(first.square().sum(), [x, *params], materialize_grads=True)


def test_a_model_of_written_layers_is_the_model():
    model, (x, edge_index) = Stacked().double().eval(), inputs()
    args = (x, edge_index, torch.rand(E, 3, dtype=x.dtype))
    fast = optimize(model, *args, train=True)
    assert all(layer.trees for layer in plan(fast).layers)
    same = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(second(fast, args), second(model, args), **same)
    model.first.lin.requires_grad_(False)
    torch.testing.assert_close(second(fast, args), second(model, args), **same)
    copied = copy.deepcopy(fast)
    with torch.no_grad():
        copied.first.lin.weight.zero_()
    torch.testing.assert_close(fast(*args), model(*args), **same)
    assert not torch.equal(copied(*args), fast(*args))
    kept = checkpoint(fast, *args, use_reentrant=False)
    torch.testing.assert_close(kept, model(*args), **same)
    (grad,) = torch.autograd.grad(kept.sum(), [model.same[0].lin.weight])
    (expected,) = torch.autograd.grad(model(*args).sum(), [model.same[0].lin.weight])
    torch.testing.assert_close(grad, expected, **same)
    weights = {name: 2 * p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, weights, args),
        torch.func.functional_call(model, weights, args), **same,
    )  # fmt: skip
