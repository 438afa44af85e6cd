"""Messages are ordinary Python: what a formula cannot say gives what PyG gives, gradients too."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import FAConv, GATConv, MessagePassing, NNConv
from torch_geometric.utils import softmax

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 20, 80, 24
Message = Callable[["Layer", Tensor, Tensor], Tensor]


class Layer(MessagePassing):
    def __init__(self, message: Message):
        super().__init__()
        self.register_buffer("mean", torch.ones(F))
        self.norm = torch.nn.BatchNorm1d(F)
        self.says, self.kept = message, []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.says(self, x_i, x_j)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * 2


def without_gradients(self, x_i, x_j):
    with torch.no_grad():
        gate = torch.sigmoid(x_i + x_j)
    return gate * x_j


def added_to_a_plain_tensor(self, x_i, x_j):
    out = torch.ones(E, F)
    out.add_(x_j)
    return out


def buffer_changed_after_use(self, x_i, x_j):
    out = (x_j - x_i) - self.mean
    self.mean.add_(1)
    return out


def caught(self, x_i, x_j):
    try:
        return x_j.cumsum(0)
    except Exception:
        return x_j * 0


def derivative_inside(self, x_i, x_j):
    score = (x_i * x_j).sum(-1)
    (slope,) = torch.autograd.grad(score.sum(), x_j, create_graph=True)
    return slope * x_j


def kept_outside(self, x_i, x_j):
    self.kept.append(x_j * 2)
    return x_i + x_j


MESSAGES = {
    "no_grad": without_gradients,
    "autograd function": lambda self, x_i, x_j: x_j + Reversed.apply(x_j * x_i),
    "autograd function, one side": lambda self, x_i, x_j: Reversed.apply(x_j),
    "in place of a plain tensor": added_to_a_plain_tensor,
    "changed after use": buffer_changed_after_use,
    "caught": caught,
    "scripted": lambda self, x_i, x_j: scripted(x_j) - x_i,
    "derivative": derivative_inside,
    "checkpoint": lambda self, x_i, x_j: checkpoint(torch.tanh, x_j, use_reentrant=False),
    "checkpoint, reentrant": lambda self, x_i, x_j: checkpoint(torch.tanh, x_j, use_reentrant=True),
    "batch norm": lambda self, x_i, x_j: self.norm(x_j - x_i),
    "vmap": lambda self, x_i, x_j: torch.vmap(lambda a, b: a.sin() * b.sum())(x_i, x_j),
    "func.grad": lambda self, x_i, x_j: torch.func.grad(lambda t: t.pow(3).sum())(x_j - x_i),
    "kept outside": kept_outside,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("width", [1, F], ids=["narrow", "wide"])
@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_of_any_kind_gives_what_pyg_gives(kind, width, monkeypatch):
    monkeypatch.setitem(globals(), "F", width)
    x, edge_index = torch.randn(N, width), torch.randint(N, (2, E))
    actual = []
    for patched in (False, True):
        layer, inputs = Layer(MESSAGES[kind]), x.clone().requires_grad_()
        outs = []
        for _ in range(2):  # what is known of a layer is of use from the second call on
            if patched:
                with pyg_accel.patched():
                    outs.append(layer(inputs, edge_index))
            else:
                outs.append(layer(inputs, edge_index))
        total = sum(out.square().sum() for out in outs)
        total += sum(message.sum() for message in layer.kept)
        total.backward()
        actual.append([*outs, inputs.grad, *layer.buffers()])
    for stock, ours in zip(*actual, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-4)  # sums in another order


def test_attention_weights_that_are_detached_too_keep_their_gradient():
    x, edge_index = torch.randn(N, F), torch.randint(N, (2, E))
    torch.manual_seed(3)
    layer = GATConv(F, 8, heads=2, aggr="softmax")
    grads = []
    for patched in (False, True):
        layer.zero_grad()
        with pyg_accel.patched() if patched else torch.enable_grad():
            layer(x, edge_index).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_layer_that_is_not_known_yet(reentrant):
    x, edge_index = torch.randn(N, F), torch.randint(N, (2, E))
    layers = [NNConv(F, 4, torch.nn.Linear(3, F * 4)), Layer(lambda self, x_i, x_j: x_i * x_j)]
    attr = torch.randn(E, 3)
    for layer in layers:
        args = (edge_index, attr) if isinstance(layer, NNConv) else (edge_index,)
        grads = []
        for patched in (False, True):
            inputs = x.clone().requires_grad_()
            with pyg_accel.patched(layer) if patched else torch.enable_grad():
                checkpoint(layer, inputs, *args, use_reentrant=reentrant).sum().backward()
            grads.append(inputs.grad)
        torch.testing.assert_close(grads[1], grads[0])


def test_a_checkpoint_of_dropped_weights():
    edge_index, layer = torch.randint(N, (2, E)), GATConv(F, 4, heads=2, dropout=0.4)
    x, grads = torch.randn(N, F), []
    with pyg_accel.patched():
        for checkpointed in (True, False):  # the layer is not known yet in the first of them
            inputs = x.clone().requires_grad_()
            torch.manual_seed(4)
            args = (inputs, edge_index)
            out = checkpoint(layer, *args, use_reentrant=False) if checkpointed else layer(*args)
            out.square().sum().backward()
            grads.append(inputs.grad)
    torch.testing.assert_close(*grads)


def test_a_checkpoint_leaves_no_messages_in_a_layer():
    x, edge_index = torch.randn(N, F, requires_grad=True), torch.randint(N, (2, E))
    layer = FAConv(F)  # puts messages aside, and takes them away when it has its result
    with pyg_accel.patched():
        for _ in range(2):  # the backward pass ends its call where it has what it needs
            checkpoint(layer, x, x, edge_index, use_reentrant=False).sum().backward()
            assert layer._alpha is None
            pickle.dumps(layer)


class Leaves(MessagePassing):
    """Leaves attention weights in the layer, and returns nothing."""

    def __init__(self):
        super().__init__(aggr="sum")

    def forward(self, x, a, edge_index):
        self.edge_updater(edge_index, a=(a, a))
        return self.propagate(edge_index, x=x)

    def edge_update(self, a_j, a_i, index, size_i):
        self._alpha = softmax(a_j + a_i, index, num_nodes=size_i)

    def message(self, x_j):
        return self._alpha * x_j


def test_weights_may_be_left_in_the_layer():
    layer, edge_index = Leaves(), torch.randint(N, (2, E))
    x, a = torch.randn(N, F), torch.randn(N, 1)
    right = layer(x, a, edge_index)
    with pyg_accel.patched():
        for _ in range(2):
            torch.testing.assert_close(layer(x, a, edge_index), right)


def test_a_message_may_read_the_edge_index():
    class Reads(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j, edge_index):
            return x_j * edge_index.sparse_size(0)

    edges = EdgeIndex(torch.randint(N, (2, E)), sparse_size=(N, N))
    x, layer = torch.randn(N, F), Reads()
    right = layer(x, edges)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edges), right)


AFTER = {
    "vmap": lambda out: torch.vmap(lambda row: row.sin() * row.sum())(out),
    "func.grad": torch.func.grad(lambda out: out.sin().sum()),
    "cond": lambda out: torch.cond(out.sum() > 0, torch.sin, torch.cos, (out,)),
    "nested": lambda out: out + torch.nested.nested_tensor([out[:3], out[3:5]])[0].sum(),
    "flex_attention": lambda out: out + flex_attention(*[out.detach()[None, None]] * 3),
}


class Followed(Layer):
    def __init__(self, after: Callable[[Tensor], Tensor]):
        super().__init__(lambda self, x_i, x_j: x_j - x_i)
        self.after = after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.after(self.propagate(edge_index, x=x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", AFTER)
def test_transforms_and_branches_of_torch_follow_the_messages(after, same_as_stock):
    same_as_stock(Followed(AFTER[after]).double(), torch.randn(N, F).double().requires_grad_(),
                  torch.randint(N, (2, E)))  # fmt: skip
