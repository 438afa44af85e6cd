"""Layers that know the graphs that are too small for them."""

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, SimpleConv

import pyg_accel
from pyg_accel.patching import small
from pyg_accel.patching.layer_call import layer_call
from pyg_accel.settings import settings

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
    sage = SAGEConv(8, 8)
    with pyg_accel.patched():
        for _ in range(2):  # the first call tells the kind
            sage(x, edges)
        known = small.find(sage, (x, edges), {})
        assert known is not None and "(sums)" in known.row.reason
        assert small.find(sage.eval(), (x, edges), {}) is None


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
        assert not layer_call.small
        layer_call.small = True
        try:
            thread = threading.Thread(target=lambda: seen.append(layer_call.small))
            thread.start()
            thread.join()
        finally:
            layer_call.small = False
    assert seen == [False]
