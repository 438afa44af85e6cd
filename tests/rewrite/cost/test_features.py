import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch_geometric.nn import GATConv

import pyg_accel
from pyg_accel.costs import CORE
from pyg_accel.graph import Graph
from pyg_accel.rewrite import select
from pyg_accel.rewrite.cost import Roofline, features
from pyg_accel.rewrite.cost.features import GraphFeatures


def random_graph(rows: int, cols: int, entries: int) -> Graph:
    return Graph.from_edge_index(
        torch.stack([torch.randint(cols, (entries,)), torch.randint(rows, (entries,))]),
        size=(cols, rows),
    )


def test_a_graph_without_entries_or_nodes_has_features():
    assert GraphFeatures.of(random_graph(3, 5, 0)) == GraphFeatures(3, 5, 0)
    empty = GraphFeatures.of(Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64)))
    assert (empty.degree_mean, empty.degree_max) == (0, 0)


def test_small_graphs_are_measured_exactly():
    #    row 0: columns 0 and 4, row 1: none, row 2: columns 1, 1 and 2
    graph = Graph.from_csr(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 1, 1, 2]), num_cols=5)
    actual = GraphFeatures.of(graph)
    assert (actual.num_rows, actual.num_cols, actual.num_entries) == (3, 5, 5)
    assert actual.degree_max == 3
    mean, degrees = 5 / 3, torch.tensor([2.0, 0, 3])
    assert actual.degree_deviation == pytest.approx(float(degrees.std(unbiased=False)) / mean)
    assert actual.near == actual.far == pytest.approx(4 / 5)


def test_the_transpose_has_features_of_its_own():
    hub = Graph.from_csr(torch.tensor([0, 4, 4]), torch.arange(4), num_cols=4)
    assert GraphFeatures.of(hub).degree_max == 4
    assert GraphFeatures.of(hub, transposed=True).degree_max == 1
    assert GraphFeatures.of(hub, transposed=True).num_rows == 4


def test_samples_see_locality():
    nodes, degree = 40_000, 4
    rowptr = torch.arange(0, nodes * degree + 1, degree)
    rows = torch.arange(nodes).repeat_interleave(degree)
    band = (rows + torch.arange(degree).repeat(nodes)).clamp(max=nodes - 1)
    local = GraphFeatures.of(Graph.from_csr(rowptr, band, num_cols=nodes))
    scattered = GraphFeatures.of(random_graph(nodes, nodes, nodes * degree))
    assert local.near < 0.3 < 0.9 < scattered.near
    assert local.far < 0.3 < 0.8 < scattered.far


def test_a_graph_is_measured_once_and_not_kept_alive():
    graph = random_graph(10, 10, 30)
    first = GraphFeatures.of(graph)
    assert GraphFeatures.of(graph) is first
    dead = weakref.ref(graph)
    del graph
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize(("gather", "asked"), [(1e8, True), (1e12, False)])
def test_a_graph_is_measured_only_if_the_choice_depends_on_it(gather, asked, monkeypatch):
    monkeypatch.setattr(select, "QUICK", 0.0)
    measured = []
    measure = features._measure
    monkeypatch.setattr(features, "_measure", lambda csr: measured.append(csr) or measure(csr))
    machine = replace(CORE, flops=1e11, cache_bytes=1e3, gather=gather, cache=1e12)
    conv, cost = GATConv(32, 128), Roofline(machine, "")
    x, edge_index = torch.randn(1000, 32), torch.randint(1000, (2, 20_000))
    fast = pyg_accel.optimize(conv, x, edge_index, cost=cost)
    assert bool(measured) == asked
    (layer,) = pyg_accel.plan(conv, x, edge_index, cost=cost).layers  # with all that is measured
    assert layer.trees[0].tree == pyg_accel.plan(fast).layers[0].trees[0].tree
