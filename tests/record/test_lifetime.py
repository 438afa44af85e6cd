"""What calls that are recorded leave behind, and how often they are recorded."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.patching import programs
from tests.record.layers import LAYERS, Attending, Degrees, Scaled
from tests.record.steps import COLUMN, EDGES, WIDTH, E, X, call, graph

pytestmark = pytest.mark.usefixtures("always")


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_inside_of_a_record(enabled: bool) -> None:
    """What waits for the end of other objects is called at any time, and is no part of a call."""
    seen: list[bool] = []

    class Asks(pyg.GCNConv):
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
    mine, other = pyg.SAGEConv(WIDTH, 4), pyg.SAGEConv(WIDTH, 4)
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
    layer = pyg.SAGEConv(WIDTH, 4)
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
    layer = pyg.GATConv(WIDTH, 4)
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
            x, edges, inputs = X.clone().requires_grad_(), EDGES.clone(), [t.clone() for t in more]
            layer(x, edges, *inputs).sum().backward()
            refs = [weakref.ref(t) for t in (x, edges, *inputs)]
            del x, edges, inputs
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
    layer = pyg.SuperGATConv(WIDTH, WIDTH).eval()
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
    class Reads(pyg.GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) * float(x.detach().sum() > -1e9)

    layer = Reads(WIDTH, WIDTH)
    layer.register_buffer("state", torch.zeros(4321))
    with pyg_accel.patched():
        for _ in range(2):
            layer(X, EDGES)
        assert programs.why(layer, "call").startswith("what it does depends on the numbers")
        assert not any(copies_state(layer) for _ in range(10))
