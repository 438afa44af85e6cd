"""Calls that are made again without a trace: what they depend on is changed between them."""

import contextlib
import copy
import functools
import gc
import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    CGConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GINEConv,
    GraphConv,
    MessagePassing,
    PNAConv,
    SAGEConv,
    SGConv,
    SuperGATConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.nn.aggr import (
    Aggregation,
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MultiAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.utils import remove_self_loops, softmax

import pyg_accel
from pyg_accel import use_backend
from pyg_accel.patching import gate, programs, propagate, recording
from pyg_accel.patching.reasons import is_active
from pyg_accel.settings import settings

pytestmark = pytest.mark.usefixtures("always")

N, E, WIDTH = 10, 40, 8
Step = Callable[[Any], Any]


def graph(edges: int = E, nodes: int = N, seed: int = 0) -> Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (N, WIDTH)), generator=torch.Generator().manual_seed(seed))


EDGES = graph()
X = features()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was done in each call of an attempt: "trace" or "plan"."""
    seen: list[str] = []
    attempt, run = propagate._attempt, gate.by_program

    def traced(*args: Any) -> Any:
        seen.append("trace")
        return attempt(*args)

    def planned(*args: Any) -> Any:
        out = run(*args)
        if out is not gate.NOTHING:
            seen.append("plan")
        return out

    with monkeypatch.context() as patch:
        patch.setattr(propagate, "_attempt", traced)
        patch.setattr(gate, "by_program", planned)
        yield seen


class Outcome:
    """Results and gradients of a step, and the next random number; or the error that it raised."""

    def __init__(self, layer: torch.nn.Module, step: Step) -> None:
        torch.manual_seed(5)
        for p in layer.parameters():
            p.grad = None
        self.error: type[Exception] | None = None
        self.tensors: list[Tensor] = []
        try:
            outs = step(layer)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            self.error = type(error)
            return
        self.after = torch.rand(1)
        outs = [t for t in (outs if isinstance(outs, tuple) else (outs,)) if isinstance(t, Tensor)]
        if any(t.requires_grad for t in outs):
            sum((t * t.detach().cos()).sum() for t in outs if t.requires_grad).backward()
        self.tensors = [t.detach().clone() for t in outs if t.is_floating_point()]
        self.tensors += [p.grad.clone() for p in layer.parameters() if p.grad is not None]


@pytest.fixture
def like_stock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Take steps with a layer and with a copy of it that is not patched; returns what was done."""

    def check(layer: torch.nn.Module, *steps: Step) -> list[str]:
        other = copy.deepcopy(layer)
        expected = [Outcome(other, step) for step in steps]
        with counted(monkeypatch) as seen, pyg_accel.patched():
            found = [Outcome(layer, step) for step in steps]
        for number, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert a.error == b.error, number
            assert len(a.tensors) == len(b.tensors), number
            for t, u in zip(a.tensors, b.tensors, strict=True):
                assert t.dtype == u.dtype, number
                finite = t[t.isfinite()].abs().double()
                scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
                near = 2e-5 if t.dtype in (torch.float32, torch.float64) else 2e-2
                torch.testing.assert_close(u, t, rtol=0, atol=near * scale, equal_nan=True,
                                           msg=lambda m, n=number: f"step {n}: {m}")  # fmt: skip
            if a.error is None:
                assert torch.equal(a.after, b.after), f"step {number}: random numbers"
        return seen

    return check


def call(*args: Any, **kwargs: Any) -> Step:
    return lambda layer: layer(*(args or (X, EDGES)), **kwargs)


def setting(name: str, value: Any, then: Step | None = None) -> Step:
    """Assign to an attribute, given by its path, and call."""

    def step(layer: Any) -> Any:
        owner, *rest = name.rsplit(".", 1)[::-1]
        target = layer.get_submodule(rest[0]) if rest else layer
        setattr(target, owner, value)
        return (then or call())(layer)

    return step


WEIGHT, COLUMN = features(E, seed=1).abs(), features(E, 1, seed=2).abs()
THREE = features(E, 3, seed=4)


def scaled(aggrs: Any = "mean", learned: bool = True) -> DegreeScalerAggregation:
    """Aggregations times one number per target, which is learned."""
    scaler = "amplification" if isinstance(aggrs, str) else ["amplification"]
    return DegreeScalerAggregation(aggrs, scaler, torch.tensor([0, 2, 4, 6]), learned)


def pna(aggrs: Any = ("mean", "sum"), **options: Any) -> PNAConv:
    return PNAConv(WIDTH, 4, list(aggrs), ["identity", "attenuation"], torch.tensor([0, 2, 4, 6]),
                   **{"towers": 2, **options})  # fmt: skip


LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[Any, ...]]] = {
    "sage": (lambda: SAGEConv(WIDTH, 4), ()),
    "sage max": (lambda: SAGEConv(WIDTH, 4, aggr="max"), ()),
    "gcn": (lambda: GCNConv(WIDTH, 4), (WEIGHT,)),
    "graph": (lambda: GraphConv(WIDTH, 4), (WEIGHT,)),
    "gin": (lambda: GINConv(torch.nn.Linear(WIDTH, 4), train_eps=True), ()),
    "gine": (lambda: GINEConv(torch.nn.Linear(WIDTH, 4)), (features(E, WIDTH),)),
    "gat": (lambda: GATConv(WIDTH, 4, heads=2), ()),
    "gatv2": (lambda: GATv2Conv(WIDTH, 4, heads=2), ()),
    "transformer": (lambda: TransformerConv(WIDTH, 4, heads=2), ()),
    "gine edge_dim": (lambda: GINEConv(torch.nn.Linear(WIDTH, 4), edge_dim=3), (THREE,)),
    "gat edge_dim": (lambda: GATConv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "gatv2 edge_dim": (lambda: GATv2Conv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "transformer edge_dim": (lambda: TransformerConv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "tag": (lambda: TAGConv(WIDTH, 4), ()),
    "sg": (lambda: SGConv(WIDTH, 4, K=2), ()),
    "sage several": (lambda: SAGEConv(WIDTH, 4, aggr=["mean", "sum", "std"]), ()),
    "graph scaled": (lambda: GraphConv(WIDTH, 4, aggr=scaled()), (WEIGHT,)),
    "pna": (lambda: pna(), ()),
    "pna edge_dim": (lambda: pna(towers=1, edge_dim=3), (THREE,)),
    "cg": (lambda: CGConv(WIDTH, 3), (THREE,)),
}
ATTENTION = ("gat", "gatv2", "transformer")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", LAYERS)
def test_new_graphs_features_and_modes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    # A graph of its own for each: one more node, another number of edges, int32, changed in place.
    changed = EDGES.clone()

    def change(layer: Any) -> Any:
        changed[:, :5] = changed[:, 5:10]
        return layer(X, changed, *more)

    def grad_of_features(layer: Any) -> Any:
        x = X.clone().requires_grad_()
        out = layer(x, EDGES, *more)
        return out, *torch.autograd.grad(out.square().sum(), [x], retain_graph=True)

    def without_grad(layer: Any) -> Any:
        with torch.no_grad():
            return layer(X, EDGES, *more)

    def inference(layer: Any) -> Any:
        with torch.inference_mode():
            out = layer(X, EDGES, *more)
        return out.clone()

    def autocast(layer: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return layer(X, EDGES, *more).bfloat16()

    def narrow(layer: Any) -> Any:
        # The gradients of torch's own index_select by int32 are wrong in three dimensions.
        return layer(X, EDGES.int() if is_active() else EDGES, *more)

    few = tuple(t[:7] for t in more)
    none = tuple(t[:0] for t in more)
    strided = features(WIDTH, N, seed=3).t()
    seen = like_stock(
        make(),
        call(X, EDGES, *more), call(X, EDGES, *more), call(X, graph(seed=1), *more),
        call(features(N + 3, WIDTH), EDGES, *more), call(X, graph(7), *few),
        call(X, graph(0), *none), call(X, graph(0), *none), narrow, narrow,
        call(strided, EDGES, *more), change, change, grad_of_features, grad_of_features,
        without_grad, without_grad, inference, inference, autocast, autocast,
        call(X, EDGES, *more),
    )  # fmt: skip
    assert seen[-1] == "plan"
    assert seen.count("plan") > 8


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_dtypes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    run = call(X, EDGES, *more)

    def freeze(layer: Any) -> Any:
        first, *_ = layer.parameters()
        first.requires_grad_(not first.requires_grad)
        return run(layer)

    def replace(layer: Any) -> Any:
        for module in layer.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = torch.nn.Parameter(p.detach() * 1.5)
        return run(layer)

    def double(layer: Any) -> Any:
        return layer.double()(X.double(), EDGES, *[t.double() for t in more])

    def functional(layer: Any) -> Any:
        values = {key: p.detach() * 2 for key, p in layer.named_parameters()}
        return torch.func.functional_call(layer, values, (X, EDGES, *more))

    seen = like_stock(
        make(), run, run, freeze, run, freeze, replace, functional, replace, functional, double,
        double,
    )  # fmt: skip
    assert seen[-1] == "plan"


@pytest.mark.parametrize("name", ATTENTION)
def test_dropout(name: str, like_stock: Any) -> None:
    def eval_mode(layer: Any) -> Any:
        return layer.eval()(X, EDGES)

    def train_mode(layer: Any) -> Any:
        return layer.train()(X, EDGES)

    layer = LAYERS[name][0]()
    layer.dropout = 0.5
    seen = like_stock(
        layer, call(), call(), call(), setting("dropout", 0.2), call(), eval_mode, eval_mode,
        train_mode, setting("dropout", 0.0), call(), setting("dropout", 1), setting("dropout", 1.0),
    )  # fmt: skip
    calls = 1 if name == "transformer" else 2
    assert seen[: 2 * calls] == ["trace"] * calls + ["plan"] * calls


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_weights_are_returned(name: str, like_stock: Any) -> None:
    def weights(layer: Any) -> Any:
        out, (_, alpha) = layer(X, EDGES, return_attention_weights=True)
        return out, alpha

    assert "plan" in like_stock(LAYERS[name][0](), weights, weights, call(), weights)


@pytest.mark.one_of(3, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_and_transforms(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    wide, more = X.double(), tuple(t.double() for t in more)

    def again(reentrant: bool) -> Step:
        def step(layer: Any) -> Any:
            x = wide.clone().requires_grad_()
            return checkpoint(layer, x, EDGES, *more, use_reentrant=reentrant)

        return step

    def twice(layer: Any) -> Any:
        x = wide.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(x, EDGES, *more).pow(3).sum(), [x], create_graph=True)
        return grad, *torch.autograd.grad(grad.square().sum(), [x], retain_graph=True)

    def batched(layer: Any) -> Any:
        x = wide.clone().requires_grad_()
        out = layer(x, EDGES, *more)
        return torch.autograd.grad(
            out, [x], features(3, *out.shape).double(), is_grads_batched=True
        )

    def transformed(layer: Any) -> Any:
        return torch.func.grad(lambda x: layer(x, EDGES, *more).square().sum())(wide)

    run = call(wide, EDGES, *more)
    steps = [run, run, again(False), again(False), again(True), twice, twice, batched, transformed]
    if name == "sage max":  # the mask of a maximum: PyG's own has no rule for batches
        steps.remove(batched)
    assert like_stock(make().double(), *steps, run)[-1] == "plan"


def test_first_call_in_a_checkpoint(like_stock: Any) -> None:
    def step(layer: Any) -> Any:
        return checkpoint(layer, X.clone().requires_grad_(), EDGES, use_reentrant=False)

    for name in ("sage", "sage max", *ATTENTION):
        like_stock(LAYERS[name][0](), step, step, call(), step)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_inside_of_a_record(enabled: bool) -> None:
    """What waits for the end of other objects is called at any time, and is no part of a call."""
    seen: list[bool] = []

    class Asks(GCNConv):
        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return super().message(x_j, edge_weight)

    (gc.enable if enabled else gc.disable)()
    try:
        with pyg_accel.patched():
            Asks(4, 4)(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]]))
        assert seen[0] is False and gc.isenabled() is enabled
    finally:
        gc.enable()


def test_pairs(like_stock: Any) -> None:
    small = features(6, WIDTH)
    edges = torch.stack([graph(seed=1)[0], graph(nodes=6)[0]])
    layer = SAGEConv((WIDTH, WIDTH), 4)
    seen = like_stock(
        layer, call((X, small), edges), call((X, small), edges),
        call((X, None), edges, size=(N, 6)),
        call((X, None), edges, size=(N, 6)), call((X, None), edges, size=(N, 7)),
        call((X, None), edges), call((X, X), EDGES), call(X, EDGES), call((X, X.clone()), EDGES),
        call((X, small), edges, size=(N, 6)), call((X, small), edges, size=(N, 7)),
        call((X, small), EDGES), call((small, X), edges),
    )  # fmt: skip
    assert seen.count("plan") >= 2
    gat = GATConv((WIDTH, WIDTH), 4, add_self_loops=False)
    like_stock(gat, call((X, small), edges), call((X, small), edges), call((X, None), EDGES),
               call((X, None), EDGES), call((X, X), EDGES))  # fmt: skip


def test_edge_weights_of_several_shapes(like_stock: Any) -> None:
    square = features(N, E, seed=4)
    layer = GraphConv(WIDTH, 4)
    seen = like_stock(
        layer, call(X, EDGES, WEIGHT), call(X, EDGES, WEIGHT), call(X, EDGES, None), call(),
        call(X, EDGES, COLUMN.squeeze(1)), call(X, EDGES, WEIGHT.clone().requires_grad_()),
        call(X, EDGES, WEIGHT[::2].repeat(2)), call(X, EDGES, WEIGHT[:-1]), call(X, EDGES, WEIGHT),
    )  # fmt: skip
    assert seen.count("plan") >= 4
    like_stock(
        GraphConv(E, 4), *[call(square, EDGES, WEIGHT)] * 3, call(square, graph(7), WEIGHT[:7])
    )


class Layer(MessagePassing):
    """A layer of the user; attributes as arguments."""

    def __init__(self, aggr: Any = "sum", node_dim: int = -2, **attributes: Any) -> None:
        super().__init__(aggr=aggr, node_dim=node_dim)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)


class Weighted(Layer):
    def forward(self, x: Any, edge_index: Tensor, w: Any = None, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, w=w, size=size)


class TwiceWeighted(Layer):
    def forward(self, x: Any, edge_index: Tensor, a: Any, b: Any) -> Tensor:
        return self.propagate(edge_index, x=x, a=a, b=b)


class Scaled(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * self.scale


class Plain(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Sum(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.leaky_relu(x_i + x_j, 0.3)


class ByWeight(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return x_i + x_j if w is None else (x_i + x_j) * w


EDGE_DIM = {"gine edge_dim": "lin", "gat edge_dim": "lin_edge", "gatv2 edge_dim": "lin_edge",
            "transformer edge_dim": "lin_edge"}  # fmt: skip


class Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", EDGE_DIM)
def test_a_linear_layer_that_a_message_calls(
    name: str, like_stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is and has is changed between calls that have a plan."""
    make, (edge_attr,) = LAYERS[name]
    path, wide = EDGE_DIM[name], WIDTH
    run = call(X, EDGES, edge_attr)

    def linear(layer: Any) -> Any:
        return layer.get_submodule(path)

    def in_place(layer: Any) -> Any:
        with torch.no_grad():
            linear(layer).weight.mul_(-0.5)
        return run(layer)

    def replaced(layer: Any) -> Any:
        torch.manual_seed(1)
        linear(layer).weight = torch.nn.Parameter(torch.randn_like(linear(layer).weight))
        return run(layer)

    def frozen(layer: Any) -> Any:
        linear(layer).requires_grad_(False)
        out = run(layer)
        linear(layer).requires_grad_(True)
        return out

    def put(make: Callable[[int], torch.nn.Module], then: Step = run) -> Step:
        def step(layer: Any) -> Any:
            before = linear(layer)
            torch.manual_seed(2)
            setattr(layer, path, make(before.weight.size(0)))
            outs = then(layer), then(layer)
            setattr(layer, path, before)
            return outs

        return step

    def hooked(layer: Any) -> Any:
        handle = linear(layer).register_forward_hook(lambda module, args, out: out * 3)
        outs = run(layer), run(layer)
        handle.remove()
        return outs

    def own_forward(layer: Any) -> Any:
        module = linear(layer)
        module.forward = lambda x: F.linear(x, module.weight).abs()
        outs = run(layer), run(layer)
        del module.forward
        return outs

    def class_changed(layer: Any) -> Any:
        cls = type(linear(layer))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", lambda self, x: F.linear(x, self.weight) - 1)
            return run(layer), run(layer)

    def parametrized(layer: Any) -> Any:
        module = torch.nn.utils.parametrize.register_parametrization(
            linear(layer), "weight", torch.nn.Tanh()
        )
        outs = run(layer), run(layer)
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight", False)
        return outs

    def lower(dtype: torch.dtype) -> Step:
        def step(layer: Any) -> Any:
            with torch.autocast("cpu", dtype), torch.no_grad():
                return layer(X, EDGES, edge_attr).to(dtype)

        return step

    def of_gradients(layer: Any) -> Any:
        given = edge_attr.clone().requires_grad_()
        out = layer(X, EDGES, given)
        return out, *torch.autograd.grad(out.square().sum(), [given], retain_graph=True)

    twice = call(features(N, wide, seed=9), EDGES, features(E, 5, seed=8))
    seen = like_stock(
        make(), run, run, in_place, run, replaced, run, frozen, run,
        put(lambda out: torch.nn.Linear(3, out)), run,
        put(lambda out: torch.nn.Linear(5, out, bias=False), twice), run,
        put(lambda out: Doubled(3, out)), put(lambda out: torch.nn.Sequential(Doubled(3, out))),
        hooked, run, own_forward, run, class_changed, run,
        lower(torch.bfloat16), lower(torch.float16), lower(torch.bfloat16), lower(torch.float16),
        of_gradients, of_gradients, run, parametrized, run, run,
    )  # fmt: skip
    assert seen[-1] == "plan"
    assert seen.count("plan") >= 12


def test_lists_of_linear_layers_that_a_message_calls(like_stock: Any) -> None:
    """What is in them is changed between calls that have a plan."""
    run = call(X, EDGES, THREE)

    def first(layer: Any) -> Any:
        return layer.pre_nns[0]

    def twice(change: Step) -> Step:
        def step(layer: Any) -> Any:
            change(layer)
            return run(layer), run(layer)

        return step

    def hooked(layer: Any) -> Any:
        handle = first(layer)[0].register_forward_hook(lambda module, args, out: out * 3)
        outs = run(layer), run(layer)
        handle.remove()
        return outs

    def swap(layer: Any) -> Any:
        layer.pre_nns = torch.nn.ModuleList(reversed(layer.pre_nns))

    def shared(layer: Any) -> Any:
        layer.pre_nns[0] = layer.pre_nns[1]

    seen = like_stock(
        pna(edge_dim=3), run, run, hooked,
        twice(lambda layer: first(layer).append(torch.nn.ReLU())),
        twice(lambda layer: first(layer).pop(1)), twice(swap), twice(shared),
    )  # fmt: skip
    assert seen[:2] == ["trace", "plan"]
    assert seen.count("plan") >= 5


def test_an_attribute_that_is_missing_or_comes_later(like_stock: Any) -> None:
    def add(layer: Any) -> Any:
        torch.manual_seed(1)
        layer.edge_encoder = torch.nn.Linear(3, WIDTH)
        layer.edge_dim = 3
        return call()(layer)

    with_edges = call(X, EDGES, THREE)
    seen = like_stock(pna(), call(), call(), with_edges, call(), add, call(), with_edges, call())
    assert seen[-1] == "plan"


class Indexed(Weighted):
    """Parts of features, chosen by what a kind of call does not tell."""

    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return x_i[:, : self.scale[0]] + x_j[:, w.long()[0, 0] : w.long()[0, 0] + 1]


class Chosen(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * self.scale[w]


class FirstEdges(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * w[:1]


class FirstColumn(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * w[:, :1] + w[:, 1:2] * w[:, None, 2]


class Shuffled(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * w[[i for i in self.order]]


class Columns(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(x_i[:, 1:5]) * x_j[:, :1] + x_j[:, -2:-1]


def test_parts_of_features(like_stock: Any) -> None:
    lin = torch.nn.Linear(4, WIDTH)
    seen = like_stock(Columns(lin=lin), call(), call(), call(features(N + 2, WIDTH), EDGES),
                      call(features(N, 12), graph(7)), call())  # fmt: skip
    assert seen == ["trace", "plan", "trace", "trace", "plan"]
    two, three = COLUMN * 0 + 2, COLUMN * 0 + 3
    seen = like_stock(Indexed(scale=(1, 2)),
                      *[call(X, EDGES, w) for w in (two, two, three, two)])  # fmt: skip
    numbers = [torch.tensor(n) for n in (0, 0, 1, 0, 1)]
    seen += like_stock(Chosen(scale=(1.0, 2.0)), *[call(X, EDGES, n) for n in numbers])
    assert seen[-len(numbers) :] == ["trace"] * len(numbers)  # a number in a tensor chooses
    seen = like_stock(FirstColumn(), *[call(X, EDGES, THREE * n) for n in (1, 1, -2)],
                      call(X, graph(7), THREE[:7]), call(X, EDGES, features(E, 4)))  # fmt: skip
    assert seen == ["trace", "plan", "plan", "trace", "trace"]
    like_stock(FirstEdges(), *[call(X, EDGES, w) for w in (two, two, three, two, two[:1])])
    orders = [list(range(E)), list(range(E)), list(reversed(range(E)))]
    like_stock(Shuffled(order=orders[0]),
               *[setting("order", o, call(X, EDGES, COLUMN)) for o in orders])  # fmt: skip


class Embedded(Weighted):
    """Features of edges that are computed in other ways than by one linear layer."""

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        w = self.second(self.first(w) * self.scale + self.shift)
        return (x_j + w).relu()


def test_steps_of_the_features_of_edges(like_stock: Any) -> None:
    def layer(**more: Any) -> torch.nn.Module:
        torch.manual_seed(3)
        linears = {"first": torch.nn.Linear(3, 6), "second": torch.nn.Linear(6, WIDTH)}
        return Embedded(**linears | {"scale": torch.ones(1, 6), "shift": 0.5} | more)

    run = call(X, EDGES, THREE)
    seen = like_stock(
        layer(), run, run, setting("shift", -1.5, run), run,
        setting("scale", torch.full((1, 6), 2.0), run), run,
        setting("scale", torch.rand(6), run), setting("scale", torch.rand(E, 6), run), run,
        setting("scale", 3, run), run, call(X, graph(7), THREE[:7]),
    )  # fmt: skip
    assert seen.count("plan") >= 4
    one = torch.nn.Linear(WIDTH, WIDTH)
    like_stock(layer(first=one, second=one, scale=1), *[call(X, EDGES, features(E, WIDTH))] * 3)


def test_numbers_of_a_layer(like_stock: Any) -> None:
    values = [2.0, 3.0, 3, True, 1.0, 1, math.nan, float("nan"), 0.0, math.inf]
    seen = like_stock(Scaled(scale=2.0), call(), call(), *[setting("scale", v) for v in values])
    assert seen[1] == "plan"


def test_tensors_of_a_layer(like_stock: Any) -> None:
    row, other = features(1, WIDTH), features(1, WIDTH, seed=1)

    def delete(layer: Any) -> Any:
        del layer.scale
        return call()(layer)

    seen = like_stock(
        Scaled(scale=row), call(), call(), setting("scale", other), setting("scale", 2.0),
        setting("scale", torch.tensor(3.0)), setting("scale", torch.tensor(4.0)),
        setting("scale", row[:, :1]), setting("scale", COLUMN), setting("scale", COLUMN * 2),
        setting("scale", torch.ones(E, WIDTH)), delete, setting("scale", row),
    )  # fmt: skip
    assert seen[1] == "plan"


def test_arguments_of_a_message(like_stock: Any) -> None:
    one = EDGES[:, :1].clone()
    values = [COLUMN, COLUMN * 2, None, 2.0, 3.0, 3, True, torch.tensor(2.0), torch.tensor(3.0),
              features(1, WIDTH), features(1, WIDTH, seed=1), features(E, WIDTH), features(1, 1),
              COLUMN[:7], COLUMN.double(), COLUMN.clone().requires_grad_()]  # fmt: skip
    seen = like_stock(
        ByWeight(), *[call(X, EDGES, v) for v in values], *[call(X, EDGES, v) for v in values],
        call(X, EDGES), call(X, one, COLUMN[:1]), call(X, one, features(1, WIDTH)),
        call(X, one, features(1, WIDTH, seed=1)), call(X, graph(7), COLUMN[:7]),
        call(features(N, 4), EDGES, COLUMN), call(features(N, 4, WIDTH), EDGES, COLUMN),
    )  # fmt: skip
    assert seen.count("plan") >= 5


def test_sizes(like_stock: Any) -> None:
    class Unused(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_j

    sizes = [None, (N, N), (N, N), (N, N + 3), (N + 3, N), (None, N), (N, None), [N, N]]
    for layer in (Plain(), Unused()):
        assert "plan" in like_stock(layer, *[call(X, EDGES, size=size) for size in sizes])


def test_flow_and_node_dimension(like_stock: Any) -> None:
    edges = torch.stack([graph(seed=1)[0], graph(nodes=6)[0]])
    like_stock(Sum(), call(), call(), setting("flow", "target_to_source"), call(),
               setting("node_dim", 0), setting("node_dim", -2),
               setting("flow", "source_to_target"))  # fmt: skip
    back = Plain()
    back.flow = "target_to_source"
    like_stock(back, call((features(6, WIDTH), X), edges.flip(0)), call(), call())
    line = Plain(node_dim=0)
    like_stock(line, *[call(features(N), EDGES)] * 3, call(features(N + 1), graph(7)))


# -- what is replaced or watched -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [
    "propagate_forward", "propagate_forward_pre", "message_forward", "message_forward_pre",
    "aggregate_forward", "aggregate_forward_pre",
])  # fmt: skip
def test_hooks_of_a_layer(kind: str, like_stock: Any) -> None:
    heard = []

    def with_hook(layer: Any) -> Any:
        handle = getattr(layer, f"register_{kind}_hook")(lambda *args: heard.append(len(args)))
        out = call()(layer)
        handle.remove()
        return out

    seen = like_stock(Sum(), call(), call(), with_hook, call())
    assert len(heard) == 2
    assert seen == ["trace", "plan", "plan"]


def test_hooks_of_an_aggregation(like_stock: Any) -> None:
    def with_hook(layer: Any) -> Any:
        handle = layer.aggr_module.register_forward_hook(lambda m, i, o: o * 3)
        out = call()(layer)
        handle.remove()
        return out

    def with_global_hook(layer: Any) -> Any:
        hook = torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)
        out = call()(layer)
        hook.remove()
        return out

    seen = like_stock(Sum(), call(), call(), with_hook, with_global_hook, call())
    assert seen[-1] == "plan"


class Factor(Aggregation):
    factor = 1.0

    def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None,
                dim: int = -2) -> Tensor:  # fmt: skip
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum") * self.factor


def test_aggregations(like_stock: Any) -> None:
    seen = like_stock(Sum(), call(), call(), setting("aggr_module", MaxAggregation()),
                      setting("aggr_module", SumAggregation()))  # fmt: skip
    # A module like one that was recorded is recognised.
    assert seen == ["trace", "plan", "trace", "plan"]
    like_stock(Sum(Factor()), call(), call(), setting("aggr_module.factor", 3.0))
    like_stock(Sum(SoftmaxAggregation(t=1.0)), call(), call(), setting("aggr_module.t", 4.0))


ANY = ["mean", "max", "var"]
EVERY = [*ANY, "min", "std", "sum", "mul"]
PROJECTED = {"mode": "proj", "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH}}
ATTENDED = {
    "mode": "attn",
    "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH, "num_heads": 2, "dropout": 0.5},
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("make", [
    lambda: MultiAggregation(EVERY), lambda: MultiAggregation(["sum"]),
    lambda: MultiAggregation(ANY, mode="sum"), lambda: MultiAggregation(ANY, mode="max"),
    lambda: MultiAggregation(ANY, mode="logsumexp"), lambda: MultiAggregation(ANY, **PROJECTED),
    lambda: VarAggregation(), lambda: StdAggregation(),
    lambda: scaled(EVERY[:-1]), lambda: scaled("std", learned=False),
    lambda: MultiAggregation([scaled("min"), "std"]),
    lambda: DegreeScalerAggregation(
        ANY, ["identity", "amplification", "attenuation", "linear", "inverse_linear"],
        torch.tensor([0, 2, 4, 6]), True
    ),
])  # fmt: skip
def test_aggregations_of_several_reductions(make: Callable[[], Any], like_stock: Any) -> None:
    seen = like_stock(Sum(make()), call(), call(), call(X, graph(7)), call(X, graph(0)),
                      call(features(N + 2, WIDTH), EDGES), call(X, graph(0)))  # fmt: skip
    # Other sizes are recorded once more, and then any; an empty graph is recorded by itself.
    assert seen == ["trace", "plan", *["trace"] * 4]
    cube = features(N, 3, WIDTH)
    seen = like_stock(Sum(make(), node_dim=0), call(cube, EDGES), call(cube, EDGES))
    assert seen[1:] == ["plan"]


def test_aggregations_that_attend_to_their_members(like_stock: Any) -> None:
    seen = like_stock(Sum(MultiAggregation(ANY, **ATTENDED)), call(), call(), call())
    assert seen == ["trace"] * 3  # torch's attention reads a flag that is no part of the context


def test_dependencies_of_an_aggregation_of_several_reductions(like_stock: Any) -> None:
    def member(number: int, make: Callable[[], Any]) -> Step:
        def step(layer: Any) -> Any:
            layer.aggr_module.aggrs[number] = make()
            return call()(layer)

        return step

    def hooked(path: str) -> Step:
        def step(layer: Any) -> Any:
            owner = layer.get_submodule(path)
            handle = owner.register_forward_hook(lambda module, args, out: out * 3)
            outs = call()(layer), call()(layer)
            handle.remove()
            return outs

        return step

    def own(path: str, name: str) -> Step:
        def step(layer: Any) -> Any:
            owner = layer.get_submodule(path)
            method = getattr(owner, name)
            setattr(owner, name, lambda *args, **kwargs: method(*args, **kwargs) * 2)
            outs = call()(layer), call()(layer)
            delattr(owner, name)
            return outs

        return step

    def scaler(*names: str) -> Step:
        def step(layer: Any) -> Any:
            layer.aggr_module.scaler = list(names)
            return call()(layer)

        return step

    def in_place(layer: Any) -> Any:
        with torch.no_grad():
            layer.aggr_module.avg_deg_log.mul_(3)
        return call()(layer)

    def frozen(layer: Any) -> Any:
        layer.aggr_module.requires_grad_(False)
        return call()(layer)

    run = call()
    multi = Sum(MultiAggregation(["mean", "max", "std"]))
    twice = {"forward": lambda self, *args, **kwargs: args[0].new_ones(N, WIDTH)}
    steps = [
        run, run, member(0, MaxAggregation), member(1, StdAggregation), run,
        member(2, VarAggregation), member(2, lambda: VarAggregation(semi_grad=True)), run,
        member(2, lambda: SoftmaxAggregation(t=2.0)), run, member(2, Factor),
        member(2, StdAggregation), setting("aggr_module.aggrs.2.var_aggr.semi_grad", True), run,
        setting("aggr_module.aggrs.2.var_aggr", VarAggregation()), run,
        setting("aggr_module.mode", "sum"), setting("aggr_module.dense_combine", torch.sum), run,
        setting("aggr_module.dense_combine", torch.mean), setting("aggr_module.mode", "cat"),
        hooked("aggr_module"), hooked("aggr_module.aggrs.0"), hooked("aggr_module.aggrs.2"),
        own("aggr_module", "combine"), own("aggr_module", "forward"), run,
        own("aggr_module.aggrs.1", "reduce"), own("aggr_module.aggrs.1", "forward"),
        own("aggr_module.aggrs.2.var_aggr", "forward"), hooked("aggr_module.fused_aggr"),
        lambda layer: layer.aggr_module.aggrs.append(MaxAggregation()) or run(layer),
        lambda layer: layer.aggr_module.aggrs.pop(3) and run(layer),
        member(0, MeanAggregation), member(1, MaxAggregation), run,
    ]  # fmt: skip
    classes = (MaxAggregation, StdAggregation, VarAggregation, MultiAggregation)
    steps += [replaced(cls, name, value) for cls in classes for name, value in twice.items()]
    steps += [
        replaced(MultiAggregation, "combine", lambda self, inputs: inputs[0] * 7),
        setting("aggr_module", SumAggregation()), setting("aggr_module", StdAggregation()), run,
        setting("aggr_module", MultiAggregation(["sum"])),
        setting("aggr_module", scaled("sum", learned=False)), run, run,
    ]  # fmt: skip
    like_stock(multi, *steps)  # more records than are made of one layer
    projected = Sum(MultiAggregation(ANY, **PROJECTED))
    weight = torch.nn.Parameter(torch.ones(WIDTH, 3 * WIDTH), False)
    seen = like_stock(projected, run, run, setting("aggr_module.lin.weight", weight),
                      hooked("aggr_module.lin"), run)  # fmt: skip
    assert seen[0] == "trace" and seen[-1] == "plan"
    seen = like_stock(
        Sum(scaled(ANY)), run, run, scaler("linear"), scaler("identity", "attenuation"), in_place,
        setting("aggr_module.avg_deg_lin", torch.nn.Parameter(torch.full((1,), 2.0), False)),
        scaler("linear"), scaler("unknown"), scaler("linear"), frozen,
        own("aggr_module", "forward"), hooked("aggr_module.aggr"),
        replaced(DegreeScalerAggregation, "forward", twice["forward"]),
        setting("aggr_module.aggr", MaxAggregation()), run,
    )  # fmt: skip
    assert seen[:2] == ["trace", "plan"] and seen[-1] == "plan"


def test_methods_of_an_instance(like_stock: Any) -> None:
    def own(path: str, make: Callable[[Any], Any]) -> Step:
        def step(layer: Any) -> Any:
            owner = layer.aggr_module if path.startswith("aggr_module") else layer
            name = path.rsplit(".", 1)[-1]
            setattr(owner, name, make(getattr(owner, name)))
            out = call()(layer)
            delattr(owner, name)
            return out

        return step

    seen = like_stock(
        Sum(), call(), call(), own("message", lambda f: lambda x_i, x_j: x_j * 3),
        own("update", lambda f: lambda out: out * 2),
        own("aggregate", lambda f: lambda *args, **kwargs: f(*args, **kwargs) * 2),
        own("aggr_module.forward", lambda f: lambda *args, **kwargs: f(*args, **kwargs) * 5),
        call(),
    )  # fmt: skip
    assert seen[0] == "trace"
    assert seen[-1] == "plan"


def replaced(owner: Any, name: str, value: Any) -> Step:
    """Call while an attribute or an item is replaced, which both runs do in turn."""

    def step(layer: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(owner, dict):
                patch.setitem(owner, name, value)
            else:
                patch.setattr(owner, name, value, raising=False)
            return call()(layer)

    return step


FLAG = 0


def _flagged(self: Any, inputs: Tensor) -> Tensor:
    return inputs * FLAG if FLAG else inputs


def test_methods_of_a_class(like_stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return F.relu(x_i + x_j)

    class NoMessage(Layer):
        pass

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    def flag(value: int) -> Step:
        def step(layer: Any) -> Any:
            global FLAG
            FLAG = value
            return replaced(MessagePassing, "update", _flagged)(layer)

        return step

    forward = SumAggregation.forward
    seen = like_stock(
        Own(), call(), call(), replaced(Own, "message", lambda self, x_i, x_j: x_i - x_j),
        replaced(Own, "update", lambda self, inputs: inputs * 2), call(),
        replaced(Own.message, "__code__", Sum.message.__code__),
        replaced(SumAggregation, "forward", doubled), replaced(F, "relu", F.leaky_relu), call(),
        flag(0), flag(0), flag(3), call(),
    )  # fmt: skip
    assert seen[:2] == ["trace", "plan"]
    assert seen[-1] == "plan"
    like_stock(NoMessage(), call(), call(),
               replaced(MessagePassing, "message", lambda self, x_j: x_j * 3), call())  # fmt: skip


def test_functions_that_a_message_calls(like_stock: Any) -> None:
    """What stands in for one may read what it likes, so it is traced each time."""

    def flagged(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return src * FLAG

    def flag(value: int, owner: Any, name: str) -> Step:
        def step(layer: Any) -> Any:
            global FLAG
            FLAG = value
            return replaced(owner, name, flagged)(layer)

        return step

    for owner, name in ((F, "leaky_relu"), (sys.modules[GATConv.__module__], "softmax")):
        steps = [flag(value, owner, name) for value in (2, 2, 5, 5)]
        layer = GATConv(WIDTH, 4, add_self_loops=False)
        seen = like_stock(layer, call(), call(), *steps, call())
        assert seen[-2:] == ["plan", "plan"]  # edge_updater and propagate, as they were


# -- what a message may read -----------------------------------------------------------------------


class OfTensor(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * w.scale


class Private(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * self.__scale


class Counting(Layer):
    count = 0

    @property
    def scale(self) -> float:
        self.count += 1
        return float(self.count % 3)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * self.scale


class Looked(Layer):
    def __getattr__(self, name: str) -> Any:
        return float(torch.rand(())) if name == "scale" else super().__getattr__(name)

    message = Scaled.message


class LastSize(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        s = (x_i * x_j).sum(-1)
        return (x_i + x_j) / s.size(-1)


class SizeOfArgument(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) / x_j.size(-1)


class SizeOfAttribute(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        w = self.scale
        return (x_i + x_j) / w.size(-1)


class Length(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) / len(x_j)


class Shape(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) / x_j.shape[0]


class Identity(TwiceWeighted):
    def message(self, x_i: Tensor, x_j: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if a is b:
            return (x_i + x_j) * a * 5
        return (x_i + x_j) * a * b


class Seeding(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        torch.manual_seed(99)
        return x_i + x_j


class Default(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, scale: float = 2.0) -> Tensor:
        return (x_i + x_j) * scale


class Inference(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * 3 if x_j.is_inference() else x_i + x_j


class OnData(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if x_j.sum() > 0:
            return x_i + x_j
        return x_i - x_j


class OnWeights(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        if bool(w.max() > 100):
            return x_i + x_j
        return x_i - x_j


class Global(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * (FLAG + 1)


class Builtin(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * max(1, 2)


class Contained(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i + x_j) * self.scale["a"][0]


class Nested(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        def times(t: Tensor) -> Tensor:
            return t * self.scale

        return times(x_i + x_j)


class Super(Scaled):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return super().message(x_i, x_j)


class Random(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i + x_j * torch.rand(1)


class Dropping(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.dropout(x_i + x_j, 0.5, self.training)


class Counted(Layer):
    count = 0

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.count = self.count + 1
        return (x_i + x_j) * self.count


def _scaled(scale: float) -> Step:
    def step(layer: Any) -> Any:
        w = COLUMN.clone()
        w.scale = scale
        return layer(X, EDGES, w)

    return step


def _flag(value: int) -> Step:
    def step(layer: Any) -> Any:
        global FLAG
        FLAG = value
        return call()(layer)

    return step


def _inference(layer: Any) -> Any:
    with torch.inference_mode():
        return layer(X.clone(), EDGES).clone()


def _without_grad(layer: Any) -> Any:
    with torch.no_grad():
        return layer(X, EDGES)


def _mutated(layer: Any) -> Any:
    layer.scale["a"][0] = 7.0
    return call()(layer)


LINE, FEW = features(N), graph(7)
NARROW = setting("scale", torch.ones(3))


@pytest.mark.parametrize(("layer", "steps"), [
    (OfTensor(), [_scaled(1.0), _scaled(1.0), _scaled(3.0)]),
    (Private(), [setting("_Private__scale", v) for v in (1.0, 1.0, 3.0)]),
    (Counting(), [call()] * 5),
    (Looked(), [call()] * 3),
    (LastSize(), [call(), call(), call(X, FEW)]),
    (SizeOfArgument(), [call(), call(), call(features(N, 3), EDGES)]),
    (SizeOfArgument(node_dim=0), [*[call((LINE, LINE), EDGES)] * 2, call((LINE, LINE), FEW)]),
    (SizeOfArgument(node_dim=0), [*[call(LINE, EDGES)] * 2, call(LINE, FEW)]),
    (SizeOfAttribute(), [NARROW, NARROW, setting("scale", torch.ones(4))]),
    (Length(), [call(), call(), call(X, FEW)]),
    (Shape(), [call(), call(), call(X, FEW)]),
    (Identity(), [*[call(X, EDGES, COLUMN, COLUMN * 2)] * 2, call(X, EDGES, COLUMN, COLUMN)]),
    (Seeding(), [call()] * 3),
    (Default(), [call(), call(), replaced(Default.message, "__defaults__", (5.0,))]),
    (Inference(), [_without_grad, _without_grad, _inference, _inference]),
    (OnData(), [call(), call(), call(-X, EDGES)]),
    (OnWeights(), [*[call(X, EDGES, COLUMN)] * 2, call(X, EDGES, COLUMN + 1000)]),
    (Global(), [_flag(0), _flag(0), _flag(2), _flag(0)]),
    (Builtin(), [call(), call(), replaced(Builtin, "unrelated", 1), call()]),
    (Contained(scale={"a": [2.0]}), [call(), call(), _mutated]),
    (Nested(scale=2.0), [call(), call(), setting("scale", 3.0)]),
    (Super(scale=2.0), [call(), call(), setting("scale", 3.0)]),
    (Random(), [call()] * 3),
    (Dropping(), [call()] * 3),
    (Counted(), [call()] * 4),
], ids=lambda value: type(value).__name__ if isinstance(value, Layer) else "")  # fmt: skip
def test_messages(layer: Layer, steps: list[Step], like_stock: Any) -> None:
    like_stock(copy.deepcopy(layer), *steps)


def test_a_name_that_hides_a_builtin(like_stock: Any) -> None:
    hidden = replaced(globals(), "max", min)
    assert like_stock(Builtin(), call(), call(), hidden, call())[-1] == "plan"


def _times(t: Tensor, *, scale: float = 2.0) -> Tensor:
    return t * scale


class DefaultByName(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _times(x_i + x_j)


def test_a_default_by_name_that_is_changed_in_place(like_stock: Any) -> None:
    changed = replaced(_times.__kwdefaults__, "scale", 5.0)
    like_stock(DefaultByName(), call(), call(), changed, call())


def test_keywords_of_a_partial_function_that_are_changed_in_place(like_stock: Any) -> None:
    class Partial(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.times(x_i + x_j)

    def changed(layer: Any) -> Any:
        return replaced(layer.times.keywords, "scale", 5.0)(layer)

    like_stock(Partial(times=functools.partial(_times, scale=3.0)), call(), call(), changed, call())


def _times_factor(t: Tensor) -> Tensor:
    return t * _times_factor.factor


_times_factor.factor = 2.0


class AttributeOfAFunction(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _times_factor(x_i + x_j)


def test_an_attribute_of_a_function_that_is_changed(like_stock: Any) -> None:
    changed = replaced(_times_factor, "factor", 5.0)
    like_stock(AttributeOfAFunction(), call(), call(), changed, call())


def test_attributes_set_by_a_closure_or_decorator(like_stock: Any) -> None:
    factor = [1.0]

    def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
            return method(self, x_i, x_j) * factor[0]

        run.__name__ = "message"
        return run

    class Closed(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (x_i + x_j) * factor[0]

    class Decorated(Layer):
        @decorated
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_i + x_j

    def factored(value: float) -> Step:
        def step(layer: Any) -> Any:
            factor[0] = value
            return call()(layer)

        return step

    for cls in (Closed, Decorated):
        like_stock(cls(), factored(1.0), factored(1.0), factored(3.0), factored(1.0))


class TwoAttributes(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.a is None:
            return x_i
        return (x_i + x_j) * self.b


class AttributeOrArgument(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * self.scale


def test_a_tensor_in_two_places(like_stock: Any) -> None:
    row, other = features(1, WIDTH), features(1, WIDTH, seed=1)
    like_stock(TwoAttributes(a=row, b=row), call(), call(), setting("b", other),
               setting("a", other), setting("b", row))  # fmt: skip
    for value, changed in ((row, other), (COLUMN, COLUMN * 3)):
        like_stock(AttributeOrArgument(scale=value), call(X, EDGES, value), call(X, EDGES, value),
                   call(X, EDGES, changed), call(X, EDGES, changed))  # fmt: skip
    seen = like_stock(ByWeight(), *[call(X, EDGES, COLUMN)] * 2,
                      call((X, X), EDGES, COLUMN), call((X, X), EDGES, COLUMN),
                      call((X, X * 2), EDGES, COLUMN))  # fmt: skip
    assert seen[1] == "plan"


# -- attention weights -----------------------------------------------------------------------------


class Attending(Layer):
    def edge_update(self, s_i: Tensor, s_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        return softmax(s_i + s_j, index, ptr, size_i)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha.view(-1, 1)

    def forward(self, x: Tensor, edge_index: Tensor, other: Any = None,
                change: Any = lambda alpha: alpha) -> Tensor:  # fmt: skip
        alpha = change(self.edge_updater(edge_index, s=x[:, 0].exp()))
        return self.propagate(edge_index if other is None else other, x=x, alpha=alpha)


class AsNumber(Attending):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * float(alpha.sum())


class Unweighted(Attending):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.unsqueeze(-1)


def test_weights_between_calls(like_stock: Any) -> None:
    changes = [
        lambda a: F.dropout(a, 0.5), lambda a: F.dropout(a, p=0.5, training=True),
        lambda a: F.dropout(a, p=0.3, training=True), lambda a: a.view(-1, 1),
        lambda a: a.view([-1, 1]), lambda a: a.view_as(COLUMN), lambda a: a.unsqueeze(-1),
        lambda a: a * 2, lambda a: a.detach(), lambda a: F.dropout(F.dropout(a, 0.5), 0.5),
    ]  # fmt: skip
    for cls in (Attending, AsNumber, Unweighted):
        layer = cls(node_dim=0)
        steps = [call(X, EDGES, change=change) for change in changes for _ in range(2)]
        like_stock(
            layer,
            call(),
            call(),
            *steps,
            call(X, EDGES, graph(seed=1)),
            call(X, EDGES, graph(seed=1)),
        )


class UnusedMask(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        unused = F.dropout(alpha, 0.5)  # noqa: F841
        return x_j * alpha.unsqueeze(-1)


class TwoMasks(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        self.put_aside = F.dropout(alpha, 0.5)
        return x_j * F.dropout(alpha, 0.5).unsqueeze(-1)


def test_masks_are_drawn_as_they_were(like_stock: Any) -> None:
    like_stock(UnusedMask(), *[call()] * 3)
    like_stock(TwoMasks(), *[lambda layer: (layer(X, EDGES), layer.put_aside * 1)] * 3)


def test_weights_after_their_features_changed() -> None:
    layer = Attending(node_dim=0)

    def run() -> Tensor:
        s = X[:, 0].exp()
        alpha = layer.edge_updater(EDGES, s=s)
        s.mul_(2)
        return layer.propagate(EDGES, x=X, alpha=alpha)

    expected = run()
    with pyg_accel.patched():
        for _ in range(2):
            torch.testing.assert_close(run(), expected)


# -- around the layer ------------------------------------------------------------------------------


def test_settings(like_stock: Any) -> None:
    def with_setting(name: str, value: Any) -> Step:
        def step(layer: Any) -> Any:
            setattr(settings, name, value)
            try:
                return call()(layer)
            finally:
                setattr(settings, name, "auto" if name == "backend" else None)

        return step

    def by_reference(layer: Any) -> Any:
        with use_backend("reference"):
            return call()(layer)

    for name in ("sage", "sage max", "gat"):
        seen = like_stock(
            LAYERS[name][0](), call(), call(), with_setting("verify", True),
            with_setting("backend", "reference"), with_setting("disable", "cpu"), by_reference,
            with_setting("graph_cache", 0), call(), call(),
        )  # fmt: skip
        assert seen[-1] == "plan"


@pytest.mark.parametrize("everything", [True, False])
def test_a_layer_whose_patch_is_undone_has_no_program(everything: bool, report_of: Any) -> None:
    """Another patch may be in force."""
    mine, other = SAGEConv(WIDTH, 4), SAGEConv(WIDTH, 4)
    with pyg_accel.patched(other):
        with pyg_accel.patched(None if everything else mine):
            for layer in (mine, other, mine, other):
                layer(X, EDGES)
        pyg_accel.reset_report()
        mine(X, EDGES)
        assert not report_of()
        other(X, EDGES)
        assert [row.formula for row in report_of()] == ["mean_j u0"]


def test_arguments_of_either_sign_of_zero(like_stock: Any) -> None:
    like_stock(Divided(), *[call(X, EDGES, zero) for zero in (0.0, 0.0, -0.0, -0.0)])


class Divided(MessagePassing):
    """Its result has the sign of a number that may be zero."""

    def forward(self, x: Tensor, edge_index: Tensor, number: float) -> Tensor:
        return self.propagate(edge_index, x=x) * math.copysign(1.0, number)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def test_patching_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SAGEConv(WIDTH, 4)
    expected = layer(X, EDGES)
    with counted(monkeypatch) as seen:
        with pyg_accel.patched():
            layer(X, EDGES)
            with pyg_accel.patched(layer):
                torch.testing.assert_close(layer(X, EDGES), expected)
            torch.testing.assert_close(layer(X, EDGES), expected)
        assert seen == ["trace", "plan", "plan"]
        layer(X, EDGES)
        with pyg_accel.patched():
            layer(X, EDGES)
    assert seen == ["trace", "plan", "plan", "plan"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GATConv(WIDTH, 4)
    with pyg_accel.patched():
        expected = layer(X, EDGES)
        layer(X, EDGES)
        with counted(monkeypatch) as seen:
            other = copied(layer)
            torch.testing.assert_close(other(X, EDGES), expected)
            with torch.no_grad():
                other.att_src.mul_(2)
            assert not torch.equal(other(X, EDGES), layer(X, EDGES))
            torch.testing.assert_close(layer(X, EDGES), expected)
        assert seen[:4] == ["trace", "trace", "plan", "plan"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_alive(name: str) -> None:
    make, more = LAYERS[name]
    layer = make()
    with pyg_accel.patched():
        for k in range(3):
            x, edges, given = X.clone().requires_grad_(), EDGES.clone(), [t.clone() for t in more]
            layer(x, edges, *given).sum().backward()
            refs = [weakref.ref(t) for t in (x, edges, *given)]
            del x, edges, given
            gc.collect()
            assert [ref() for ref in refs] == [None] * len(refs), k
        alive = weakref.ref(layer)
    del layer
    gc.collect()
    assert alive() is None


def test_weights_are_not_kept_alive() -> None:
    layer = Attending(node_dim=0)
    with pyg_accel.patched():
        like = COLUMN.clone()
        for _ in range(2):
            layer(X, EDGES, None, lambda alpha, like=like: alpha.view_as(like))
        ref = weakref.ref(like)
        del like
        gc.collect()
        assert ref() is None


def test_plans_of_a_layer_are_limited() -> None:
    layer = Scaled(scale=0.0)
    with pyg_accel.patched():
        for k in range(2 * programs._MOST + 1):
            layer.scale = k + 0.5
            layer(X, EDGES)
        assert 0 < len(programs.own(layer, "call").programs) <= programs._MOST


def sampled_call(layer: torch.nn.Module, given: tuple[Any, ...], **how: Any) -> Tensor:
    torch.manual_seed(5)
    with torch.no_grad(), pyg_accel.sampled(**how) if how else contextlib.nullcontext():
        out: Tensor = layer(X, EDGES, *given)
    return out


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_samples_of_edges(name: str, monkeypatch: pytest.MonkeyPatch, report_of: Any) -> None:
    """Calls with a plan compute what traced ones do, with each sample of its own."""
    make, given = LAYERS[name]
    layer = make().eval()
    ways: list[dict[str, Any]] = [
        {"width": 2}, {"width": 2, "rescale": "none"}, {"width": 3, "strategy": "bucket"},
        {"width": E}, {},
    ]  # fmt: skip
    with pyg_accel.patched():
        expected = []
        for how in ways:
            programs.forget()
            expected.append(sampled_call(layer, given, **how))
        told = {(row.formula, row.backend) for row in report_of()}
        pyg_accel.reset_report()
        programs.forget()
        with counted(monkeypatch) as seen:
            for _ in range(2):
                for how, out in zip(ways, expected, strict=True):
                    found = sampled_call(layer, given, **how)
                    torch.testing.assert_close(found, out, rtol=0, atol=0)
    assert {(row.formula, row.backend) for row in report_of()} == told
    sampled = any("over 2 edges" in formula for formula, _ in told)
    assert sampled or name not in ("sage", "gcn", "graph", "gat", "tag")
    # Attention that is not sampled runs as its two formulas, which round in another way.
    assert sampled == any(not torch.allclose(expected[-1], out, atol=1e-5) for out in expected[:-2])
    if not name.startswith("transformer"):  # a softmax and a sum over a sample are two formulas
        assert seen[-len(ways) :] == ["plan"] * len(ways)


class Degrees(MessagePassing):
    """A layer that counts edges which it derives of its edge_index, maybe with learned weights."""

    def __init__(self, learned: bool) -> None:
        super().__init__(aggr="sum")
        self.weight = torch.nn.Parameter(torch.rand(1)) if learned else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.expand(edge_index.size(1))
        edges, weight = remove_self_loops(edge_index, weight)
        places = torch.arange(edges.size(1)).view(-1, 1) / edges.size(1)
        places = places if weight is None else places * weight.view(-1, 1)
        return self.propagate(edges, x=x, places=places)

    def message(self, x_j: Tensor, places: Tensor) -> Tensor:
        return places * x_j


@pytest.mark.parametrize("learned", [False, True])
def test_the_number_of_derived_edges_is_computed_where_sizes_differ(learned) -> None:
    layer = Degrees(learned)
    graphs = [graph(E + seed, seed=seed) for seed in range(6)]
    expected = [layer(X, edges.clone()) for edges in graphs]
    with pyg_accel.patched():
        for edges, right in zip(graphs, expected, strict=True):
            torch.testing.assert_close(layer(X, edges), right)
        assert programs.own(layer, "call").of_class.version == 2


class Positions(MessagePassing):
    """A layer that makes tensors on the default device."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x))
        places = torch.arange(4.0)
        return out if places.is_meta else out * places


def test_calls_under_a_default_device_have_programs_of_their_own(like_stock: Any) -> None:
    def on(device: str) -> Step:
        def step(layer: Any) -> Any:
            with torch.device(device):
                return layer(X, EDGES)

        return step

    def by_default(layer: Any) -> Any:
        torch.set_default_device("cpu")
        try:
            return layer(X, EDGES)
        finally:
            torch.set_default_device(None)

    steps = on("cpu"), on("cpu"), by_default, on("meta"), on("meta"), call(), call(), on("cpu")
    seen = like_stock(Positions(), *steps)
    assert seen == ["trace", "plan", "plan", "trace", "plan", "trace", "plan", "plan"]


class InPlace(MessagePassing):
    """Attention whose result is changed in place."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.lin = torch.nn.Linear(WIDTH, 6)
        self.score = torch.nn.Parameter(features(1, 2, 3))
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x).view(-1, 2, 3))
        self.change(out)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        score = ((x_i + x_j).relu() * self.score).sum(-1)
        return x_j * softmax(score, index).unsqueeze(-1)


CHANGES = {
    "a number": lambda out: out.add_(1),
    "a product": lambda out: out.mul_(2.0),
    "an activation": lambda out: torch.relu_(out),
    "a view": lambda out: out.view(-1, 6).mul_(3.0),
    "rows": lambda out: out[:3].zero_(),
    "an assignment": lambda out: out.__setitem__((slice(None), 0), 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_returned_attention_weights_may_be_changed_in_place(name: str, like_stock: Any) -> None:
    step = call(X.clone().requires_grad_(), EDGES)
    seen = like_stock(InPlace(CHANGES[name]), step, step, call(X, graph(seed=1)))
    assert seen == ["trace", "plan", "trace"]


IDLE_MESSAGES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a product": lambda layer, x, d: x * d,
    "a product from the left": lambda layer, x, d: d * x * 2,
    "a product of a parameter": lambda layer, x, d: layer.scale * d + x,
    "a product of views": lambda layer, x, d: (x.view(-1, 2, 4) * d.view(-1, 1, 1)).flatten(1),
    "a linear layer": lambda layer, x, d: layer.lin(x * d),
    "a linear layer of a sum": lambda layer, x, d: layer.lin((x + d).relu()),
    "a linear layer of a concatenation": lambda layer, x, d: layer.joint(torch.cat([x, d], -1)),
    "a matrix product": lambda layer, x, d: (x + d) @ layer.lin.weight,
    "a norm": lambda layer, x, d: F.layer_norm(x + d, (WIDTH,), layer.scale),
    "a square": lambda layer, x, d: (x + d).square(),
    "a power": lambda layer, x, d: (x + d) ** 3,
    "sigmoid": lambda layer, x, d: (x + d).sigmoid(),
    "tanh": lambda layer, x, d: torch.tanh(x - d),
    "silu": lambda layer, x, d: F.silu(x + d),
    "gelu": lambda layer, x, d: F.gelu(d + x),
    "elu": lambda layer, x, d: F.elu(x + d),
    "softplus": lambda layer, x, d: F.softplus(x + d),
    "lerp": lambda layer, x, d: torch.lerp(x, layer.scale * d, 0.5),
    "relu": lambda layer, x, d: (x + d).relu(),
    "minimum": lambda layer, x, d: torch.minimum(x, d),
}


class OfIdleNodes(MessagePassing):
    """A layer whose message reads something that is no number at nodes that send none."""

    def __init__(self, kind: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__(aggr="sum")
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.lin = torch.nn.Linear(WIDTH, WIDTH)
        self.joint = torch.nn.Linear(WIDTH + 1, 3)
        self.scale = torch.nn.Parameter(features(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor, d: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.first(x), d=d)

    def message(self, x_j: Tensor, d_j: Tensor) -> Tensor:
        return self.kind(self, x_j, d_j)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", IDLE_MESSAGES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_of_idle_nodes_reach_no_gradient(name: str, bad: float, like_stock: Any) -> None:
    """PyG gathers no features of nodes that send no message."""
    d = features(N, 1, seed=5).abs()
    d[[2, 7]] = bad
    idle = EDGES.clone()
    idle[0][(idle[0] == 2) | (idle[0] == 7)] = 3
    other = idle.clone()
    other[0] = torch.arange(E) % 2  # more nodes send nothing
    more = d.clone()
    more[4] = bad

    def step(graph: Tensor, d: Tensor) -> Step:
        def run(layer: Any) -> Any:
            x = X.clone().requires_grad_()
            out = layer(x, d, graph)
            return out, *torch.autograd.grad(out.square().sum(), [x], retain_graph=True)

        return run

    busy = step(EDGES, torch.ones(N, 1))
    seen = like_stock(OfIdleNodes(IDLE_MESSAGES[name]), busy, step(idle, d), step(idle, d),
                      step(other, more), busy)  # fmt: skip
    assert seen.count("plan") >= 3 or name in ("a norm", "lerp")  # these are traced in each call


def test_a_call_is_recorded_less_and_less_often_if_its_reads_change_each_time(monkeypatch):
    records = 0
    record = recording.record

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal records
        records += 1
        return record(*args, **kwargs)

    monkeypatch.setattr(recording, "record", counting)
    layer = SuperGATConv(WIDTH, WIDTH).eval()
    expected = layer(X, EDGES)
    with pyg_accel.patched():
        for call in range(30):
            layer.att_x = torch.zeros(call + 1, 1)  # as training leaves it
            torch.testing.assert_close(layer(X, EDGES), expected)
        assert 5 <= records <= 10, "five times, and then after 1, 2, 4, 8 and 16 calls"
        assert programs.why(layer, "call") == "what its code reads changes between calls"
        for _ in range(40):  # nothing changes any more
            layer(X, EDGES)
        before = records
        layer(X, EDGES)
    assert records == before
    with counted(monkeypatch) as seen, pyg_accel.patched():
        layer(X, EDGES)
    assert seen == ["plan"]


def test_a_call_that_is_not_recorded_costs_no_copy_of_the_state(monkeypatch):
    class Reads(GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) * float(x.detach().sum() > -1e9)

    copies = 0
    of_module = recording.ModuleState

    def counting(*args: Any) -> Any:
        nonlocal copies
        copies += 1
        return of_module(*args)

    monkeypatch.setattr(recording, "ModuleState", counting)
    layer = Reads(WIDTH, WIDTH)
    with pyg_accel.patched():
        for _ in range(2):
            layer(X, EDGES)
        assert programs.why(layer, "call").startswith("what it does depends on the numbers")
        before = copies
        for _ in range(10):
            layer(X, EDGES)
    assert copies == before


class ScatteredMaximum(MessagePassing):
    """A maximum by scatter_reduce_, into zeros of which a function may change some."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__(aggr="sum")
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        out = inputs.new_zeros(dim_size, inputs.size(-1))
        self.change(out)
        index = index.view(-1, 1).expand_as(inputs)
        return out.scatter_reduce_(0, index, inputs, reduce="amax", include_self=False)


UNTOUCHED: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "zeros": (lambda out: None, True),
    "a row": (lambda out: out[N - 1].fill_(5.0), False),
    "all": (lambda out: out.add_(5.0), False),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_maximum_is_scattered_into_zeros_without_a_look_at_them(name, like_stock):
    change, planned = UNTOUCHED[name]
    run = call(X, EDGES % (N - 1))  # the last node has no edges
    seen = like_stock(ScatteredMaximum(change), run, run, run)
    assert (seen[-1] == "plan") is planned


def test_softmax_aggregation_has_a_program_of_the_whole_call(like_stock):
    layer = GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True).double()
    run = call(X.double(), EDGES)
    assert like_stock(layer, run, run, run)[-1] == "plan"
