"""Softmax over the edges of a target."""

import pytest
import torch
from torch_geometric.utils import softmax

from pyg_accel import Graph, ops

EDGES = torch.stack([torch.randint(0, 9, (40,)), torch.randint(0, 6, (40,))])


@pytest.fixture
def graph() -> Graph:
    return Graph.from_edge_index(EDGES, (9, 8))


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3)], ids=str)
def test_it_equals_pyg_on_the_edge_list(graph, shape):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    actual = ops.edge_softmax(graph, scores, edge_order=True)
    expected = softmax(scores, EDGES[1], num_nodes=8)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), scores)[0] for out in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_values_of_a_target_add_up_to_one_in_csr_order(graph):
    total = ops.spmm(graph, torch.ones(9, 1), ops.edge_softmax(graph, torch.randn(40)))
    torch.testing.assert_close(total, (graph.degree > 0).float().unsqueeze(1))


def test_orders_agree(graph):
    scores = torch.randn(40, 2)
    by_edge = ops.edge_softmax(graph, scores, edge_order=True)
    stored = ops.edge_softmax(graph, scores[graph.perm.long()])
    torch.testing.assert_close(by_edge[graph.perm.long()], stored)


def test_gradcheck_and_gradgradcheck(graph):
    scores = torch.randn(40, 2, dtype=torch.float64, requires_grad=True)
    for edge_order in (False, True):
        run = lambda s, order=edge_order: ops.edge_softmax(graph, s, edge_order=order)  # noqa: E731
        assert torch.autograd.gradcheck(run, scores)
        assert torch.autograd.gradgradcheck(run, scores)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_16_bit_scores_keep_their_dtype(graph, dtype):
    scores = torch.randn(40, 2).to(dtype).requires_grad_()
    actual = ops.edge_softmax(graph, scores, edge_order=True)
    assert actual.dtype == dtype
    expected = softmax(scores.detach().float(), EDGES[1], num_nodes=8)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=1e-2)
    assert torch.autograd.grad(actual.sum(), scores)[0].dtype == dtype


def test_strided_scores_and_gradients_are_accepted(graph):
    scores = torch.randn(3, 40, dtype=torch.float64).t().requires_grad_()
    actual = ops.edge_softmax(graph, scores, edge_order=True)
    expected = softmax(scores, EDGES[1], num_nodes=8)
    grad = torch.randn(3, 40, dtype=torch.float64).t()
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad(actual, scores, grad)
    torch.testing.assert_close(
        ours, torch.autograd.grad(expected, scores, grad), rtol=1e-10, atol=1e-12
    )
