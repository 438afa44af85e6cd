"""Calls that are made again without a trace: what they depend on is changed between them."""

import contextlib
import copy
import functools
import gc
import math
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
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
from benchmarks.layers.modes import traces
from pyg_accel import use_backend
from pyg_accel.patching import programs
from pyg_accel.patching.reasons import is_active
from pyg_accel.settings import settings

pytestmark = pytest.mark.usefixtures("always")

N, E, WIDTH = 10, 40, 8
Step = Callable[[Any], Any]
Context = Callable[[Any], AbstractContextManager[Any]]


def graph(edges: int = E, nodes: int = N, seed: int = 0) -> Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (N, WIDTH)), generator=torch.Generator().manual_seed(seed))


EDGES, OTHER_EDGES, FEW = graph(), graph(seed=1), graph(7)
X, MORE_NODES = features(), features(N + 3, WIDTH)
WEIGHT, COLUMN = features(E, seed=1).abs(), features(E, 1, seed=2).abs()
THREE = features(E, 3, seed=4)
ROW, OTHER_ROW = features(1, WIDTH), features(1, WIDTH, seed=1)


class Outcome:
    """Results and gradients of a step, and the next random number; or the error that it raised."""

    def __init__(self, layer: nn.Module, step: Step) -> None:
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
        outs = [t for t in tree_leaves(outs) if isinstance(t, Tensor)]
        if any(t.requires_grad for t in outs):
            sum((t * t.detach().cos()).sum() for t in outs if t.requires_grad).backward()
        self.tensors = [t.detach().clone() for t in outs if t.is_floating_point()]
        self.tensors += [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    def equals(self, right: "Outcome", step: str) -> None:
        assert self.error == right.error, step
        assert len(self.tensors) == len(right.tensors), step
        for mine, t in zip(self.tensors, right.tensors, strict=True):
            assert mine.dtype == t.dtype, step
            finite = t[t.isfinite()].abs().double()
            scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
            near = 2e-5 if t.dtype in (torch.float32, torch.float64) else 2e-2
            torch.testing.assert_close(mine, t, rtol=0, atol=near * scale, equal_nan=True,
                                       msg=lambda m: f"{step}: {m}")  # fmt: skip
        if self.error is None:
            assert torch.equal(self.after, right.after), f"{step}: random numbers"


@pytest.fixture
def like_stock(report_of: Any) -> Callable[..., str]:
    """Take steps with a layer and with a copy of it that is not patched; tell how each ran.

    "t": something was traced; "p": programs ran alone; ".": neither, so it was PyG's.
    """

    def check(layer: nn.Module, *steps: Step) -> str:
        other = copy.deepcopy(layer)
        expected, ways = [Outcome(other, step) for step in steps], ""
        with pyg_accel.patched():
            for number, (step, right) in enumerate(zip(steps, expected, strict=True)):
                pyg_accel.reset_report()
                with traces() as entered:
                    found = Outcome(layer, step)
                ran = any(row.formula for row in report_of())
                ways += "t" if entered else "p" if ran else "."
                found.equals(right, f"step {number} of {len(steps)} ({ways})")
        return ways

    return check


# -- steps -----------------------------------------------------------------------------------------


def call(*args: Any, **kwargs: Any) -> Step:
    return lambda layer: layer(*(args or (X, EDGES)), **kwargs)


def setting(name: str, value: Any, then: Step | None = None) -> Step:
    """Assign to an attribute, given by its path, and call."""

    def step(layer: Any) -> Any:
        path, _, last = name.rpartition(".")
        setattr(layer.get_submodule(path), last, value)
        return (then or call())(layer)

    return step


def first(change: Callable[[Any], Any], then: Step | None = None) -> Step:
    """Change a layer, without gradients, and call."""

    def step(layer: Any) -> Any:
        with torch.no_grad():
            change(layer)
        return (then or call())(layer)

    return step


def under(*contexts: Context, run: Step | None = None, times: int = 2) -> Step:
    """Call in contexts that a layer is given to."""

    def step(layer: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(layer))
            return [(run or call())(layer) for _ in range(times)]

    return step


def replaced(owner: Any, name: str, value: Any) -> Context:
    """Another attribute or item meanwhile; of a part of the layer if its path is given."""

    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        if not isinstance(owner, str):
            with pytest.MonkeyPatch.context() as patch:
                if isinstance(owner, dict):
                    patch.setitem(owner, name, value)
                else:
                    patch.setattr(owner, name, value, raising=False)
                yield
            return
        part = layer.get_submodule(owner)
        before = part._modules.get(name)
        setattr(part, name, value)
        yield
        setattr(part, name, before) if before is not None else delattr(part, name)

    return context


def multiplied(owner: Any, name: str, factor: float) -> Context:
    """A method that returns more meanwhile."""

    def context(layer: Any) -> AbstractContextManager[None]:
        method = getattr(layer.get_submodule(owner) if isinstance(owner, str) else owner, name)
        more = lambda *args, **kwargs: method(*args, **kwargs) * factor  # noqa: E731
        return replaced(owner, name, more)(layer)

    return context


def hooked(path: str = "", hook: Callable[..., Any] = lambda m, i, out: out * 3,
           kind: str = "forward") -> Context:  # fmt: skip
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        handle = getattr(layer.get_submodule(path), f"register_{kind}_hook")(hook)
        yield
        handle.remove()

    return context


@contextmanager
def hooked_everywhere(layer: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 2)
    yield
    handle.remove()


def frozen(path: str) -> Context:
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        layer.get_submodule(path).requires_grad_(False)
        yield
        layer.get_submodule(path).requires_grad_(True)

    return context


def of(context: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any) -> Context:
    """A context that has nothing to do with the layer."""
    return lambda layer: context(*args, **kwargs)


def set_to(name: str, value: Any) -> Context:
    @contextmanager
    def context(layer: Any) -> Iterator[None]:
        setattr(settings, name, value)
        yield
        setattr(settings, name, "auto" if name == "backend" else None)

    return context


def autocast(dtype: torch.dtype, *more: Tensor) -> Step:
    run = lambda layer: layer(X, EDGES, *more).to(dtype)  # noqa: E731
    return under(of(torch.autocast, "cpu", dtype), of(torch.no_grad), run=run, times=1)


def inference(*more: Tensor) -> Step:
    run = lambda layer: layer(X.clone(), EDGES, *more)  # noqa: E731
    inside = under(of(torch.inference_mode), run=run, times=1)
    return lambda layer: inside(layer)[0].clone()


def gradient_of(place: int, *args: Tensor) -> Step:
    """A result, and the gradient of an argument."""

    def step(layer: Any) -> Any:
        leaf = args[place].clone().requires_grad_()
        out = layer(*args[:place], leaf, *args[place + 1 :])
        return out, *torch.autograd.grad(out.square().sum(), [leaf], retain_graph=True)

    return step


# -- layers of PyG ---------------------------------------------------------------------------------


def scaled(aggrs: Any = "mean", learned: bool = True) -> DegreeScalerAggregation:
    """Aggregations times one number per target, which is learned."""
    scaler = "amplification" if isinstance(aggrs, str) else ["amplification"]
    return DegreeScalerAggregation(aggrs, scaler, torch.tensor([0, 2, 4, 6]), learned)


def pna(aggrs: Any = ("mean", "sum"), **options: Any) -> PNAConv:
    return PNAConv(WIDTH, 4, list(aggrs), ["identity", "attenuation"], torch.tensor([0, 2, 4, 6]),
                   **{"towers": 2, **options})  # fmt: skip


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "sage": (lambda: SAGEConv(WIDTH, 4), ()),
    "sage max": (lambda: SAGEConv(WIDTH, 4, aggr="max"), ()),
    "gcn": (lambda: GCNConv(WIDTH, 4), (WEIGHT,)),
    "graph": (lambda: GraphConv(WIDTH, 4), (WEIGHT,)),
    "gin": (lambda: GINConv(nn.Linear(WIDTH, 4), train_eps=True), ()),
    "gine": (lambda: GINEConv(nn.Linear(WIDTH, 4)), (features(E, WIDTH),)),
    "gat": (lambda: GATConv(WIDTH, 4, heads=2), ()),
    "gatv2": (lambda: GATv2Conv(WIDTH, 4, heads=2), ()),
    "transformer": (lambda: TransformerConv(WIDTH, 4, heads=2), ()),
    "gine edge_dim": (lambda: GINEConv(nn.Linear(WIDTH, 4), edge_dim=3), (THREE,)),
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


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", LAYERS)
def test_new_graphs_features_and_modes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    changed = EDGES.clone()

    def change(layer: Any) -> Any:
        changed[:, :5] = changed[:, 5:10]
        return layer(X, changed, *more)

    def narrow(layer: Any) -> Any:
        # The gradients of torch's own index_select by int32 are wrong in three dimensions.
        return layer(X, EDGES.int() if is_active() else EDGES, *more)

    run, few, none = call(X, EDGES, *more), tuple(t[:7] for t in more), tuple(t[:0] for t in more)
    without_grad = under(of(torch.no_grad), run=run)
    gradients, half = gradient_of(0, X, EDGES, *more), autocast(torch.bfloat16, *more)
    # A graph of its own for each: one more node, another number of edges, int32, changed in place.
    ways = like_stock(
        make(), run, run, call(X, OTHER_EDGES, *more), call(MORE_NODES, EDGES, *more),
        call(X, FEW, *few), call(X, graph(0), *none), call(X, graph(0), *none), narrow, narrow,
        call(features(WIDTH, N, seed=3).t(), EDGES, *more), change, change, gradients, gradients,
        without_grad, inference(*more), inference(*more), half, half, run,
    )  # fmt: skip
    assert ways[-1] == "p" and ways.count("p") > 7


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_dtypes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    run = call(X, EDGES, *more)

    def freeze(layer: Any) -> Any:
        p, *_ = layer.parameters()
        p.requires_grad_(not p.requires_grad)
        return run(layer)

    def replace(layer: Any) -> Any:
        for module in layer.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = nn.Parameter(p.detach() * 1.5)
        return run(layer)

    def double(layer: Any) -> Any:
        return layer.double()(X.double(), EDGES, *[t.double() for t in more])

    def functional(layer: Any) -> Any:
        values = {key: p.detach() * 2 for key, p in layer.named_parameters()}
        return torch.func.functional_call(layer, values, (X, EDGES, *more))

    ways = like_stock(make(), run, run, freeze, run, freeze, replace, functional, replace,
                      functional, double, double)  # fmt: skip
    assert ways[-1] == "p"


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
        seeds = features(3, *out.shape).double()
        return torch.autograd.grad(out, [x], seeds, is_grads_batched=True)

    def transformed(layer: Any) -> Any:
        return torch.func.grad(lambda x: layer(x, EDGES, *more).square().sum())(wide)

    run = call(wide, EDGES, *more)
    steps = [run, run, again(False), again(False), again(True), twice, twice, batched, transformed]
    if name == "sage max":  # the mask of a maximum: PyG's own has no rule for batches
        steps.remove(batched)
    assert like_stock(make().double(), *steps, run)[-1] == "p"


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("name", "path"),
    [("gine edge_dim", "lin"), *((f"{name} edge_dim", "lin_edge") for name in ATTENTION)],
)
def test_a_linear_layer_that_a_message_calls(name: str, path: str, like_stock: Any) -> None:
    """What it is and has is changed between calls that have a plan."""
    make, (edge_attr,) = LAYERS[name]
    run, layer = call(X, EDGES, edge_attr), make()
    kind, shape = type(layer.get_submodule(path)), layer.get_submodule(path).weight.shape
    out = shape[0]

    def put(module: nn.Module, then: Step = run) -> Step:
        return under(replaced("", path, module), run=then)

    @contextmanager
    def parametrized(layer: Any) -> Iterator[None]:
        module = parametrize.register_parametrization(
            layer.get_submodule(path), "weight", nn.Tanh()
        )
        yield
        parametrize.remove_parametrizations(module, "weight", False)

    def own_forward(layer: Any) -> AbstractContextManager[None]:
        module = layer.get_submodule(path)
        return replaced(path, "forward", lambda x: F.linear(x, module.weight).abs())(layer)

    wider = call(features(N, WIDTH, seed=9), EDGES, features(E, 5, seed=8))
    gradients = gradient_of(2, X, EDGES, edge_attr)
    half = [autocast(dtype, edge_attr) for dtype in (torch.bfloat16, torch.float16)]
    ways = like_stock(
        layer, run, run, first(lambda s: s.get_submodule(path).weight.mul_(-0.5), run), run,
        lambda s: setting(f"{path}.weight", nn.Parameter(features(*shape)), run)(s), run,
        under(frozen(path), run=run, times=1), run,
        put(nn.Linear(3, out)), run, put(nn.Linear(5, out, bias=False), wider), run,
        put(Doubled(3, out)), put(nn.Sequential(Doubled(3, out))),
        under(hooked(path), run=run), run,
        under(own_forward, run=run), run,
        under(replaced(kind, "forward", lambda s, x: F.linear(x, s.weight) - 1), run=run), run,
        *half, *half, gradients, gradients, run, under(parametrized, run=run), run, run,
    )  # fmt: skip
    assert ways[-1] == "p" and ways.count("p") >= 10


def test_a_first_call_in_a_checkpoint(like_stock: Any) -> None:
    def step(layer: Any) -> Any:
        return checkpoint(layer, X.clone().requires_grad_(), EDGES, use_reentrant=False)

    for name in ("sage", "sage max", *ATTENTION):
        like_stock(LAYERS[name][0](), step, step, call(), step)


# -- layers of the user ----------------------------------------------------------------------------


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


class Unused(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j


class Sum(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.leaky_relu(x_i + x_j, 0.3)


class Rectified(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.relu(x_i + x_j)


class NoMessage(Layer):
    pass


class ByWeight(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return x_i + x_j if w is None else (x_i + x_j) * w


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


class Embedded(Weighted):
    """Features of edges that are computed in other ways than by one linear layer."""

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        w = self.second(self.first(w) * self.scale + self.shift)
        return (x_j + w).relu()


def embedded(**more: Any) -> Embedded:
    torch.manual_seed(3)
    linears = {"first": nn.Linear(3, 6), "second": nn.Linear(6, WIDTH)}
    return Embedded(**linears | {"scale": torch.ones(1, 6), "shift": 0.5} | more)


class Factor(Aggregation):
    factor = 1.0

    def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None,
                dim: int = -2) -> Tensor:  # fmt: skip
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum") * self.factor


# What a message may read.


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
        return (x_i + x_j) * a * (5 if a is b else b)


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
        return x_i + x_j if x_j.sum() > 0 else x_i - x_j


class OnWeights(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return x_i + x_j if bool(w.max() > 100) else x_i - x_j


FLAG = 0


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


def _times(t: Tensor, *, scale: float = 2.0) -> Tensor:
    return t * scale


class DefaultByName(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _times(x_i + x_j)


class Partial(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.times(x_i + x_j)


def _times_factor(t: Tensor) -> Tensor:
    return t * _times_factor.factor


_times_factor.factor = 2.0


class AttributeOfAFunction(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return _times_factor(x_i + x_j)


def closed_over() -> tuple[type[Layer], type[Layer], dict[str, float]]:
    """Layers that read what a closure and what a decorator refers to."""
    cell = {"factor": 1.0}

    def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
            return method(self, x_i, x_j) * cell["factor"]

        run.__name__ = "message"
        return run

    class Closed(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (x_i + x_j) * cell["factor"]

    class Decorated(Layer):
        @decorated
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_i + x_j

    return Closed, Decorated, cell


class TwoAttributes(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i if self.a is None else (x_i + x_j) * self.b


class AttributeOrArgument(Weighted):
    def message(self, x_i: Tensor, x_j: Tensor, w: Any) -> Tensor:
        return (x_i + x_j) * self.scale


# Attention weights.


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


WEIGHTS = [
    lambda a: F.dropout(a, 0.5), lambda a: F.dropout(a, p=0.5, training=True),
    lambda a: F.dropout(a, p=0.3, training=True), lambda a: a.view(-1, 1),
    lambda a: a.view([-1, 1]), lambda a: a.view_as(COLUMN), lambda a: a.unsqueeze(-1),
    lambda a: a * 2, lambda a: a.detach(), lambda a: F.dropout(F.dropout(a, 0.5), 0.5),
]  # fmt: skip


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


class InPlace(MessagePassing):
    """Attention whose result is changed in place."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.lin = nn.Linear(WIDTH, 6)
        self.score = nn.Parameter(features(1, 2, 3))
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x).view(-1, 2, 3))
        self.change(out)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        score = ((x_i + x_j).relu() * self.score).sum(-1)
        return x_j * softmax(score, index).unsqueeze(-1)


# Whole calls.


class Divided(Plain):
    """Its result has the sign of a number that may be zero."""

    def forward(self, x: Tensor, edge_index: Tensor, number: float) -> Tensor:
        return self.propagate(edge_index, x=x) * math.copysign(1.0, number)


class Positions(MessagePassing):
    """A layer that makes tensors on the default device."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x))
        places = torch.arange(4.0)
        return out if places.is_meta else out * places


@contextmanager
def default_device(layer: Any) -> Iterator[None]:
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


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


# -- a table: the layer, the steps, and how they run -----------------------------------------------

ANY = ["mean", "max", "var"]
EVERY = [*ANY, "min", "std", "sum", "mul"]
PROJECTED = {"mode": "proj", "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH}}
ATTENDED = {
    "mode": "attn",
    "mode_kwargs": {"in_channels": WIDTH, "out_channels": WIDTH, "num_heads": 2, "dropout": 0.5},
}
SMALL, TO_FEW = features(6, WIDTH), torch.stack([OTHER_EDGES[0], graph(nodes=6)[0]])
SQUARE, LINE = features(N, E, seed=4), features(N)
ONE, TWO, TRIPLE = EDGES[:, :1].clone(), COLUMN * 0 + 2, COLUMN * 0 + 3
ORDERS = [list(range(E)), list(range(E)), list(reversed(range(E)))]
CLOSED, DECORATED, CELL = closed_over()
NUMBERS = [2.0, 3.0, 3, True, 1.0, 1, math.nan, float("nan"), 0.0, math.inf]
ARGUMENTS = [COLUMN, COLUMN * 2, None, 2.0, 3.0, 3, True, torch.tensor(2.0), torch.tensor(3.0), ROW,
             OTHER_ROW, features(E, WIDTH), features(1, 1), COLUMN[:7], COLUMN.double(),
             COLUMN.clone().requires_grad_()]  # fmt: skip
SIZES = [None, (N, N), (N, N), (N, N + 3), (N + 3, N), (None, N), (N, None), [N, N]]
ONES = {"forward": lambda self, x, *args, **kwargs: x.new_ones(N, WIDTH)}
run, edges3, small = call(), call(X, EDGES, THREE), call((X, SMALL), TO_FEW)
weighted, column = call(X, EDGES, WEIGHT), call(X, EDGES, COLUMN)
no_grad = under(of(torch.no_grad), times=1)
narrow = setting("scale", torch.ones(3))


def flag(value: int, *contexts: Context) -> Step:
    return under(replaced(globals(), "FLAG", value), *contexts, times=1)


def flagged(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x * FLAG


def updated(self: Any, inputs: Tensor) -> Tensor:
    return inputs * FLAG if FLAG else inputs


def returned(layer: Any) -> Any:
    out, (_, alpha) = layer(X, EDGES, return_attention_weights=True)
    return out, alpha


def attribute_of_tensor(scale: float) -> Step:
    def step(layer: Any) -> Any:
        w = COLUMN.clone()
        w.scale = scale
        return layer(X, EDGES, w)

    return step


def encoder(layer: Any) -> None:
    torch.manual_seed(1)
    layer.edge_encoder, layer.edge_dim = nn.Linear(3, WIDTH), 3


def twice(change: Callable[[Any], Any]) -> Step:
    def step(layer: Any) -> Any:
        change(layer)
        return edges3(layer), edges3(layer)

    return step


def member(number: int, make: Callable[[], Any]) -> Step:
    return lambda layer: layer.aggr_module.aggrs.__setitem__(number, make()) or run(layer)


def members(change: Callable[[Any], Any]) -> Step:
    return first(lambda layer: change(layer.aggr_module.aggrs))


def scaler(*names: str) -> Step:
    return lambda layer: setting("aggr_module.scaler", list(names))(layer)


def on_class(*classes: type) -> list[Step]:
    return [under(replaced(cls, name, value), times=1)
            for cls in classes for name, value in ONES.items()]  # fmt: skip


def dropping(name: str) -> nn.Module:
    layer = LAYERS[name][0]()
    layer.dropout = 0.5
    return layer


def backwards() -> Plain:
    layer = Plain()
    layer.flow = "target_to_source"
    return layer


OF_MEMBERS = [
    run, run, member(0, MaxAggregation), member(1, StdAggregation), run, member(2, VarAggregation),
    member(2, lambda: VarAggregation(semi_grad=True)), run,
    member(2, lambda: SoftmaxAggregation(t=2.0)), run, member(2, Factor),
    member(2, StdAggregation), setting("aggr_module.aggrs.2.var_aggr.semi_grad", True), run,
    setting("aggr_module.aggrs.2.var_aggr", VarAggregation()), run,
    setting("aggr_module.mode", "sum"), setting("aggr_module.dense_combine", torch.sum), run,
    setting("aggr_module.dense_combine", torch.mean), setting("aggr_module.mode", "cat"),
    *(under(hooked(f"aggr_module{part}")) for part in ("", ".aggrs.0", ".aggrs.2")),
    *(under(multiplied("aggr_module", name, 2)) for name in ("combine", "forward")), run,
    *(under(multiplied("aggr_module.aggrs.1", name, 2)) for name in ("reduce", "forward")),
    under(multiplied("aggr_module.aggrs.2.var_aggr", "forward", 2)),
    under(hooked("aggr_module.fused_aggr")), members(lambda m: m.append(MaxAggregation())),
    members(lambda m: m.pop(3)), member(0, MeanAggregation), member(1, MaxAggregation), run,
    *on_class(MaxAggregation, StdAggregation, VarAggregation, MultiAggregation),
    under(replaced(MultiAggregation, "combine", lambda self, inputs: inputs[0] * 7), times=1),
    *(setting("aggr_module", m) for m in (SumAggregation(), StdAggregation())), run,
    *(setting("aggr_module", m) for m in (MultiAggregation(["sum"]), scaled("sum", False))),
    run, run,
]  # fmt: skip

TABLE: dict[str, tuple[Callable[[], nn.Module], list[Step], str]] = {
    # Layers of PyG.
    **{f"dropout of {name}": (
        lambda name=name: dropping(name),
        [run, run, run, setting("dropout", 0.2), run, lambda s: s.eval()(X, EDGES),
         lambda s: s.eval()(X, EDGES), lambda s: s.train()(X, EDGES), setting("dropout", 0.0), run,
         setting("dropout", 1), setting("dropout", 1.0)], "tp.*") for name in ATTENTION},
    **{f"returned weights of {name}": (
        LAYERS[name][0], [returned, returned, run, returned], ".*p.*|t+") for name in ATTENTION},
    **{f"settings of {name}": (
        LAYERS[name][0],
        [run, run, *(under(set_to(*to), times=1) for to in (("verify", True),
         ("backend", "reference"), ("disable", "cpu"))), under(of(use_backend, "reference")),
         under(set_to("graph_cache", 0)), run, run],
        ".*p") for name in ("sage", "sage max", "gat")},
    "pairs": (lambda: SAGEConv((WIDTH, WIDTH), 4), [
        small, small, call((X, None), TO_FEW, size=(N, 6)), call((X, None), TO_FEW, size=(N, 6)),
        call((X, None), TO_FEW, size=(N, 7)), call((X, None), TO_FEW), call((X, X), EDGES), run,
        call((X, X.clone()), EDGES), call((X, SMALL), TO_FEW, size=(N, 6)),
        call((X, SMALL), TO_FEW, size=(N, 7)), call((X, SMALL), EDGES), call((SMALL, X), TO_FEW),
    ], "tp.*p.*"),
    "pairs of attention": (lambda: GATConv((WIDTH, WIDTH), 4, add_self_loops=False), [
        small, small, call((X, None), EDGES), call((X, None), EDGES), call((X, X), EDGES)], ".*"),
    "shapes of weights": (lambda: GraphConv(WIDTH, 4), [
        weighted, weighted, call(X, EDGES, None), run, call(X, EDGES, COLUMN.squeeze(1)),
        call(X, EDGES, WEIGHT.clone().requires_grad_()), call(X, EDGES, WEIGHT[::2].repeat(2)),
        call(X, EDGES, WEIGHT[:-1]), weighted], "(.*p){4}"),
    "weights of a square": (lambda: GraphConv(E, 4), [
        *[call(SQUARE, EDGES, WEIGHT)] * 3, call(SQUARE, FEW, WEIGHT[:7])], ".*"),
    "lists of linear layers": (lambda: pna(edge_dim=3), [
        edges3, edges3, under(hooked("pre_nns.0.0"), run=edges3),
        twice(lambda s: s.pre_nns[0].append(nn.ReLU())), twice(lambda s: s.pre_nns[0].pop(1)),
        twice(lambda s: setattr(s, "pre_nns", nn.ModuleList(reversed(s.pre_nns)))),
        twice(lambda s: s.pre_nns.__setitem__(0, s.pre_nns[1]))], "tp.*"),
    "an attribute that comes later": (
        pna, [run, run, edges3, run, lambda s: encoder(s) or run(s), run, edges3, run], ".*p"),
    "softmax aggregation": (
        lambda: GENConv(WIDTH, WIDTH, aggr="softmax", learn_t=True).double(),
        [call(X.double(), EDGES)] * 3, ".*p"),
    # Parts of features.
    "columns": (lambda: Columns(lin=nn.Linear(4, WIDTH)), [
        run, run, call(features(N + 2, WIDTH), EDGES), call(features(N, 12), FEW), run], "tpttp"),
    "columns by numbers of edges": (
        lambda: Indexed(scale=(1, 2)), [call(X, EDGES, w) for w in (TWO, TWO, TRIPLE, TWO)], ".*"),
    "a number in a tensor chooses": (
        lambda: Chosen(scale=(1.0, 2.0)),
        [call(X, EDGES, torch.tensor(n)) for n in (0, 0, 1, 0, 1)], r"tt\.\.\."),
    "columns of edges": (FirstColumn, [
        *(call(X, EDGES, THREE * n) for n in (1, 1, -2)), call(X, FEW, THREE[:7]),
        call(X, EDGES, features(E, 4))], "tpptt"),
    "the first edges": (
        FirstEdges, [call(X, EDGES, w) for w in (TWO, TWO, TRIPLE, TWO, TWO[:1])], ".*"),
    "orders": (
        lambda: Shuffled(order=ORDERS[0]), [setting("order", o, column) for o in ORDERS], ".*"),
    "steps of features of edges": (embedded, [
        edges3, edges3, setting("shift", -1.5, edges3), edges3,
        setting("scale", torch.full((1, 6), 2.0), edges3), edges3,
        setting("scale", torch.rand(6), edges3), setting("scale", torch.rand(E, 6), edges3), edges3,
        setting("scale", 3, edges3), edges3, call(X, FEW, THREE[:7])], "(.*p){4}.*"),
    "one step twice": (
        lambda: (lambda one: embedded(first=one, second=one, scale=1))(nn.Linear(WIDTH, WIDTH)),
        [call(X, EDGES, features(E, WIDTH))] * 3, ".*"),
    # Attributes and arguments.
    "numbers": (
        lambda: Scaled(scale=2.0), [run, run, *(setting("scale", v) for v in NUMBERS)], "tp.*"),
    "tensors": (lambda: Scaled(scale=ROW), [
        run, run, *(setting("scale", v) for v in (
            OTHER_ROW, 2.0, torch.tensor(3.0), torch.tensor(4.0), ROW[:, :1], COLUMN, COLUMN * 2,
            torch.ones(E, WIDTH))),
        lambda s: delattr(s, "scale") or run(s), setting("scale", ROW)], "tp.*"),
    "arguments": (ByWeight, [
        *(call(X, EDGES, v) for v in ARGUMENTS * 2), run, call(X, ONE, COLUMN[:1]),
        call(X, ONE, ROW), call(X, ONE, OTHER_ROW), call(X, FEW, COLUMN[:7]),
        call(features(N, 4), EDGES, COLUMN), call(features(N, 4, WIDTH), EDGES, COLUMN)],
        "(.*p){5}.*"),
    "either sign of zero": (Divided, [call(X, EDGES, n) for n in (0.0, 0.0, -0.0, -0.0)], ".*"),
    **{f"sizes of {cls.__name__}": (cls, [call(X, EDGES, size=size) for size in SIZES], ".*p.*")
       for cls in (Plain, Unused)},
    "flow and node dimension": (Sum, [
        run, run, setting("flow", "target_to_source"), run, setting("node_dim", 0),
        setting("node_dim", -2), setting("flow", "source_to_target")], ".*"),
    "the other flow": (backwards, [call((SMALL, X), TO_FEW.flip(0)), run, run], ".*"),
    "one dimension": (lambda: Plain(node_dim=0), [
        *[call(LINE, EDGES)] * 3, call(features(N + 1), FEW)], ".*"),
    "default devices": (Positions, [
        *[under(of(torch.device, "cpu"), times=1)] * 2, under(default_device, times=1),
        *[under(of(torch.device, "meta"), times=1)] * 2, run, run,
        under(of(torch.device, "cpu"), times=1)], "tpptptpp"),
    # Methods, hooks and functions.
    "hooks of an aggregation": (
        Sum, [run, run, under(hooked("aggr_module")), under(hooked_everywhere), run], ".*p"),
    "modules of aggregation": (Sum, [  # a module like one that was recorded is recognised
        run, run, setting("aggr_module", MaxAggregation()),
        setting("aggr_module", SumAggregation())], "tptp"),
    "a factor of an aggregation": (
        lambda: Sum(Factor()), [run, run, setting("aggr_module.factor", 3.0)], ".*"),
    "a temperature": (lambda: Sum(SoftmaxAggregation(t=1.0)), [
        run, run, setting("aggr_module.t", 4.0)], ".*"),
    "attention to members": (  # torch's reads a flag that is no part of the context
        lambda: Sum(MultiAggregation(ANY, **ATTENDED)), [run] * 3, r"tt\."),
    "members of an aggregation": (  # more records than are made of one layer
        lambda: Sum(MultiAggregation(["mean", "max", "std"])), OF_MEMBERS, ".*"),
    "a projection of members": (lambda: Sum(MultiAggregation(ANY, **PROJECTED)), [
        run, run, setting("aggr_module.lin.weight",
                          nn.Parameter(torch.ones(WIDTH, 3 * WIDTH), False)),
        under(hooked("aggr_module.lin")), run], "t.*p"),
    "scalers": (lambda: Sum(scaled(ANY)), [
        run, run, scaler("linear"), scaler("identity", "attenuation"),
        first(lambda s: s.aggr_module.avg_deg_log.mul_(3)),
        setting("aggr_module.avg_deg_lin", nn.Parameter(torch.full((1,), 2.0), False)),
        scaler("linear"), scaler("unknown"), scaler("linear"),
        lambda s: s.aggr_module.requires_grad_(False) and run(s),
        under(multiplied("aggr_module", "forward", 2)), under(hooked("aggr_module.aggr")),
        *on_class(DegreeScalerAggregation), setting("aggr_module.aggr", MaxAggregation()), run],
        "tp.*p"),
    "methods of an instance": (Sum, [
        run, run, under(replaced("", "message", lambda x_i, x_j: x_j * 3)),
        under(multiplied("", "update", 2)), under(multiplied("", "aggregate", 2)),
        under(multiplied("aggr_module", "forward", 5)), run], "t.*p"),
    "methods of a class": (Rectified, [
        run, run, under(replaced(Rectified, "message", lambda self, x_i, x_j: x_i - x_j), times=1),
        under(replaced(Rectified, "update", lambda self, inputs: inputs * 2), times=1), run,
        under(replaced(Rectified.message, "__code__", Sum.message.__code__), times=1),
        under(multiplied(SumAggregation, "forward", 2), times=1),
        under(replaced(F, "relu", F.leaky_relu), times=1), run,
        *(flag(n, replaced(MessagePassing, "update", updated)) for n in (0, 0, 3)), run], "tp.*p"),
    "a method of a base": (NoMessage, [
        run, run, under(replaced(MessagePassing, "message", lambda self, x_j: x_j * 3)), run],
        ".*"),
    # What stands in for a function may read what it likes, so it is traced each time.
    **{f"{name} that a message calls": (
        lambda: GATConv(WIDTH, 4, add_self_loops=False),
        [run, run, *(flag(n, replaced(owner, name, flagged)) for n in (2, 2, 5, 5)), run], ".*p")
       for owner, name in ((F, "leaky_relu"), (sys.modules[GATConv.__module__], "softmax"))},
    # What a message reads.
    "of a tensor": (OfTensor, [attribute_of_tensor(n) for n in (1.0, 1.0, 3.0)], ".*"),
    "a private name": (Private, [setting("_Private__scale", v) for v in (1.0, 1.0, 3.0)], ".*"),
    "a property that counts": (Counting, [run] * 5, ".*"),
    "__getattr__": (Looked, [run] * 3, ".*"),
    "the last size": (LastSize, [run, run, call(X, FEW)], ".*"),
    "a size": (SizeOfArgument, [run, run, call(features(N, 3), EDGES)], ".*"),
    "a size of two": (lambda: SizeOfArgument(node_dim=0), [
        *[call((LINE, LINE), EDGES)] * 2, call((LINE, LINE), FEW)], ".*"),
    "a size of edges": (lambda: SizeOfArgument(node_dim=0), [
        *[call(LINE, EDGES)] * 2, call(LINE, FEW)], ".*"),
    "a size of an attribute": (
        SizeOfAttribute, [narrow, narrow, setting("scale", torch.ones(4))], ".*"),
    "a length": (Length, [run, run, call(X, FEW)], ".*"),
    "a shape": (Shape, [run, run, call(X, FEW)], ".*"),
    "identity": (Identity, [
        *[call(X, EDGES, COLUMN, COLUMN * 2)] * 2, call(X, EDGES, COLUMN, COLUMN)], ".*"),
    "a seed": (Seeding, [run] * 3, ".*"),
    "a default": (
        Default, [run, run, under(replaced(Default.message, "__defaults__", (5.0,)))], ".*"),
    "inference mode": (Inference, [no_grad, no_grad, inference(), inference()], ".*"),
    "data": (OnData, [run, run, call(-X, EDGES)], ".*"),
    "data of edges": (OnWeights, [column, column, call(X, EDGES, COLUMN + 1000)], ".*"),
    "a global": (Global, [flag(n) for n in (0, 0, 2, 0)], ".*"),
    "a builtin": (Builtin, [run, run, under(replaced(Builtin, "unrelated", 1)), run], ".*"),
    "a name that hides a builtin": (
        Builtin, [run, run, under(replaced(globals(), "max", min)), run], ".*p"),
    "a list in a dictionary": (lambda: Contained(scale={"a": [2.0]}), [
        run, run, first(lambda s: s.scale["a"].__setitem__(0, 7.0))], ".*"),
    "a nested function": (lambda: Nested(scale=2.0), [run, run, setting("scale", 3.0)], ".*"),
    "super": (lambda: Super(scale=2.0), [run, run, setting("scale", 3.0)], ".*"),
    "random numbers": (Random, [run] * 3, ".*"),
    "dropout in a message": (Dropping, [run] * 3, ".*"),
    "a count": (Counted, [run] * 4, ".*"),
    "a default by name": (
        DefaultByName, [run, run, under(replaced(_times.__kwdefaults__, "scale", 5.0)), run], ".*"),
    "keywords of a partial function": (
        lambda: Partial(times=functools.partial(_times, scale=3.0)),
        [run, run, under(lambda s: replaced(s.times.keywords, "scale", 5.0)(s)), run], ".*"),
    "an attribute of a function": (
        AttributeOfAFunction, [run, run, under(replaced(_times_factor, "factor", 5.0)), run], ".*"),
    **{f"{cls.__name__} over a variable": (
        cls, [under(replaced(CELL, "factor", n), times=1) for n in (1.0, 1.0, 3.0, 1.0)], ".*")
       for cls in (CLOSED, DECORATED)},
    "a tensor in two places": (lambda: TwoAttributes(a=ROW, b=ROW), [
        run, run, setting("b", OTHER_ROW), setting("a", OTHER_ROW), setting("b", ROW)], ".*"),
    **{f"{name} as attribute and argument": (
        lambda value=value: AttributeOrArgument(scale=value),
        [*[call(X, EDGES, value)] * 2, *[call(X, EDGES, changed)] * 2], ".*")
       for name, value, changed in (("row", ROW, OTHER_ROW), ("column", COLUMN, COLUMN * 3))},
    "features of both ends": (ByWeight, [
        column, column, call((X, X), EDGES, COLUMN), call((X, X), EDGES, COLUMN),
        call((X, X * 2), EDGES, COLUMN)], "tp.*"),
    # Attention.
    **{f"weights between calls of {cls.__name__}": (
        lambda cls=cls: cls(node_dim=0),
        [run, run, *(call(X, EDGES, change=change) for change in WEIGHTS for _ in range(2)),
         call(X, EDGES, OTHER_EDGES), call(X, EDGES, OTHER_EDGES)], ".*")
       for cls in (Attending, AsNumber, Unweighted)},
    "a mask that is not used": (UnusedMask, [run] * 3, ".*"),
    "two masks": (TwoMasks, [lambda s: (run(s), s.put_aside * 1)] * 3, ".*"),
    **{f"a result changed in place by {name}": (
        lambda change=change: InPlace(change),
        [gradient_of(0, X, EDGES), gradient_of(0, X, EDGES), call(X, OTHER_EDGES)], "tpt")
       for name, change in {
           "a number": lambda out: out.add_(1), "a product": lambda out: out.mul_(2.0),
           "an activation": torch.relu_, "a view": lambda out: out.view(-1, 6).mul_(3.0),
           "rows": lambda out: out[:3].zero_(),
           "an assignment": lambda out: out.__setitem__((slice(None), 0), 1.0),
       }.items()},
    # Scattered into zeros without a look at them; the last node has no edges.
    **{f"a maximum scattered into {name}": (
        lambda change=change: ScatteredMaximum(change), [call(X, EDGES % (N - 1))] * 3, ways)
       for name, change, ways in (("zeros", lambda out: None, ".*p"),
                                  ("a row", lambda out: out[N - 1].fill_(5.0), r"tt\."),
                                  ("others", lambda out: out.add_(5.0), r".*t\.?"))},
}  # fmt: skip


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", TABLE)
def test_a_change_is_seen(name: str, like_stock: Any) -> None:
    make, steps, ways = TABLE[name]
    found = like_stock(make(), *steps)
    assert re.fullmatch(ways, found), found


@pytest.mark.parametrize("kind", [
    "propagate_forward", "propagate_forward_pre", "message_forward", "message_forward_pre",
    "aggregate_forward", "aggregate_forward_pre",
])  # fmt: skip
def test_hooks_of_a_layer(kind: str, like_stock: Any) -> None:
    heard: list[int] = []
    step = under(hooked("", lambda *args: heard.append(len(args)), kind), times=1)
    assert like_stock(Sum(), call(), call(), step, call()) == "tp.p"
    assert len(heard) == 2


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
    # Other sizes are recorded once more, and then any; an empty graph is recorded by itself.
    ways = like_stock(Sum(make()), call(), call(), call(X, FEW), call(X, graph(0)),
                      call(features(N + 2, WIDTH), EDGES), call(X, graph(0)))  # fmt: skip
    assert ways == "tptttt"
    cube = features(N, 3, WIDTH)
    assert like_stock(Sum(make(), node_dim=0), call(cube, EDGES), call(cube, EDGES))[1] == "p"


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
        self.first, self.lin = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.joint = nn.Linear(WIDTH + 1, 3)
        self.scale = nn.Parameter(features(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor, d: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.first(x), d=d)

    def message(self, x_j: Tensor, d_j: Tensor) -> Tensor:
        return self.kind(self, x_j, d_j)


@pytest.mark.one_of(6)
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
    busy, again = gradient_of(0, X, torch.ones(N, 1), EDGES), gradient_of(0, X, d, idle)
    ways = like_stock(
        OfIdleNodes(IDLE_MESSAGES[name]), busy, again, again, gradient_of(0, X, more, other), busy
    )
    assert ways.count("p") >= 3 or name in ("a norm", "lerp")  # these are traced in each call


# -- what stays behind -----------------------------------------------------------------------------


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


def test_patching_again_finds_the_program() -> None:
    layer = SAGEConv(WIDTH, 4)
    expected = layer(X, EDGES)
    with pyg_accel.patched():
        layer(X, EDGES)
    with traces() as entered, pyg_accel.patched():
        with pyg_accel.patched(layer):
            torch.testing.assert_close(layer(X, EDGES), expected)
        torch.testing.assert_close(layer(X, EDGES), expected)
    assert not entered


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Any) -> None:
    layer = GATConv(WIDTH, 4)
    with pyg_accel.patched():
        expected = layer(X, EDGES)
        layer(X, EDGES)
        other = copied(layer)
        with traces() as entered:
            torch.testing.assert_close(other(X, EDGES), expected)
            assert entered
        with torch.no_grad():
            other.att_src.mul_(2)
        with traces() as entered:
            changed = other(X, EDGES)
            assert not entered
        assert not torch.equal(changed, expected)
        torch.testing.assert_close(layer(X, EDGES), expected)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_alive(name: str) -> None:
    make, more = LAYERS[name]
    gc.freeze()  # the collections below need not look through what earlier tests have made
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
        for k in range(40):
            layer.scale = k + 0.5
            layer(X, EDGES)
        assert 0 < len(programs.find(layer, "call").programs) < 20


def sampled_call(layer: nn.Module, given: tuple[Any, ...], **how: Any) -> Tensor:
    torch.manual_seed(5)
    with torch.no_grad(), pyg_accel.sampled(**how) if how else contextlib.nullcontext():
        out: Tensor = layer(X, EDGES, *given)
    return out


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_samples_of_edges(name: str, report_of: Any) -> None:
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
        for lap in range(2):
            with traces() as entered:
                for how, out in zip(ways, expected, strict=True):
                    found = sampled_call(layer, given, **how)
                    torch.testing.assert_close(found, out, rtol=0, atol=0)
            # A softmax and a sum over a sample are two formulas.
            assert not lap or not entered or name.startswith("transformer")
    assert {(row.formula, row.backend) for row in report_of()} == told
    sampled = any("over 2 edges" in formula for formula, _ in told)
    assert sampled or name not in ("sage", "gcn", "graph", "gat", "tag")
    # Attention that is not sampled runs as its two formulas, which round in another way.
    assert sampled == any(not torch.allclose(expected[-1], out, atol=1e-5) for out in expected[:-2])


class Degrees(MessagePassing):
    """A layer that counts edges which it derives of its edge_index, maybe with learned weights."""

    def __init__(self, learned: bool) -> None:
        super().__init__(aggr="sum")
        self.weight = nn.Parameter(torch.rand(1)) if learned else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.expand(edge_index.size(1))
        edges, weight = remove_self_loops(edge_index, weight)
        places = torch.arange(edges.size(1)).view(-1, 1) / edges.size(1)
        places = places if weight is None else places * weight.view(-1, 1)
        return self.propagate(edges, x=x, places=places)

    def message(self, x_j: Tensor, places: Tensor) -> Tensor:
        return places * x_j


@pytest.mark.parametrize("learned", [False, True])
def test_the_number_of_derived_edges_is_computed_where_sizes_differ(learned, like_stock) -> None:
    graphs = [graph(E + seed, seed=seed) for seed in range(6)]
    ways = like_stock(Degrees(learned), *[call(X, edges) for edges in graphs])
    assert ways == "ttpppp"


def copies_state(layer: Any) -> bool:
    """Whether a call copies the buffer of a layer, as one that is recorded does."""
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        layer(X, EDGES)
    return any(e.name == "aten::clone" and [4321] in e.input_shapes for e in seen.function_events)


def test_a_call_is_recorded_less_and_less_often_if_its_reads_change_each_time():
    layer = SuperGATConv(WIDTH, WIDTH).eval()
    layer.register_buffer("state", torch.zeros(4321))
    with pyg_accel.patched():
        counts = 0
        for number in range(30):
            layer.att_x = torch.zeros(number + 1, 1)  # as training leaves it
            counts += copies_state(layer)
        assert 5 <= counts <= 10, "five times, and then after 1, 2, 4, 8 and 16 calls"
        assert programs.why(layer, "call") == "what its code reads changes between calls"
        for _ in range(40):  # nothing changes any more
            layer(X, EDGES)
        assert not copies_state(layer)
        with traces() as entered:
            layer(X, EDGES)
        assert not entered


def test_a_call_that_is_not_recorded_costs_no_copy_of_the_state():
    class Reads(GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) * float(x.detach().sum() > -1e9)

    layer = Reads(WIDTH, WIDTH)
    layer.register_buffer("state", torch.zeros(4321))
    with pyg_accel.patched():
        for _ in range(2):
            layer(X, EDGES)
        assert programs.why(layer, "call").startswith("what it does depends on the numbers")
        assert not any(copies_state(layer) for _ in range(10))
