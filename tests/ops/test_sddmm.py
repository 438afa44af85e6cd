"""SDDMM against gathers by hand."""

import operator

import pytest
import torch

from pyg_accel import Graph, ops

EDGES = torch.stack([torch.randint(0, 9, (40,)), torch.randint(0, 6, (40,))])
BY_HAND = {
    "dot": lambda target, source: (target * source).sum(-1),
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


@pytest.mark.parametrize("edge_order", [False, True], ids=["csr-order", "edge-order"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (1,), (2, 1)], ids=str)
@pytest.mark.parametrize("op", BY_HAND)
def test_every_edge_combines_its_target_with_its_source(op, shape, edge_order):
    graph = Graph.from_edge_index(EDGES, (9, 6))
    target = torch.randn(6, *shape, dtype=torch.float64, requires_grad=True)
    source = torch.randn(9, *shape, dtype=torch.float64, requires_grad=True)
    actual = ops.sddmm(graph, target, source, op, edge_order=edge_order)
    order = torch.arange(40) if edge_order else graph.perm.long()
    expected = BY_HAND[op](target[EDGES[1][order]], source[EDGES[0][order]])
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected)
    ours = torch.autograd.grad(actual.sin().sum(), [target, source])
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sin().sum(), [target, source]))


def test_a_graph_without_edges_gives_no_values():
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long), (9, 6))
    target, source = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for op, shape in (("dot", (0,)), ("add", (0, 4))):
        out = ops.sddmm(graph, target, source, op)
        assert out.shape == shape
        grads = torch.autograd.grad(out.sum(), [target, source])
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("op", ["dot", "add"])
def test_features_without_columns_broadcast_to_nothing(op):
    graph = Graph.from_edge_index(torch.randint(6, (2, 20)), (6, 6))
    x = torch.empty(6, 2, 0, requires_grad=True)
    y = torch.randn(6, 2, 1, requires_grad=True)
    out = ops.sddmm(graph, x, y, op)
    out.sum().backward()
    assert out.shape == ((20, 2) if op == "dot" else (20, 2, 0)) and not out.any()
    assert y.grad is not None and not y.grad.any()
