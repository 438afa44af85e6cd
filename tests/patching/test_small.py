"""Layers that know the graphs that are too small for them."""

import gc
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    HANConv,
    HGTConv,
    RGCNConv,
    SAGEConv,
    SimpleConv,
    TransformerConv,
)

import pyg_accel
from pyg_accel.patching import small
from pyg_accel.patching.layer_call import LOOKS_UP, NOT, SMALL, layer_call
from pyg_accel.settings import settings
from pyg_accel.transforms import BuildCSR

LAYERS = {
    "SAGE": lambda: SAGEConv(8, 8),
    "GIN": lambda: GINConv(torch.nn.Linear(8, 8)),
    "GCN": lambda: GCNConv(8, 8),
    "GAT": lambda: GATConv(8, 4, heads=2),
}


def graph(edges: int, nodes: int = 300) -> Tensor:
    return torch.randint(0, nodes, (2, edges))


def formulas() -> list[str]:
    return [row.formula for row in pyg_accel.report().rows]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_learns_what_is_too_small_and_what_is_not(name):
    layer, x = LAYERS[name]().double().eval(), torch.randn(300, 8, dtype=torch.float64)
    few, many = graph(200), graph(120_000)
    right = [layer(x, e).detach() for e in (few, many)]
    with pyg_accel.patched():
        for _ in range(4):
            torch.testing.assert_close(layer(x, few), right[0])
        assert small.find(layer, (x, few.clone()), {}) is not None
        assert small.find(layer, (x, many), {}) is None
        pyg_accel.reset_report()
        for _ in range(3):
            torch.testing.assert_close(layer(x, many), right[1])
        assert any(formulas())
        settings.always = True
        try:
            assert small.find(layer, (x, few), {}) is None
        finally:
            settings.always = None


def test_a_graph_that_comes_again_is_looked_up_where_something_was_derived_of_it():
    x, edges = torch.randn(300, 8), graph(200)
    gcn, sage = GCNConv(8, 8), SAGEConv(8, 8)
    with pyg_accel.patched():
        for layer in (gcn, sage):
            layer(x, graph(200))
        for again in (False, True):
            known = small.find(gcn, (x, edges), {})
            assert known is not None and known.remembers and layer_call.again is again
            known = small.find(sage, (x, edges), {})
            assert known is not None and not known.remembers


def test_graphs_that_are_small_for_a_kind_of_call_are_known_too():
    x, edges = torch.randn(3000, 8), graph(12_000)  # above the limit of all kinds
    conv = TransformerConv(8, 4, heads=2)
    with pyg_accel.patched():
        for _ in range(2):  # the first call tells the kind
            conv(x, edges)
        known = small.find(conv, (x, edges), {})
        assert known is not None and "(attention)" in known.row.reason
        assert small.find(conv.eval(), (x, edges), {}) is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_new_graph_after_another_is_left_to_pyg_and_accelerated_when_it_comes_again(name):
    layer, x = LAYERS[name]().double(), torch.randn(3000, 8, dtype=torch.float64)
    edges = 45_000 if name == "GAT" else 12_000
    with pyg_accel.patched():
        for _ in range(3):  # the first call tells the kind, the second what is small
            layer(x, graph(edges))
        again = graph(edges)
        known = small.find(layer, (x, again), {})
        assert known is not None and known.new_to and "a new graph" in known.row.reason
        assert small.find(layer, (x, again), {}) is None  # it is not new any more
        assert small.find(layer, (x, graph(edges + 1)), {}) is None
        results = [layer(x, again) for _ in range(5)]
        pyg_accel.reset_report()
        results.append(layer(x, again))
        assert all(formulas())
    right = layer(x, again)
    for result in results:
        torch.testing.assert_close(result, right)


def test_a_checkpoint_of_a_new_graph_runs_a_call_alike():
    layer, x = SAGEConv(8, 8), torch.randn(3000, 8, requires_grad=True)
    edges = graph(12_000)
    right = torch.autograd.grad(layer(x, edges).square().sum(), x)[0]
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, graph(12_000))
        out = checkpoint(layer, x, edges, use_reentrant=False)
        layer(x, graph(12_000))
        found = torch.autograd.grad(out.square().sum(), x)[0]
    torch.testing.assert_close(found, right)


def test_a_graph_that_was_built_ahead_is_never_new():
    layer, x = SAGEConv(8, 8), torch.randn(3000, 8)
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, graph(12_000))
        data = BuildCSR()(Data(x=x, edge_index=graph(12_000)))
        pyg_accel.reset_report()
        layer(x, data.edge_index)
        assert all(formulas())


@pytest.mark.parametrize("conv", [HGTConv, HANConv])
def test_layers_of_several_types_know_what_is_too_small(conv):
    types = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]
    layer = conv(8, 8, (["a", "b"], types), heads=2)
    xs = {"a": torch.randn(300, 8), "b": torch.randn(300, 8)}
    edges = {key: graph(1000 + 100 * i) for i, key in enumerate(types)}
    right = layer(xs, edges)
    with pyg_accel.patched():
        for _ in range(3):
            layer(xs, edges)
        found = layer(xs, edges)
        assert small.find(layer, (xs, edges), {}) is not None
        longer = edges | {types[0]: graph(1201)}  # one of them, and all together
        assert small.find(layer, (xs, longer), {}) is None
        assert (
            small.find(layer, (xs, edges | {types[0]: graph(1201), types[1]: graph(0)}), {}) is None
        )
        assert small.find(layer, (xs | {"b": torch.randn(301, 8)}, edges), {}) is None
        sparse = edges[types[0]].double().to_sparse()
        assert small.find(layer, (xs, edges | {types[0]: sparse}), {}) is None
    for name in xs:
        torch.testing.assert_close(found[name], right[name])


def test_relations_that_were_new_are_stacked_when_they_come_again():
    layer, x = RGCNConv(8, 8, 4), torch.randn(3000, 8)
    edges, types = graph(30_000), torch.randint(4, (30_000,))
    right = layer(x, edges, types)
    with pyg_accel.patched():
        for _ in range(3):
            torch.testing.assert_close(layer(x, edges, types), right, rtol=1e-4, atol=1e-4)
        pyg_accel.reset_report()
        layer(x, edges, types)
        assert formulas() == ["mean_j u0, 4 relations"]


class Pool(GCNConv):
    """A layer on a small graph whose forward calls another one on a large graph."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.inner = SimpleConv("sum")

    def forward(self, x: Tensor, edge_index: Tensor, fine: Tensor) -> Tensor:
        return super().forward(self.inner(x.relu(), fine), edge_index)


@pytest.mark.parametrize("between", [False, True])
def test_a_checkpoint_runs_a_call_alike_whatever_is_known_by_then(between):
    x, few, many = torch.randn(300, 8, requires_grad=True), graph(200), graph(120_000)
    pool = Pool()
    right = torch.autograd.grad(pool(x, few, many).square().sum(), x)[0]
    with pyg_accel.patched():
        for _ in range(3):
            pool(x, graph(200), many)
        out = checkpoint(pool, x, few, many, use_reentrant=False)
        if between:
            pool(x, many, many)
        found = torch.autograd.grad(out.square().sum(), x)[0]
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


def test_a_layer_inside_of_a_small_one_is_judged_by_its_own_graph():
    x, few, many = torch.randn(300, 8), graph(200), graph(120_000)
    pool = Pool()
    with pyg_accel.patched(), torch.no_grad():
        for _ in range(3):
            pool(x, graph(200), many)
        pyg_accel.reset_report()
        pool(x, few, many)
        assert any(formulas())


def test_nothing_is_left_behind_by_a_call_that_raises_nor_seen_by_other_threads():
    layer, x, few = SAGEConv(8, 8), torch.randn(300, 8), graph(200)
    seen = []
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, few)
        wrong = few + 1000
        with pytest.raises((IndexError, RuntimeError)):
            layer(x, wrong)
        assert layer_call.small == NOT
        layer_call.small = SMALL
        try:
            thread = threading.Thread(target=lambda: seen.append(layer_call.small))
            thread.start()
            thread.join()
        finally:
            layer_call.small = NOT
    assert seen == [NOT]


class Asking(SAGEConv):
    """A layer that notes how small its call is, and asks for self-loops."""

    def message(self, x_j: Tensor) -> Tensor:
        self.asked = layer_call.small
        return x_j


def test_functions_that_remember_are_asked_only_where_a_graph_comes_again():
    sage, gcn = Asking(8, 8), GCNConv(8, 8)
    x, stays, levels = torch.randn(300, 8), graph(200), []
    gcn.lin.register_forward_hook(lambda *_: levels.append(layer_call.small))
    with pyg_accel.patched():
        for layer in (sage, gcn):
            layer(x, graph(200))
            layer(x, stays)
        levels.clear()
        for edges in (stays, graph(200)):
            sage(x, edges)
            assert sage.asked == SMALL
            gcn(x, edges)
    assert levels == [LOOKS_UP, SMALL]


def test_a_layer_that_dies_is_forgotten():
    layer, x = SAGEConv(8, 8), torch.randn(300, 8)
    with pyg_accel.patched():
        for _ in range(2):
            layer(x, graph(200))
        known = id(layer)
        assert known in small._known
        del layer
        gc.collect()
        assert known not in small._known
