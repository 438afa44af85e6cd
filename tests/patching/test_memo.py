"""Results of functions of an edge_index are remembered for as long as it lives, and no longer."""

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    get_laplacian,
    remove_self_loops,
)

import pyg_accel
from pyg_accel import MaxKGCNConv
from pyg_accel.graph import derived
from pyg_accel.graph.memo import _Remembered, remembered
from pyg_accel.patching import layers
from pyg_accel.settings import settings


def results() -> list[Any]:
    """The results that are stored."""
    return [value for value in derived.values() if isinstance(value, _Remembered)]


def edges_of(*more: Tensor) -> tuple[Tensor, ...]:
    return torch.randn(9, 4), torch.randint(0, 9, (2, 30)), *more


@pytest.fixture(autouse=True)
def nothing_is_stored() -> None:
    derived.forget()


PUBLIC = [add_self_loops, remove_self_loops, add_remaining_self_loops, get_laplacian, gcn_norm]


def corrupt(edge_index: Tensor) -> None:
    """Turn edges into negative samples, past torch's counting of changes too."""
    edge_index.numpy()[1] = 0
    edge_index[1] = 0


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
@pytest.mark.parametrize("edges", [200, 12_000], ids=["small", "large"])
def test_what_a_user_calls_returns_tensors_of_his_own(function, edges):
    edge_index, weight = torch.randint(0, 300, (2, edges)), torch.rand(edges)
    inputs = (edge_index,), (edge_index, weight)
    expected, stock, public = [function(*args) for args in inputs], function.__code__, function
    with pyg_accel.patched():
        assert function.__code__ is not stock
        pyg.GCNConv(4, 3)(torch.randn(300, 4), edge_index, weight)
        for args, right in zip(inputs, expected, strict=True):
            rows, first = public(*args)[0].unbind(), public(*args)
            second = public(*args)
            corrupt(second[0])
            if second[1] is not None:
                second[1].zero_()
            for actual in (rows, first[0], public(*args)[0]):
                torch.testing.assert_close(actual[1], right[0][1])
            torch.testing.assert_close(first[1], right[1])


class Negative(pyg.MessagePassing):
    """A layer that corrupts one of two equal graphs in its forward."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        positive = sys.modules[__name__].add_self_loops(edge_index)[0]
        negative = sys.modules[__name__].add_self_loops(edge_index)[0]
        negative[1] = negative[1].flip(0)
        return self.propagate(positive, x=x) - 2 * self.propagate(negative, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


small_or_large = pytest.mark.parametrize("edges", [200, 12_000], ids=["small", "large"])


@small_or_large
def test_a_layer_that_corrupts_one_of_two_graphs_has_two(edges):
    layer, x = Negative(), torch.randn(300, 4)
    edge_index = torch.randint(0, 300, (2, edges))
    right = layer(x, edge_index)
    with pyg_accel.patched():
        for _ in range(3):
            torch.testing.assert_close(layer(x, edge_index), right, rtol=1e-4, atol=1e-4)


@small_or_large
def test_a_graph_that_a_layer_returns_is_the_users(edges):
    x, edge_index = torch.randn(300, 4), torch.randint(0, 300, (2, edges))

    def returned(layer: Any) -> Tensor:
        return layer(x, edge_index, return_attention_weights=True)[1][0]

    layer = pyg.GATConv(4, 3)
    right = returned(layer)
    with pyg_accel.patched():
        first, second = returned(layer), returned(layer)
        corrupt(second)
        third = returned(pyg.GATConv(4, 3))
    assert torch.equal(first, right) and torch.equal(third, right)


@pytest.mark.parametrize("make", [pyg.GCNConv, MaxKGCNConv])
def test_a_graph_that_a_layer_caches_is_its_own(make, always):
    more = {"k": 2} if make is MaxKGCNConv else {}
    x, edges = torch.randn(9, 4), torch.randint(0, 9, (2, 30))
    one, other, plain = (make(4, 3, cached=c, **more) for c in (True, True, False))
    with pyg_accel.patched():
        right = [layer(x, edges) for layer in (one, other, plain)]
        one._cached_edge_index[1].mul_(0.5)
        torch.testing.assert_close(other(x, edges), right[1], rtol=0, atol=0)
        corrupt(one._cached_edge_index[0])
        one._cached_edge_index[1].numpy()[:] = 0.0
        torch.testing.assert_close(other(x, edges), right[1])
        torch.testing.assert_close(plain(x, edges), right[2])


def test_a_model_in_training_finds_the_weights_that_it_had(always, monkeypatch):
    cloned = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda t: (cloned.append(t.shape), clone(t))[1])
    model, (x, edges) = pyg.GCN(4, 8, 3), edges_of()
    with pyg_accel.patched():
        for _ in range(3):
            model(x, edges).sum().backward()
    assert not cloned


def test_what_depends_on_the_edges_of_a_learned_layer_is_not_compared(monkeypatch, always):
    """To compare tensors is to wait for the device."""
    layer, args = pyg.PDNConv(4, 3, 5, 6), edges_of(torch.randn(30, 5))
    with pyg_accel.patched():
        layer(*args)
        monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared"))
        for _ in range(3):
            layer(*args).sum().backward()


@pytest.mark.parametrize("edges", [200, 200_000], ids=["small", "large"])
def test_small_batches_are_forgotten_and_what_comes_again_is_not(monkeypatch, edges):
    calls = []

    def watched(function, *args, **kwargs):
        calls.append(function.__name__)
        return remembered(function, *args, **kwargs)

    monkeypatch.setattr(layers, "remembered", watched)
    conv, x = pyg.GCNConv(4, 4), torch.randn(100, 4)
    stays = torch.randint(0, 100, (2, edges))
    right = conv(x, stays)
    with pyg_accel.patched():
        for _ in range(30):
            conv(x, torch.randint(0, 100, (2, 200)))
        before = calls.count("gcn_norm")
        outs = [conv(x, stays) for _ in range(4)]
        asked = calls.count("gcn_norm") - before
    assert before <= 2  # in the calls that are recorded, the first of each kind
    assert 1 <= asked <= 2  # what a program derives, it keeps
    for out in outs:
        torch.testing.assert_close(out, right)


def hetero(make: Any) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    xs = {"a": torch.randn(9, 4), "b": torch.randn(7, 4)}
    edges = {
        ("a", "to", "b"): torch.stack([torch.randint(0, 9, (30,)), torch.randint(0, 7, (30,))]),
        ("b", "to", "a"): torch.stack([torch.randint(0, 7, (30,)), torch.randint(0, 9, (30,))]),
    }
    return make((["a", "b"], kinds)), (xs, edges)


# Models whose layers derive their graphs in each call, and how many graphs there are.
DERIVING: dict[str, tuple[Any, int]] = {
    "gcn": (lambda: (pyg.GCN(4, 8, 3), edges_of()), 1),
    "pdn": (lambda: (pyg.PDNConv(4, 3, 5, 6), edges_of(torch.randn(30, 5))), 1),
    "rgcn": (lambda: (pyg.RGCNConv(4, 3, 3), edges_of(torch.arange(30) % 3)), 2),
    "hgt": (lambda: hetero(lambda metadata: pyg.HGTConv(4, 4, metadata, 2)), 1),
}


@pytest.mark.parametrize("name", DERIVING)
def test_a_derived_graph_is_sorted_once_and_goes_with_its_edges(name, always, built, stored_graphs):
    make, graphs = DERIVING[name]
    model, args = make()
    with pyg_accel.patched():
        for _ in range(4):
            out = model(*args)
        assert len(built) == graphs
        del args, out
        gc.collect()
        assert stored_graphs() == len(results()) == 0


@pytest.mark.parametrize(
    "layer", [lambda: pyg.GCNConv(4, 3), lambda: pyg.SGConv(4, 3, 2)], ids=["gcn", "sg"]
)
def test_a_graph_changed_in_place_is_seen(layer, always):
    conv, x, edges = layer(), torch.randn(9, 4), torch.randint(0, 9, (2, 30))
    weight = torch.rand(30)
    with pyg_accel.patched():
        conv(x, edges, weight)
        edges.copy_(edges.flip(0))
        turned = conv(x, edges, weight)
        weight.mul_(torch.arange(30))
        weighted = conv(x, edges, weight)
    torch.testing.assert_close(weighted, conv(x, edges, weight))
    weight.div_(torch.arange(30)).nan_to_num_()
    assert not torch.allclose(turned, weighted)


def test_training_edge_weights_through_the_normalisation_equals_stock(always, same_as_stock):
    x, edges = torch.randn(9, 4).double(), torch.randint(0, 9, (2, 30))
    weight = torch.rand(30).double().requires_grad_()
    same_as_stock(pyg.GCNConv(4, 3).double(), x, edges, weight)


def test_neither_memo_nor_graphs_keep_sampled_batches_alive(always, stored_graphs):
    model = pyg.GCN(4, 8, 2)
    alive = []
    with pyg_accel.patched():
        for _ in range(5):
            edges = torch.randint(0, 9, (2, 30))
            model(torch.randn(9, 4), edges).sum().backward()
            alive.append(weakref.ref(edges))
        del edges
        gc.collect()
        assert [ref() for ref in alive] == [None] * 5
        assert stored_graphs() == len(results()) == 0


def test_unpatch_forgets_everything(always, stored_graphs):
    model, x, edges = pyg.GCN(4, 8, 2), torch.randn(9, 4), torch.randint(0, 9, (2, 30))
    with pyg_accel.patched():
        model(x, edges)
        assert stored_graphs() > 0
    pyg_accel.unpatch()
    assert stored_graphs() == len(results()) == 0


def test_a_model_that_is_patched_alone_remembers_its_normalised_graph(report_of):
    layer, edge_index = pyg.GCNConv(8, 8), torch.randint(2000, (2, 60_000))
    with pyg_accel.patched(layer):
        for _ in range(3):
            layer(torch.randn(2000, 8), edge_index)
    (formula,) = {row.formula for row in report_of() if row.formula}
    assert formula == "sum_j mul(e0,u1)"
    assert sum(row.calls for row in report_of() if row.formula) >= 2


def fused(name: str) -> Any:
    return lambda w: getattr(torch.optim, name)([w], lr=0.05, fused=True)


class Written:
    """An optimizer of another library: what it writes is not counted."""

    def __init__(self, how: Any) -> None:
        self.how = how

    def __call__(self, w: Tensor) -> "Written":
        self.weight = w
        return self

    def step(self) -> None:
        assert self.weight.grad is not None
        self.how(self.weight, torch.rand_like(self.weight.grad))
        self.weight.grad = None


UNCOUNTED = {
    "adam": fused("Adam"),
    "adamw": fused("AdamW"),
    "sgd": fused("SGD"),
    "adagrad": fused("Adagrad"),
    "foreach": lambda w: torch.optim.Adam([w], lr=0.05, foreach=True),
    "data": Written(lambda w, g: w.data.add_(g)),
    "numpy": Written(lambda w, g: w.detach().numpy().__iadd__(g.numpy())),
    "dlpack": Written(lambda w, g: torch.from_dlpack(w.detach()).add_(g)),
}


@pytest.mark.each
@pytest.mark.parametrize("optimizer", UNCOUNTED.values(), ids=UNCOUNTED)
@pytest.mark.parametrize("alias", [False, True], ids=["itself", "an alias"])
def test_weights_that_are_trained_and_frozen_in_turns_are_normalised_anew(optimizer, alias, always):
    """Optimizers do not all count what they write in ``Tensor._version``."""
    (x, edges), weight = edges_of(), torch.rand(30, requires_grad=True)
    conv, step = pyg.GCNConv(4, 3), optimizer(weight)
    same = weight.detach()  # in the same memory
    with pyg_accel.patched():
        for _ in range(3):
            frozen = same if alias else weight.requires_grad_(False)
            with torch.no_grad():
                conv(x, edges, frozen)
                actual = conv(x, edges, frozen)
                right = conv(x, edges, frozen.clone())
            torch.testing.assert_close(actual, right)
            weight.requires_grad_()
            conv(x, edges, weight).square().sum().backward()
            step.step()


class OnItsOwnGraph(torch.nn.Module):
    """A model whose edges and weights are buffers."""

    def __init__(self, layer: Any, *, weighted: bool) -> None:
        super().__init__()
        self.layer = layer
        whole = torch.randint(0, 9, (2, 60))
        self.register_buffer("edges", whole)
        self.register_buffer("weight", torch.rand(60) if weighted else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.edges, *(() if self.weight is None else (self.weight,)))


ON_THEIR_OWN = {
    "gcn": lambda: OnItsOwnGraph(pyg.GCNConv(4, 3), weighted=False),
    "weights": lambda: OnItsOwnGraph(pyg.GCNConv(4, 3), weighted=True),
    "gat": lambda: OnItsOwnGraph(pyg.GATConv(4, 3), weighted=False),
    "no loops": lambda: OnItsOwnGraph(pyg.GraphConv(4, 3), weighted=True),
}


@pytest.mark.each
@pytest.mark.parametrize("everything", [True, False], ids=["always", "small"])
@pytest.mark.parametrize("make", ON_THEIR_OWN.values(), ids=ON_THEIR_OWN)
def test_tensors_of_a_graph_can_be_swapped(make, everything):
    """``torch.utils.swap_tensors`` refuses tensors with weak references."""
    settings.always = everything
    model, other, x = make(), make(), torch.randn(9, 4)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad(), pyg_accel.patched():
            for _ in range(4):
                model(x)
            model.load_state_dict(other.state_dict())
            actual = [model(x) for _ in range(3)]
            model.double()
            double = model(x.double())
        right = other(x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for out in actual:
        torch.testing.assert_close(out, right)
    torch.testing.assert_close(double, right.double(), rtol=1e-4, atol=1e-5)


def test_an_edge_index_that_was_given_other_data_is_another(always):
    """To assign to ``Tensor.data`` counts as no change."""
    conv, x, edges = pyg.GCNConv(4, 3), torch.randn(9, 4), torch.randint(0, 9, (2, 30))
    held = edges.detach()
    with torch.no_grad(), pyg_accel.patched():
        for _ in range(2):
            conv(x, edges)
        edges.data = torch.randint(0, 9, (2, 30))
        actual = conv(x, edges)
    torch.testing.assert_close(actual, conv(x, edges.clone()))
    assert not torch.equal(held, edges)
