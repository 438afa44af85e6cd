"""Layers over many relations: a hundred, of very different sizes, some of them empty."""

from typing import Any

import pytest
import torch
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    HeteroConv,
    HGTConv,
    RGATConv,
    RGCNConv,
    SAGEConv,
)

RELATIONS, NODES, EDGES, WIDTH = 100, 60, 2000, 8

pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture
def homogeneous() -> tuple[Any, ...]:
    """Features, edges, and their relations: some have hundreds of edges, some none."""
    torch.manual_seed(1)
    edge_type = (RELATIONS * torch.rand(EDGES) ** 3).long() // 2 * 2  # of every second, no edge
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(NODES, (2, EDGES)), edge_type


@pytest.mark.parametrize("kind", [RGCNConv, FastRGCNConv, RGATConv])
@pytest.mark.parametrize(
    "options", [{}, {"num_bases": 4}, {"num_blocks": 4}], ids=["full", "bases", "blocks"]
)
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_layers_with_a_matrix_a_relation_equal_stock(
    same_as_stock, homogeneous, kind, options, aggr
):
    if kind is RGATConv and aggr != "add":
        pytest.skip("attention is a sum")
    if kind is FastRGCNConv and aggr == "max":
        pytest.skip("PyG has no maximum there")
    layer = kind(WIDTH, WIDTH, RELATIONS, **options, **({} if kind is RGATConv else {"aggr": aggr}))
    same_as_stock(layer.double(), *homogeneous)


def typed_graph(types: int = 5) -> tuple[dict[str, Any], dict[tuple[str, str, str], Any]]:
    """A hundred edge types between five node types."""
    torch.manual_seed(1)
    names = [f"type{i}" for i in range(types)]
    x = {
        name: torch.randn(20 + 7 * i, WIDTH, dtype=torch.float64, requires_grad=True)
        for i, name in enumerate(names)
    }
    edges = {}
    for relation in range(RELATIONS):
        source, target = names[relation % types], names[relation // types % types]
        count = 0 if relation % 17 == 3 else 1 + relation
        ends = [torch.randint(x[name].size(0), (count,)) for name in (source, target)]
        edges[source, f"to{relation}", target] = torch.stack(ends)
    return x, edges


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_a_layer_an_edge_type_equals_stock(same_as_stock, aggr):
    x, edges = typed_graph()

    def layer(relation: int) -> torch.nn.Module:
        if relation % 2:
            return SAGEConv((WIDTH, WIDTH), 4)
        return GATConv((WIDTH, WIDTH), 4, add_self_loops=False)

    torch.manual_seed(2)
    layers = {edge_type: layer(i) for i, edge_type in enumerate(edges)}
    same_as_stock(HeteroConv(layers, aggr=aggr).double(), x, edges)


def test_a_transformer_over_a_hundred_edge_types_equals_stock(same_as_stock):
    x, edges = typed_graph()
    layer = HGTConv(WIDTH, WIDTH, (list(x), list(edges)), heads=2)
    same_as_stock(layer.double(), x, edges)


@pytest.mark.parametrize("kind", [RGCNConv, RGATConv])
def test_most_calls_over_relations_are_accelerated(homogeneous, kind, report_of):
    import pyg_accel

    layer = kind(WIDTH, WIDTH, RELATIONS).double()
    with pyg_accel.patched():
        layer(*homogeneous)
    rows = report_of()
    accelerated = sum(row.calls for row in rows if row.formula)
    assert accelerated >= 0.9 * sum(row.calls for row in rows), rows
