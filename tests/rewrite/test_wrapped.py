"""The code of an optimised model is the model's own, whatever it branches on, holds or asks for."""

import copy
import gc
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import global_mean_pool
from torch_geometric.typing import Adj

import pyg_accel
from pyg_accel import optimize, plan
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers

N, E = 60, 500


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs():
    torch.manual_seed(0)
    return torch.randn(N, 12), torch.randint(N, (2, E))


def agree(model, fast, *args, **kwargs):
    torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs), rtol=1e-9, atol=1e-9)


def decided(fast):
    return [layer.decisions[-1] for layer in rewritten_layers(fast).values()]


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.GCNConv(12, 12)


class Optional(Base):
    def forward(self, x, edge_index, weight=None, batch=None, *, scale=1.0, mask=None):
        x = x * 2 if weight is not None else x
        x = self.conv(x, edge_index, weight) * scale
        x = x if mask is None else x[mask]
        return x if batch is None else global_mean_pool(x, batch)


class OfData(Base):
    def forward(self, data):
        out = self.conv(data.x, data.edge_index, data.edge_weight)
        return out * 3 if data.edge_weight is None else out + ("y" in data)


OPTIONS = {
    "nothing": {}, "weight": {"weight": torch.rand(E).double()},
    "batch": {"batch": torch.arange(N) // 12}, "scale": {"scale": 3.0},
    "mask": {"mask": torch.arange(N) % 2 == 0},
}  # fmt: skip


@pytest.mark.parametrize("example", OPTIONS)
def test_optional_arguments_may_differ_from_the_example(example):
    model, args = Optional(), inputs()
    fast = optimize(model, *args, **OPTIONS[example])
    assert len(decided(fast)) == 1
    for options in OPTIONS.values():
        agree(model, fast, *args, **options)


@pytest.mark.parametrize("example", [0, 1, 2])
def test_attributes_of_data_may_be_missing(example):
    model, (x, edge_index) = OfData(), inputs()
    weight = torch.rand(E)
    data = [Data(x=x, edge_index=edge_index), Data(x=x, edge_index=edge_index, edge_weight=weight),
            Data(x=x, edge_index=edge_index, edge_weight=weight, y=x)]  # fmt: skip
    fast = optimize(model, data[example])
    for each in data:
        agree(model, fast, each)


@pytest.mark.parametrize("train", [False, True])
def test_a_pair_of_the_same_features_and_then_one(train):
    model, (x, edge_index) = nn.SAGEConv(12, 4), inputs()
    for first, second in ((x, (x, x)), ((x, x), x), ((x, x[:9]), x)):
        edges = edge_index % (9 if type(first) is tuple and len(first[1]) == 9 else N)
        fast = optimize(model, first, edges, train=train)
        agree(model, fast, first, edges)
        agree(model, fast, second, edge_index)


class Child(torch.nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.conv, self.parent = nn.SAGEConv(12, 4), [parent]

    def forward(self, x, edge_index):
        return F.dropout(self.conv(x, edge_index), 0.5, self.parent[0].training)


class Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Child(self)

    def forward(self, x, edge_index):
        return self.net(x, edge_index)


def test_a_part_of_a_model_is_put_back_in_its_place():
    model, args = Parent(), inputs()
    names = list(model.state_dict())
    model.net = optimize(model.net, *args, train=True)
    assert list(model.state_dict()) == names == [n for n, _ in model.named_parameters()]
    assert not torch.equal(model(*args), model(*args))
    model.eval()
    assert torch.equal(model(*args), model(*args))
    model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})
    assert len(decided(model.net)) == 1
    outer = optimize(model, *args)
    agree(model, outer, *args)
    assert list(rewritten_layers(outer)) == ["net.conv"] and decided(outer)
    assert not any(t.is_meta for t in model.to("meta").to_empty(device="cpu").parameters())


class Relations(torch.nn.Module):
    def __init__(self, aggr="sum"):
        super().__init__()
        kinds = [("a", "to", "b"), ("b", "to", "a")]
        self.convs = torch.nn.ModuleList(
            nn.HeteroConv({kind: nn.SAGEConv((12, 12), 12) for kind in kinds}, aggr=aggr)
            for _ in range(2)
        )

    def forward(self, x, edges):
        for conv in self.convs:
            x = {key: value.relu() for key, value in conv(x, edges).items()}
        return x


def hetero():
    x, edge_index = inputs()
    edges = {("a", "to", "b"): edge_index, ("b", "to", "a"): edge_index.flip(0)}
    return {"a": x, "b": x.flip(0)}, edges


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.SAGEConv((12, 12), 12), nn.SAGEConv((12, 12), 4)

    def forward(self, x, edge_index):
        return self.b(self.a(x, edge_index).relu(), edge_index)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("make", [Relations, lambda: nn.to_hetero(
    Plain(), (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]))])  # fmt: skip
@pytest.mark.parametrize("train", [False, True])
def test_all_layers_of_a_heterogeneous_model_are_rewritten(make, train):
    model, args = make(), hetero()
    fast = optimize(model, *args, train=train)
    agree(model, fast, *args)
    actual = plan(fast)
    assert len(actual.layers) == 4 and all(layer.trees for layer in actual.layers)
    assert all(layer.calls for layer in actual.layers)


def test_graph_modules_are_optimised_like_any_module():
    args = inputs()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, nn.MessagePassing)

    model = Plain()
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    fast = optimize(traced, *args)
    assert len(decided(fast)) == 2
    agree(model, fast, *args)
    again = torch.fx.GraphModule(model, Tracer().trace(model))  # while one is optimised
    assert [n.target for n in again.graph.nodes if n.op == "call_module"] == ["a", "b"]


CHANGES = [
    (nn.APPNP(3, 0.1), "alpha", 0.6),
    (nn.GCNConv(12, 4), "normalize", False),
    (nn.GCNConv(12, 4), "improved", True),
    (nn.GATConv(12, 4), "negative_slope", 0.9),
    (nn.SAGEConv(12, 4), "normalize", True),
    (nn.SSGConv(12, 4, 0.1), "alpha", 0.7),
]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("conv", "name", "value"), CHANGES, ids=lambda v: str(v)[:16])
def test_options_that_are_set_later_have_effect(conv, name, value, compiled):
    conv, args = copy.deepcopy(conv).double(), inputs()
    fast = optimize(conv, *args)
    torch._dynamo.reset()
    run = torch.compile(fast, backend="eager") if compiled else fast
    agree(conv, run, *args)
    setattr(fast, name, value)
    assert getattr(conv, name) == getattr(fast, name) == value
    assert not hasattr(fast, "missing") and name in dir(fast)
    other = copy.deepcopy(conv)
    del fast
    agree(other, run, *args)


def test_a_model_that_is_called_itself_is_unchanged(report_of):
    model, args = nn.GCN(12, 8, 2, 4), inputs()
    fast = optimize(model, *args)
    model(*args)
    assert report_of() == []
    fast(*args)
    assert [row.calls for row in report_of()] == [2]
    model(*args)
    fast.convs[0](*args)
    assert [row.calls for row in report_of()] == [2]
    del fast
    gc.collect()
    assert type(model.convs[0]).__call__ is torch.nn.Module.__call__


def test_state_is_restored_after_errors_in_the_model(report_of):
    model, (x, edge_index) = nn.GCN(12, 8, 2, 4), inputs()
    fast = optimize(model, x, edge_index)
    with pytest.raises(TypeError):
        fast.convs[0](x, edge_index, wrong=1)
    with pytest.raises(RuntimeError):
        fast(x[:, :3], edge_index)
    model(x, edge_index)
    assert not any(row.backend != "PyG" for row in report_of())


class Wrong(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.conv, self.call = nn.GCNConv(12, 4), call

    def forward(self, x, edge_index):
        return self.call(self.conv, x, edge_index)


@pytest.mark.parametrize("call", [
    lambda conv, x, e: conv(x, e, wrong=1), lambda conv, x, e: conv(x, e, None, None),
    lambda conv, x, e: conv(x, e, x=x), lambda conv, x, e: conv(x),
])  # fmt: skip
def test_calls_that_a_layer_refuses_are_refused(call):
    model, args = Wrong(lambda conv, x, e: conv(x, e)), inputs()
    fast = optimize(model, *args)
    model.call = call
    for run in (model, fast):
        with pytest.raises(TypeError):
            run(*args)


class Checkpointed(torch.nn.Module):
    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.last, self.reentrant = layer, nn.SAGEConv(12, 4), reentrant

    def forward(self, x, edge_index):
        if self.reentrant is None:
            return self.last(self.layer(x, edge_index), edge_index)
        x = checkpoint(self.layer, x, edge_index, use_reentrant=self.reentrant)
        return self.last(x, edge_index)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: nn.GATConv(12, 12, dropout=0.5), lambda: nn.GCNConv(12, 12)]
)
def test_a_checkpoint_recomputes_the_rewritten_layer(make, reentrant):
    model, (x, edge_index) = Checkpointed(make(), reentrant), inputs()
    x.requires_grad_()
    fast = optimize(model, x, edge_index, train=True)

    def gradients(run, how):
        model.reentrant, x.grad = how, None
        torch.manual_seed(1)
        run(x, edge_index).sin().sum().backward()
        return x.grad

    for run in (fast, model, fast):  # each repeats its own
        torch.testing.assert_close(gradients(run, reentrant), gradients(run, None))


def test_optimising_twice_is_optimising_once():
    model, args = nn.GCN(12, 8, 2, 4), inputs()
    once = optimize(model, *args)
    twice = optimize(once, *args, train=True)
    assert twice._original is model
    agree(model, twice, *args)
    assert plan(twice).train and not plan(once).train


@pytest.mark.filterwarnings("ignore")
def test_it_is_copied_pickled_graphed_and_called_like_the_model():
    model, args = nn.GCN(12, 8, 2, 4), inputs()
    fast = optimize(model, *args, train=True)
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    seen = []
    handle = fast.register_forward_hook(lambda *_: seen.append(1))
    assert len(seen) == 0 and fast(*args) is not None and model(*args) is not None
    assert len(seen) == 1
    handle.remove()
    for other in (copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        agree(model, other, *args)
        assert len(decided(other)) == 2 and plan(other).train
    agree(model, pyg_accel.graphed(fast), *args)
    assert pyg_accel.graphed(fast).num_layers == 2


@pytest.mark.parametrize("wrap", [lambda m: optimize(m, *inputs()), pyg_accel.graphed])
def test_a_copy_is_wrapped_even_if_the_model_copies_itself(wrap):
    class Own(nn.GCN):  # as torch.fx.GraphModule
        def __deepcopy__(self, memo):
            return Own(12, 8, 2, 4)

    fast = wrap(Own(12, 8, 2, 4))
    twin = copy.deepcopy(fast)
    assert twin._original is not fast._original
    assert isinstance(twin, (OptimizedModel, pyg_accel.cuda_graphs.Graphed))


def test_explain_shows_where_layers_are_called():
    class Net(Plain):
        def forward(self, x, edge_index):
            h = self.a(x, edge_index).relu() if x.sum() < 1e9 else x
            return self.b(x + h, edge_index) + self.a(h, edge_index)[:, :4]

    x, edge_index = inputs()
    actual = {layer.path: layer for layer in plan(Net(), x, edge_index).layers}
    _, first = inspect.getsourcelines(Net.forward)
    here = f"# {Path(__file__).name}, line"
    one = f"h = self.a(x, edge_index).relu() if x.sum() < 1e9 else x  {here} {first + 1}"
    two = f"return self.b(x + h, edge_index) + self.a(h, edge_index)[:, :4]  {here} {first + 2}"
    assert actual["a"].calls == (one, two)
    assert actual["b"].calls == (two,)
    text = " ".join(str(plan(Net(), x, edge_index)).split())
    assert f"called as {' '.join(two.split())}" in text


def test_a_layer_that_is_never_called_says_so():
    class Net(Plain):
        def forward(self, x, edge_index):
            return self.a(x, edge_index)

    actual = {layer.path: layer.reasons for layer in plan(Net(), *inputs()).layers}
    assert actual == {"a": (), "b": ("it was not called",)}


class Deep(torch.nn.Module):
    """Layers inside of other modules, and names that only this file has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.SAGEConv(12, 12)
        self.inner = torch.nn.ModuleList([nn.SAGEConv(12, 5)])
        self.factor = 2.0

    def forward(self, x: Tensor, edge_index: Adj) -> Tensor:
        x = self.first(x, edge_index).relu()
        for conv in self.inner:
            x = conv(x, edge_index) * self.factor
        return x


WHOLE = {
    "own": Deep,
    "GraphSAGE": lambda: nn.GraphSAGE(12, 5, 2),
    "GCN": lambda: nn.GCN(12, 5, 2, norm="batch_norm"),
    "GIN": lambda: nn.GIN(12, 5, 2),
}
KINDS = [("a", "to", "b"), ("b", "to", "a")]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["own", "GraphSAGE", "GIN"])
def test_an_optimised_model_becomes_heterogeneous(name, train):
    model = WHOLE[name]().eval()
    x, edge_index = inputs()
    fast = pyg_accel.optimize(model, x, edge_index, train=train)
    features, edges = {"a": x, "b": -x}, {kind: edge_index.roll(i) for i, kind in enumerate(KINDS)}
    stock, ours = (nn.to_hetero(m, (["a", "b"], KINDS)).eval() for m in (model, fast))
    ours.load_state_dict(stock.state_dict())
    torch.testing.assert_close(ours(features, edges), stock(features, edges))
    torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
    stock = nn.to_hetero_with_bases(model, (["a", "b"], KINDS), 2) if name == "own" else None
    assert stock is None or nn.to_hetero_with_bases(fast, (["a", "b"], KINDS), 2) is not None


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimised_model_is_scripted_as_the_model_is(name):
    model = WHOLE[name]().eval()
    x, edge_index = inputs()
    fast = pyg_accel.optimize(model, x, edge_index)
    out = torch.jit.script(fast)(x, edge_index)
    torch.testing.assert_close(out, model(x, edge_index))
    again = pickle.loads(pickle.dumps(fast))
    assert isinstance(again, OptimizedModel) and isinstance(copy.copy(fast), OptimizedModel)
    torch.testing.assert_close(again(x, edge_index), model(x, edge_index))
