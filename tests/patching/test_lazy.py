"""The rules of lazy edge tensors, one by one, through layers that a user might write."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import pyg_accel
from benchmarks.layers.modes import traces

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 25, 160, 6
LINEAR = torch.nn.Linear(F, 5).double()
WIDE = torch.nn.Linear(3 * F, 5).double()
MAX_MATERIALIZED_WIDTH = torch.nn.Linear(F, 1).double()
SCALE = torch.randn(F, dtype=torch.float64)


def features(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


class Layer(MessagePassing):
    """A layer whose message is a function of x_i, x_j, e (features of edges) and w (a number)."""

    def __init__(self, says: Callable[..., Tensor], aggr: Any = "sum", node_dim: int = -2) -> None:
        super().__init__(aggr=aggr, node_dim=node_dim)
        self.says = says

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e, w=w)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.says(x_i, x_j, e, w)


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    edge_index = torch.randint(0, N - 3, (2, E))
    return features(N, F), edge_index, features(E, F), features(E, 1)


def set_in_place(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(t)
    return t


# What a message says, and the formula (of a sum) that it becomes.
FUSED = {
    "copy": (lambda i, j, e, w: j, "u0"),
    "target": (lambda i, j, e, w: i, "v0"),
    "difference": (lambda i, j, e, w: j - i, "sub(u0,v1)"),
    "number-times": (lambda i, j, e, w: 2 * j + i, "add(u0,v1)"),
    "minus-from-number": (lambda i, j, e, w: 1 - j * i, "sub(1.0,mul(u0,v1))"),
    "number-divided": (
        lambda i, j, e, w: 1 / (1 + (i * j).exp()),
        "div(1.0,add(exp(mul(v0,u1)),1.0))",
    ),
    "negated": (lambda i, j, e, w: -(i + j), "neg(add(v0,u1))"),
    "absolute": (lambda i, j, e, w: (i - j).abs(), "abs(sub(v0,u1))"),
    "squared": (lambda i, j, e, w: (i - j) ** 2, "mul(sub(v0,u1),sub(v0,u1))"),
    "cubed": (lambda i, j, e, w: (i - j).pow(3), "pow(sub(v0,u1),3.0)"),
    "root": (lambda i, j, e, w: ((i - j).abs() + 1).sqrt(), "sqrt(add(abs(sub(v0,u1)),1.0))"),
    "rsqrt": (
        lambda i, j, e, w: ((i * j).square() + 1).rsqrt(),
        "div(1.0,sqrt(add(mul(mul(v0,u1),mul(v0,u1)),1.0)))",
    ),
    "log": (lambda i, j, e, w: ((i - j).abs() + 1).log(), "log(add(abs(sub(v0,u1)),1.0))"),
    "relu": (lambda i, j, e, w: (i + j).relu(), "relu(add(v0,u1))"),
    "functional-relu": (lambda i, j, e, w: fn.relu(j + e), "relu(add(u0,e1))"),
    "leaky-relu": (lambda i, j, e, w: fn.leaky_relu(i + j, 0.3), "leaky_relu(add(v0,u1),0.3)"),
    "tanh": (lambda i, j, e, w: torch.tanh(i + j), "tanh(add(v0,u1))"),
    "sigmoid": (lambda i, j, e, w: torch.sigmoid(i) * j, "mul(v0,u1)"),
    "silu": (lambda i, j, e, w: fn.silu(i + j), "silu(add(v0,u1))"),
    "gelu": (lambda i, j, e, w: fn.gelu(i + j), "gelu(add(v0,u1))"),
    "larger": (lambda i, j, e, w: torch.maximum(i, j), "maximum(v0,u1)"),
    "smaller": (lambda i, j, e, w: torch.minimum(i, j + e), "minimum(v0,add(u1,e2))"),
    "chosen": (
        lambda i, j, e, w: torch.where(w.view(-1, 1) > 0, i * j, i + j),
        "add(keep(mul(v0,u1),e2),keep(add(v0,u1),e3))",
    ),
    "chosen-or-number": (
        lambda i, j, e, w: torch.where(w.view(-1, 1) > 0, i + j, 2.0),
        "add(keep(add(v0,u1),e2),e3)",
    ),
    "softplus": (lambda i, j, e, w: fn.softplus(i + j), "softplus(add(v0,u1))"),
    "weighted": (lambda i, j, e, w: w * j, "mul(e0,u1)"),
    "weighted-view": (lambda i, j, e, w: w.view(-1, 1) * j, "mul(e0,u1)"),
    "shared-row": (lambda i, j, e, w: (i + j) * SCALE, "mul(add(v0,u1),v2)"),
    "in-place-sum": (
        lambda i, j, e, w: set_in_place(i + j, lambda t: t.add_(e)),
        "add(add(v0,u1),e2)",
    ),
    "in-place-relu": (lambda i, j, e, w: fn.relu(i + j, inplace=True), "relu(add(v0,u1))"),
    "clone": (lambda i, j, e, w: (i + j).clone().contiguous(), "add(v0,u1)"),
    "to-the-same-dtype": (lambda i, j, e, w: (i + j).to(torch.float64), "add(v0,u1)"),
    "dropout-in-eval": (lambda i, j, e, w: fn.dropout(i + j, 0.5, training=False), "add(v0,u1)"),
    "view-there-and-back": (
        lambda i, j, e, w: (i + j).view(-1, 2, 3).relu().view(-1, F),
        "relu(add(v0,u1))",
    ),
    "hoisted-linear": (lambda i, j, e, w: LINEAR(j), "u0"),
    "hoisted-linear-both": (lambda i, j, e, w: LINEAR(i) * LINEAR(j), "mul(v0,u1)"),
    "hoisted-activation": (lambda i, j, e, w: j.relu() + i.tanh(), "add(u0,v1)"),
    "hoisted-along-features": (lambda i, j, e, w: j.softmax(-1) * i.mean(1, True), "mul(u0,v1)"),
    "hoisted-extremes": (lambda i, j, e, w: j.max(1, keepdim=True)[0] + i, "add(u0,v1)"),
    "hoisted-bounds": (lambda i, j, e, w: j.clamp(SCALE, 2 + SCALE) - i.sin(), "sub(u0,v1)"),
    "hoisted-heads": (
        lambda i, j, e, w: j.view(-1, 2, 3).permute(0, 2, 1).flatten(1) * i,
        "mul(u0,v1)",
    ),
    "cat-linear": (lambda i, j, e, w: WIDE(torch.cat([i, j, e], -1)), "add(add(v0,u1),e2)"),
    "cat-linear-difference": (
        lambda i, j, e, w: WIDE(torch.cat([i, j, i], 1)).relu(),
        "relu(add(v0,u1))",
    ),
    "slices": (lambda i, j, e, w: i[:, :3] * j[:, 3:], "mul(v0,u1)"),
    "chunks": (lambda i, j, e, w: (lambda a, b: a + b)(*j.chunk(2, -1)), "u0"),
    "scalar-score": (lambda i, j, e, w: MAX_MATERIALIZED_WIDTH(j) * i, "mul(u0,v1)"),
    "merged-heads": (
        lambda i, j, e, w: (j.view(-1, 2, 3) * e[:, :2].view(-1, 2, 1)).view(-1, F),
        "mul(u0,e1)",
    ),
    "merged-heads-and-back": (
        lambda i, j, e, w: (
            (j.view(-1, 2, 3) * e[:, :2].view(-1, 2, 1)).reshape(-1, 6).clone().view(-1, 3, 2)
        ).flatten(1),
        "mul(u0,e1)",
    ),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("reduce", ["sum", "max", "mean+sqsum"])
@pytest.mark.parametrize("name", FUSED)
def test_a_message_becomes_the_formula_it_says_and_equals_stock(
    name, reduce, inputs, same_as_stock, report_of
):
    message, formula = FUSED[name]
    aggr = ["mean", "std"] if reduce == "mean+sqsum" else reduce
    same_as_stock(Layer(message, aggr), *inputs)
    assert [row.formula for row in report_of()] == [f"{reduce}_j {formula}"]


def two_steps(i: Tensor, j: Tensor, e: Tensor, w: Tensor) -> Tensor:
    score = (i * j).sum(-1)
    return j * score.unsqueeze(-1).sigmoid()


# Messages that need some numbers written out (E x 1), or PyG's own path altogether.
OTHER = {
    "dot-gate": two_steps,
    "dot-keepdim": lambda i, j, e, w: (i * j).sum(dim=-1, keepdim=True) * j,
    "norm": lambda i, j, e, w: (i - j).norm(dim=-1, keepdim=True) * j,
    "mean-of-features": lambda i, j, e, w: (i + j).mean(-1, keepdim=True) * j,
    "softmax-of-features": lambda i, j, e, w: (i + j).softmax(-1),
    "where": lambda i, j, e, w: torch.where(i > j, i, j),
    "compare": lambda i, j, e, w: (i > j).double() * e,
    "sine": lambda i, j, e, w: (i + j).sin(),
    "gelu-by-tanh": lambda i, j, e, w: fn.gelu(i + j, approximate="tanh"),
    "elu": lambda i, j, e, w: fn.elu(i + j),
    "elu-alpha": lambda i, j, e, w: fn.elu(i * j, alpha=0.3),
    "clamp-min": lambda i, j, e, w: (i + j).clamp(min=0.5),
    "clamp-both": lambda i, j, e, w: (i + j).clamp(-0.5, 0.5),
    "clamp-max": lambda i, j, e, w: (i + j).clamp(max=0.5),
    "layer-norm": lambda i, j, e, w: fn.layer_norm(i + j, (F,)),
    "linear-of-sum": lambda i, j, e, w: LINEAR(i + j),
    "matmul": lambda i, j, e, w: (i + j) @ LINEAR.weight.t(),
    "matmul-of-one": lambda i, j, e, w: j @ LINEAR.weight.t(),
    "einsum": lambda i, j, e, w: torch.einsum("ef,eg->efg", i, j).flatten(1),
    "outer": lambda i, j, e, w: (i.unsqueeze(2) * j.unsqueeze(1)).flatten(1),
    "transposed": lambda i, j, e, w: (i + j).t().contiguous().t(),
    "pick-edges": lambda i, j, e, w: (i + j)[torch.arange(E)],
    "flip-edges": lambda i, j, e, w: (i + j).flip(0),
    "cumulated": lambda i, j, e, w: (i + j).cumsum(0),
    "stacked": lambda i, j, e, w: torch.stack([i + j, i * j], 1).flatten(1),
    "stacked-alike": lambda i, j, e, w: torch.stack([i + j, j + i], 1).flatten(1),
    "stacked-same-formula": lambda i, j, e, w: torch.stack([i + j, (2 * i) + j], 1).flatten(1),
    "cat-left-alone": lambda i, j, e, w: torch.cat([i, j, e], -1),
    "cat-of-formulas": lambda i, j, e, w: torch.cat([i + j, i * j], -1),
    "cat-then-activation": lambda i, j, e, w: torch.cat([i, j], -1).relu(),
    "cat-along-edges": lambda i, j, e, w: torch.cat([i, j], 0)[:E],
    "cat-narrow-linear": lambda i, j, e, w: (
        fn.linear(torch.cat([i, j], -1), WIDE.weight[:1, : 2 * F]) * j
    ),
    "sum-over-everything": lambda i, j, e, w: j * (i * j).sum(),
    "sum-over-edges": lambda i, j, e, w: j * (i * j).sum(0),
    "maximum-over-everything": lambda i, j, e, w: j - j.max(),
    "in-place-view": lambda i, j, e, w: set_in_place(i + j, lambda t: t[:, 0].zero_()),
    "in-place-column": lambda i, j, e, w: set_in_place(
        i + j, lambda t: t.__setitem__((slice(None), 0), 1.0)
    ),
    "detached": lambda i, j, e, w: (i - j).detach() * e,
    "detached-target": lambda i, j, e, w: i.detach() * j,
    "converted": lambda i, j, e, w: (i + j).float().double(),
    "item": lambda i, j, e, w: j * float((i * j)[0, 0].item()),
    "shape-arithmetic": lambda i, j, e, w: j * i.size(0) / i.shape[1] + len(i),
    "new-tensor": lambda i, j, e, w: j + torch.ones_like(i) + i.new_zeros(F),
    "power-of-tensor": lambda i, j, e, w: (i * j).abs().pow(w.sigmoid()),
    "number-to-the-power": lambda i, j, e, w: 2 ** (i * j),
    "floor": lambda i, j, e, w: (i * j).floor() * j,
    "features-of-edges-only": lambda i, j, e, w: e,
    "integer-tensor": lambda i, j, e, w: j * torch.arange(F),
    "bool-mask": lambda i, j, e, w: j.masked_fill(torch.arange(E).view(-1, 1) % 2 == 0, 0.0),
    "lerp": lambda i, j, e, w: torch.lerp(i, j, 0.3),
    "addcmul": lambda i, j, e, w: torch.addcmul(e, i, j),
    "out-of-place-alpha": lambda i, j, e, w: torch.add(i, j, alpha=2),
    "rounded-division": lambda i, j, e, w: torch.div(i, 1 + j.abs(), rounding_mode="floor"),
    "repeat": lambda i, j, e, w: (i + j).repeat(1, 2),
    "expand": lambda i, j, e, w: ((i * j).sum(-1, keepdim=True)).expand(-1, 3),
    "unbind": lambda i, j, e, w: (i + j).unbind(1)[2].view(-1, 1),
    "permuted-heads": lambda i, j, e, w: (i + j).view(-1, 2, 3).transpose(1, 2).reshape(-1, F),
    "reduced-heads": lambda i, j, e, w: (i + j).view(-1, 2, 3).mean(1),
    "summed-heads": lambda i, j, e, w: (i * j).view(-1, 2, 3).sum(-1),
    "summed-where-one-broadcasts": lambda i, j, e, w: (w + j).sum(-1, keepdim=True) * e,
    "summed-scores-where-one-broadcasts": lambda i, j, e, w: (i[:, :1] - j).sum(-1).view(-1, 1),
    "chosen-or-inexact-number": lambda i, j, e, w: torch.where(w > 0, (i + j).tanh(), 0.1),
    "chosen-or-integers": lambda i, j, e, w: torch.where(w > 0, i + j, torch.full((F,), 2**25 + 1)),
    "summed-over-heads": lambda i, j, e, w: (i * j).view(-1, 2, 3).sum(1),
    "summed-over-heads-kept": lambda i, j, e, w: (
        (i * j).view(-1, 2, 3).sum(dim=[1], keepdim=True)[:, 0]
    ),
    "merged-then-activation": lambda i, j, e, w: (
        (j.view(-1, 2, 3) * e[:, :2].view(-1, 2, 1)).view(-1, F).tanh() * i
    ),
    "logsumexp": lambda i, j, e, w: torch.logsumexp(i + j, -1, keepdim=True),
    "normalised": lambda i, j, e, w: fn.normalize(i, dim=-1) * fn.normalize(j, dim=-1),
    "cosine": lambda i, j, e, w: fn.cosine_similarity(i, j).unsqueeze(-1) * j,
    "edge-times-target-number": lambda i, j, e, w: w * i[:, :1] * j,
    "broadcast-up": lambda i, j, e, w: j[:, :1] * e,
    "nothing-of-nodes": lambda i, j, e, w: e * w,
    "constant": lambda i, j, e, w: torch.ones(E, 2, dtype=torch.float64),
    "numpy-style-names": lambda i, j, e, w: torch.multiply(torch.subtract(i, j), e),
    "scalar-tensor": lambda i, j, e, w: (i + j) * torch.tensor(2.0),
    "parameter-row": lambda i, j, e, w: (i * j) + SCALE.view(1, -1),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("name", OTHER)
def test_any_other_message_equals_stock(name, aggr, inputs, same_as_stock):
    same_as_stock(Layer(OTHER[name], aggr), *inputs)


@pytest.mark.parametrize("other", [0.5, torch.tensor(0.5)], ids=["number", "scalar-tensor"])
def test_a_number_that_is_chosen_does_not_widen_the_messages(other, inputs, same_as_stock):
    x, edge_index, e, w = inputs
    given = [t.detach().bfloat16() for t in (x, e, w)]
    layer = Layer(lambda i, j, e, w: torch.where(w > 0, i * j, other), "max")
    same_as_stock(layer, given[0], edge_index, *given[1:])


# Functions of pieces, on wide messages that are 0, or not far from it, at many edges.
PIECES = {
    "relu": fn.relu,
    "leaky-relu": lambda t: fn.leaky_relu(t, 0.3),
    "abs": torch.abs,
    "elu": fn.elu,
    "elu-alpha": lambda t: fn.elu(t, 0.3),
    "celu": fn.celu,
    "selu": fn.selu,
    "relu6": fn.relu6,
    "hardtanh": lambda t: fn.hardtanh(t, 0.0, 1.0),
    "clamp-at-0": lambda t: t.clamp(min=0),
    "clamp-min": lambda t: torch.clamp_min(t, 0),
    "clamp-far": lambda t: t.clamp(min=-1e6),
    "clamp-at-infinity": lambda t: t.clamp(min=-math.inf),
    "clamp-max": lambda t: t.clamp(max=0),
    "clamp-both": lambda t: t.clamp(0, 1),
    "power-0": lambda t: t**0,
    "power-1": lambda t: t**1,
    "power-2": lambda t: t**2,
    "power-3": lambda t: t**3,
}


@pytest.mark.each
@pytest.mark.parametrize("of_nodes", [False, True], ids=["edges", "nodes"])
@pytest.mark.parametrize("name", PIECES)
def test_where_pieces_of_a_function_meet_it_equals_stock(name, of_nodes, same_as_stock):
    x = torch.randn(N, 40).relu_() * 1e-5  # in float32, which cancels soonest
    x, edges, weight = x.requires_grad_(), torch.randint(0, N, (2, E)), torch.rand(E, 1)
    function = PIECES[name]
    layer = Layer(lambda i, j, e, w: function(j) if of_nodes else function(j * w))
    same_as_stock(layer, x, edges, weight, weight)


EXPONENT = torch.nn.Parameter(torch.tensor([1.5]))

# Functions with an infinite derivative at 0, at a negative number or at 200 (in float32).
STEEP = {
    "sqrt": torch.sqrt,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "one-over": lambda t: 1 / t,
    "half-power": lambda t: t**0.5,
    "power-1.5": lambda t: t**1.5,
    "inverse-power": lambda t: t.pow(-1),
    "learned-power": lambda t: t.pow(EXPONENT),
    "exp": torch.exp,
    "share": lambda t: t / t.sum(-1, keepdim=True),
    "share-of-powers": lambda t: t**2 / (t**2).sum(-1, keepdim=True),
}


@pytest.mark.each
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("name", STEEP)
def test_nodes_without_edges_do_not_make_gradients_infinite(name, side, same_as_stock, report_of):
    x, edges = torch.rand(N, 40) + 0.1, torch.randint(0, N - 3, (2, E))
    x[-3:] = torch.tensor([[0.0], [-1.0], [200.0]])
    layer = Layer(lambda i, j, e, w: STEEP[name](j if side == "source" else i))
    layer.exponent = EXPONENT
    same_as_stock(layer, x.requires_grad_(), edges, x.detach(), x.detach())
    assert layer.exponent.grad is None or bool(layer.exponent.grad.isfinite())
    assert [row.formula != "" for row in report_of()] == [True]


ONES = torch.ones(40, 40, dtype=torch.float64)

# Linear layers of features of another width, and what else stock refuses or allows.
MISFITS = {
    "too-wide": lambda i, j, e, w: fn.linear(j, ONES),
    "too-wide-of-formula": lambda i, j, e, w: fn.linear(i + j, ONES[:1]),
    "too-narrow": lambda i, j, e, w: fn.linear(j, ONES[:, :5]),
    "one-column": lambda i, j, e, w: fn.linear(i * j, ONES[:3, :1]),
    "too-wide-for-concatenation": lambda i, j, e, w: fn.linear(torch.cat([i, e], -1), ONES),
    "too-narrow-for-concatenation": lambda i, j, e, w: fn.linear(
        torch.cat([i, e], -1), ONES[:, : i.size(1) + 1]
    ),
    "matrix-too-tall": lambda i, j, e, w: j @ ONES,
    "vector": lambda i, j, e, w: fn.linear(torch.cat([i, j], -1), ONES[0, : 2 * i.size(1)])[
        :, None
    ],
    "bias-of-edges": lambda i, j, e, w: fn.linear(j, ONES[:5, : i.size(1)], e[:, :5]),
    "along-edges": lambda i, j, e, w: (j[:, 0] @ torch.ones(E, 5).double()) * j[:, :5],
    "column-and-vector": lambda i, j, e, w: fn.linear(torch.cat([j, e[:, 0]], -1), ONES),
    "column-and-node-features": lambda i, j, e, w: torch.cat([j, ONES[:N, :3]], -1),
    "of-two-dtypes": lambda i, j, e, w: fn.linear(
        torch.cat([j.detach().float(), e], -1), ONES[:5, :1].expand(5, 2 * e.size(1))
    ),
    "of-integers": lambda i, j, e, w: fn.linear(
        torch.cat([j, torch.ones(E, 2).long()], -1), ONES[:5, :1].expand(5, j.size(1) + 2)
    ),
}


@pytest.mark.each
@pytest.mark.parametrize("width", [6, 20], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", MISFITS)
def test_linear_layers_that_do_not_fit_do_as_in_stock(name, width, same_as_stock):
    args = features(N, width), torch.randint(0, N, (2, E)), features(E, width), features(E, 1)
    layer = Layer(MISFITS[name])
    try:
        layer(*args)
    except (RuntimeError, IndexError) as error:
        with pyg_accel.patched(), pytest.raises(type(error)) as found:
            layer(*args)
        assert str(found.value) == str(error)
    else:
        same_as_stock(layer, *args)


def filled(function: Callable[[Tensor], Any]) -> Tensor:
    out = torch.zeros(E, F, dtype=torch.float64)
    function(out)
    return out


# Other ways of calling functions that formulas know.
CALLS = {
    "input-by-name": lambda i, j, e, w: torch.tanh(input=i + j) + torch.exp(input=j),
    "tensors-by-name": lambda i, j, e, w: fn.linear(
        input=torch.cat(tensors=[i, j, e], dim=-1), weight=WIDE.weight
    ),
    "stack-by-name": lambda i, j, e, w: torch.stack(tensors=[i, j], dim=1).sum(dim=1),
    "sum-by-name": lambda i, j, e, w: torch.sum(input=i * j, dim=-1, keepdim=True),
    "power-by-name": lambda i, j, e, w: torch.pow(input=i + j, exponent=3),
    "bounds-by-name": lambda i, j, e, w: torch.clamp(input=j, min=0.1, max=0.5) * i,
    "into-tensor": lambda i, j, e, w: j * filled(lambda out: torch.tanh(j.detach(), out=out)),
    "sum-into-tensor": lambda i, j, e, w: (
        j * filled(lambda out: torch.add(i.detach(), j.detach(), out=out))
    ),
    "cat-into-tensor": lambda i, j, e, w: (
        j * filled(lambda out: torch.cat([i.detach()[:, :3], j.detach()[:, 3:]], -1, out=out))
    ),
    "relu-in-place": lambda i, j, e, w: set_in_place(i + j, lambda t: fn.relu(t, inplace=True)) * e,
    "relu-of-features-in-place": lambda i, j, e, w: set_in_place(
        j, lambda t: fn.leaky_relu(t, inplace=True)
    ),
    "elu-in-place": lambda i, j, e, w: set_in_place(i * j, lambda t: fn.elu(t, inplace=True)),
    "silu-in-place": lambda i, j, e, w: set_in_place(i * j, lambda t: fn.silu(t, inplace=True)),
    "wider-in-place": lambda i, j, e, w: set_in_place(
        (i * j).detach().float(), lambda t: t.add_(e)
    ),
    "plus-infinity": lambda i, j, e, w: i * j + math.inf,
    "minus-infinity-then-exp": lambda i, j, e, w: (i * j - math.inf).exp() + j,
    "times-nan": lambda i, j, e, w: (i + j) * math.nan,
    "divided-by-infinity": lambda i, j, e, w: (i + j) / math.inf,
    "infinite-slope": lambda i, j, e, w: fn.leaky_relu(i + j, math.inf),
    "infinite-power": lambda i, j, e, w: (i + j).abs() ** math.inf,
    "view-as-integers": lambda i, j, e, w: (i + j).view(torch.int64).sign() * j,
    "type-of-another": lambda i, j, e, w: j.type_as(i) * i.to(e) + i.to(j),
    "reshaped-as-another": lambda i, j, e, w: (i + j).view(-1, 2, 3).reshape_as(j),
    "true-power": lambda i, j, e, w: (i + j) ** True,
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", CALLS)
def test_functions_called_in_other_ways_equal_stock(name, inputs, same_as_stock):
    same_as_stock(Layer(CALLS[name]), *inputs)


# Pieces of messages; some are pieces of edges.
PIECES_OF_EDGES = {
    "ellipsis-edge": lambda i, j, e, w: j * j[..., :1, :],
    "ellipsis-column": lambda i, j, e, w: j[..., :1] * i,
    "ellipsis-one-column": lambda i, j, e, w: j * i[..., 0].unsqueeze(-1),
    "ellipsis-number": lambda i, j, e, w: j * j.sum(-1)[..., 0],
    "ellipsis-inside": lambda i, j, e, w: j[:, ..., 1:2] * i,
    "new-dimension": lambda i, j, e, w: (j[..., None] * i[:, None, :]).flatten(1)[:, :40],
    "nothing": lambda i, j, e, w: j[()] * i,
    "all": lambda i, j, e, w: j[...] * i[:],
    "edges": lambda i, j, e, w: j * i[1:2],
    "narrow": lambda i, j, e, w: j.narrow(0, 1, 1) * j.narrow(-1, 0, 1),
    "of-concatenation": lambda i, j, e, w: torch.cat([i, j], -1).narrow(1, 0, 4),
    "ellipsis-of-concatenation": lambda i, j, e, w: torch.cat([i.unsqueeze(1), j.unsqueeze(1)], -1)[
        ..., :4
    ].flatten(1),
    "chunk-of-concatenation": lambda i, j, e, w: torch.cat([i, j], -1).chunk(2, -1)[0] * j,
    "select-of-concatenation": lambda i, j, e, w: j * torch.cat([i, j], -1).select(1, 3)[:, None],
    "head-of-concatenation": lambda i, j, e, w: fn.linear(
        torch.cat([i.unsqueeze(1), j.unsqueeze(1)], -1)[:, 0], torch.ones(3, 2 * i.size(1)).double()
    ),
}


@pytest.mark.each
@pytest.mark.parametrize("width", [4, 40], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", PIECES_OF_EDGES)
def test_pieces_of_messages_equal_stock(name, width, same_as_stock):
    x, edges = features(N, width), torch.randint(0, N, (2, E))
    same_as_stock(Layer(PIECES_OF_EDGES[name]), x, edges, features(E, width), features(E, 1))


# Powers and bounds that are tensors, of the width of messages: wide ones run as PyG wrote them.
OF_TENSORS = {
    "power": lambda i, j, e, w: j.exp() ** (1 + w),
    "power-of-target": lambda i, j, e, w: j**i,
    "power-of-nodes": lambda i, j, e, w: (j.relu() + 1).pow(e),
    "power-of-rows": lambda i, j, e, w: (j.relu() + 1).pow(e[:1]),
    "power-in-place": lambda i, j, e, w: set_in_place(i + j, lambda t: t.pow_(w)),
    "clamp": lambda i, j, e, w: j.clamp(min=w),
    "clamp-max": lambda i, j, e, w: j.clamp(max=i),
    "number-to-the-power": lambda i, j, e, w: 2**j,
}


@pytest.mark.each
@pytest.mark.parametrize("width", [4, 40], ids=["narrow", "wide"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_functions_of_a_message_and_a_tensor_equal_stock(name, width, same_as_stock):
    x, edges = features(N, width), torch.randint(0, N, (2, E))
    same_as_stock(Layer(OF_TENSORS[name]), x, edges, features(E, width), features(E, 1))


def test_a_wide_message_of_an_unknown_function_declines_with_its_name(report_of):
    x, edges = features(N, 40), torch.randint(0, N, (2, E))
    layer = Layer(lambda i, j, e, w: (i + j).cumsum(0))
    expected = layer(x, edges, x, x)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edges, x, x), expected)
        torch.testing.assert_close(layer(x, edges, x, x), expected)
    (row,) = report_of()
    assert (row.formula, row.reason, row.calls) == ("", "'cumsum' on messages of [E, 40]", 2)


def test_a_narrow_message_of_an_unknown_function_is_written_out(report_of):
    x, edges = features(N, 3), torch.randint(0, N, (2, E))
    with pyg_accel.patched():
        Layer(lambda i, j, e, w: (i + j).sin())(x, edges, x, x)
    (row,) = report_of()
    assert row.formula.startswith("add(v0,u1)")


def wide_inputs() -> tuple[Tensor, ...]:
    return features(N, 40), torch.randint(0, N, (2, E)), features(E, 2), features(E, 1)


def heads(i: Tensor, j: Tensor, e: Tensor, w: Tensor) -> Tensor:
    return j.view(-1, 2, 20) * e.view(-1, 2, 1)


# Wide messages with something left to do to the reduced ones, and what then runs for a sum.
LATER = {
    "merged": (lambda i, j, e, w: heads(i, j, e, w).view(-1, 40), "sum_j mul(u0,e1)"),
    "merged-in-steps": (
        lambda i, j, e, w: heads(i, j, e, w).flatten(1).unsqueeze(1).squeeze(1).contiguous(),
        "sum_j mul(u0,e1)",
    ),
    "summed": (lambda i, j, e, w: heads(i, j, e, w).sum(1), "sum_j mul(u0,e1)"),
    "summed-and-kept": (
        lambda i, j, e, w: heads(i, j, e, w).sum(1, keepdim=True).view(-1, 20),
        "sum_j mul(u0,e1)",
    ),
    "few-scores": (
        lambda i, j, e, w: fn.linear(i - j, SCORES, SCORES[:, 0]).softmax(-1)[:, :1] * j,
        "sum(mul(sub(v0,u1),v2)); sum_j mul(e0,u1)",
    ),
}
SCORES = torch.randn(3, 40, dtype=torch.float64)


@pytest.mark.each
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["mean", "std"]], ids=str)
@pytest.mark.parametrize("name", LATER)
def test_what_is_left_for_the_reduced_messages_equals_stock(name, aggr, same_as_stock):
    same_as_stock(Layer(LATER[name][0], aggr, node_dim=0), *wide_inputs())


@pytest.mark.parametrize("name", LATER)
def test_what_is_left_for_the_reduced_messages_leaves_the_formula_alone(name, report_of):
    with pyg_accel.patched():
        Layer(LATER[name][0], node_dim=0)(*wide_inputs())
    assert [row.formula for row in report_of()] == [LATER[name][1]]


def test_a_maximum_of_sums_over_heads_declines(report_of):
    with pyg_accel.patched():
        Layer(LATER["summed"][0], "max", node_dim=0)(*wide_inputs())
    assert [row.reason for row in report_of()] == ["'max' of messages that are sums"]


def test_a_declined_message_runs_once_a_call_from_then_on():
    layer = Layer(lambda i, j, e, w: (i + j).cumsum(0))
    x, edges = features(N, 40), torch.randint(0, N, (2, E))
    with traces() as entered, pyg_accel.patched():
        for _ in range(4):
            layer(x, edges, x, x)
    assert len(entered) == 2  # in a call of the layer, and alone


@pytest.mark.parametrize("width", [4, 40], ids=["narrow", "wide"])
def test_dropout_in_training_draws_the_numbers_of_stock(width):
    x, edges = torch.randn(N, width), torch.randint(0, N, (2, E))
    layer = Layer(lambda i, j, e, w: fn.dropout(i + j, 0.4, training=True)).train()

    def twice() -> list[Tensor]:
        torch.manual_seed(11)
        return [layer(x, edges, x, x), layer(x, edges, x, x), torch.rand(3)]

    expected = twice()
    with pyg_accel.patched():
        torch.testing.assert_close(twice(), expected)


def test_random_numbers_drawn_in_eval_mode_are_those_of_stock():
    """Noise in a message that then declines must not be drawn twice."""
    x, edges = torch.randn(N, 40), torch.randint(0, N, (2, E))
    layer = Layer(lambda i, j, e, w: ((i + j) * torch.rand(E, 40)).sin()).eval()

    def once() -> list[Tensor]:
        torch.manual_seed(11)
        return [layer(x, edges, x, x), torch.rand(3)]

    expected = once()
    with pyg_accel.patched():
        torch.testing.assert_close(once(), expected)


def test_what_a_layer_puts_aside_is_an_ordinary_tensor(inputs):
    class Keeps(Layer):
        def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
            self.kept, self.nested = x_i + x_j, [x_i * x_j]
            return self.kept

    layer = Keeps(None)
    layer(*inputs)
    expected = layer.kept, layer.nested[0]
    with pyg_accel.patched():
        layer(*inputs)
    assert type(layer.kept) is Tensor
    torch.testing.assert_close(layer.kept, expected[0])
    assert type(layer.nested[0]) is Tensor
    torch.testing.assert_close(layer.nested[0], expected[1])


def test_an_update_that_returns_messages_gets_ordinary_tensors(inputs, same_as_stock):
    class Returns(Layer):
        def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, w: Tensor) -> Tensor:
            self.last = x_i - x_j
            return self.last

        def update(self, out: Tensor) -> Any:
            return out, self.last.relu(), {"extra": [self.last]}

    same_as_stock(Returns(None), *inputs)
    with pyg_accel.patched():
        out = Returns(None)(*inputs)
    assert [type(t) for t in (out[0], out[1], out[2]["extra"][0])] == [Tensor] * 3


def test_an_aggregate_written_by_hand_fuses_and_equals_stock(inputs, same_as_stock, report_of):
    class Scatters(Layer):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
            total = scatter(inputs, index, 0, dim_size, "sum")
            return (
                total
                + scatter(inputs, index, 0, dim_size, "max")
                + torch.zeros(dim_size, F, dtype=inputs.dtype).index_add(0, index, inputs)
            )

    same_as_stock(Scatters(lambda i, j, e, w: (i + j).relu()), *inputs)
    assert any("sum_j relu(add(v0,u1))" in row.formula for row in report_of())


def test_a_scatter_into_something_that_is_not_empty_equals_stock(inputs, same_as_stock):
    class Continues(Layer):
        def aggregate(self, inputs: Tensor, index: Tensor, dim_size: Any = None) -> Tensor:
            start = torch.full((dim_size, F), 0.5, dtype=inputs.dtype)
            where = index.view(-1, 1).expand_as(inputs)
            return (
                start.scatter_add(0, where, inputs)
                + start.scatter_reduce(0, where, inputs, "amax", include_self=True)
                + start.scatter_reduce(0, where, inputs, "mean", include_self=False)
                + start.clone().scatter_add_(0, where, inputs)
            )

    same_as_stock(Continues(lambda i, j, e, w: (i + j).relu()), *inputs)


def test_a_scatter_over_sources_equals_stock(inputs, same_as_stock):
    class Backwards(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor, edge_index_j: Tensor) -> Tensor:
            total = scatter(x_i * x_j, edge_index_j, 0, N, "sum")
            return total[edge_index_j] + x_i

    same_as_stock(Backwards(), *inputs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_attention_written_by_hand_equals_stock(heads, inputs, same_as_stock):
    class Attends(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="add", node_dim=0)
            self.lin = torch.nn.Linear(F, heads).double()

        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: Any) -> Tensor:
            alpha = softmax(fn.leaky_relu(self.lin(x_i) + self.lin(x_j)), index, ptr, size_i)
            return alpha.unsqueeze(-1) * x_j.unsqueeze(1)

    same_as_stock(Attends(), *inputs)


def test_gathers_by_hand_of_rows_of_the_edge_index_equal_stock(inputs, same_as_stock):
    class Gathers(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            self.norm = x.abs().sum(1) + 1
            return self.propagate(edge_index, x=x, both=edge_index)

        def message(self, x_j: Tensor, edge_index_i: Tensor, edge_index_j: Tensor) -> Tensor:
            return x_j / (self.norm[edge_index_i] * self.norm[edge_index_j]).sqrt().view(-1, 1)

    same_as_stock(Gathers(), *inputs)


def test_integer_and_bool_node_data_equal_stock(inputs, same_as_stock):
    class Mixed(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            kind = torch.arange(N).view(-1, 1)
            return self.propagate(edge_index, x=x, kind=kind, flag=kind > 9)

        def message(self, x_j: Tensor, kind_i: Tensor, kind_j: Tensor, flag_j: Tensor) -> Tensor:
            return x_j * kind_i + (kind_j == kind_i) * x_j + flag_j * x_j

    same_as_stock(Mixed(), *inputs)


def test_integer_messages_equal_stock():
    class Counts(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    x, edges = torch.arange(N).view(-1, 1), torch.randint(0, N, (2, E))
    for aggr in ("sum", "max", "mean"):
        expected = Counts(aggr=aggr)(x, edges)
        with pyg_accel.patched():
            assert torch.equal(Counts(aggr=aggr)(x, edges), expected)


def test_mixed_precision_messages_have_the_dtype_of_stock(report_of):
    x, edges = torch.randn(N, F), torch.randint(0, N, (2, E))
    for e in (torch.randn(E, F).double(), torch.randn(E, F).bfloat16()):
        for says in (lambda i, j, e, w: j * e, lambda i, j, e, w: (i + j) * e + e):
            expected = Layer(says)(x, edges, e, x)
            with pyg_accel.patched():
                found = Layer(says)(x, edges, e, x)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_edge_update_equals_stock(inputs, same_as_stock):
    class Updates(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Any:
            alpha = self.edge_updater(edge_index, x=x, e=e)
            return self.propagate(edge_index, x=x, alpha=alpha), alpha

        def edge_update(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
            return (x_i * x_j + e).tanh()

        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return x_j * alpha

    same_as_stock(Updates(), *inputs)


def test_layers_inside_a_message_equal_stock(inputs, same_as_stock):
    class Inner(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    class Outer(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(aggr="max")

        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
            self.x, self.edges = x, edge_index
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
            return self.inner(self.x, self.edges)[index] * x_j + x_i

    same_as_stock(Outer(), *inputs)


class OfEdges(MessagePassing):
    """Reduces values of edges as they are."""

    def forward(self, e: Tensor, edge_index: Tensor, size: tuple[int, int] | None) -> Tensor:
        return self.propagate(edge_index, e=e, size=size)

    def message(self, e: Tensor) -> Tensor:
        return e


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", ["sum", "min"]])
def test_values_of_edges_are_reduced_by_kernels(aggr, flow, same_as_stock, report_of):
    edge_index = torch.stack([torch.randint(2 * N, (E,)), torch.randint(N - 3, (E,))])
    layer = OfEdges(aggr=aggr, flow=flow)
    same_as_stock(layer, features(E, F), edge_index, (2 * N, N))  # more sources than targets
    same_as_stock(layer, features(E, F), edge_index, (2 * N, N))  # now the graph is known
    wanted = f"{aggr if isinstance(aggr, str) else '+'.join(aggr)}_j e0"
    assert [(row.formula, row.reason) for row in report_of()] == [(wanted, "")]


@pytest.mark.parametrize("kind", ["no size", "numbers", "one dimension", "median"])
def test_other_values_of_edges_are_left_to_pyg(kind, same_as_stock, report_of):
    edge_index = torch.stack([torch.randint(2 * N, (E,)), torch.randint(N - 3, (E,))])
    e = {"numbers": torch.randint(9, (E, F)), "one dimension": features(E)}.get(kind)
    layer = OfEdges(aggr="median" if kind == "median" else "sum", node_dim=-1 if e is not None
                    and e.dim() == 1 else -2)  # fmt: skip
    size = None if kind == "no size" else (2 * N, N)
    same_as_stock(layer, features(E, F) if e is None else e, edge_index, size)
    assert [row.formula for row in report_of()] == [""]
