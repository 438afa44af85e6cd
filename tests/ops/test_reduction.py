"""The short way of gspmm in eager mode, and what is known of the graphs it runs on."""

import copy
import io

import pytest
import torch

from pyg_accel import Graph, ops
from pyg_accel.facts import facts_of, rounded

N, E = 40, 300


@pytest.fixture
def graph():
    return Graph.from_edge_index(torch.randint(N, (2, E)), (N, N))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_reduction_is_one_node_of_autograd_from_features_to_features(graph, reduce):
    x = torch.randn(N, 8, requires_grad=True)
    out = ops.spmm(graph, x, reduce=reduce)
    assert type(out.grad_fn).__name__ == "_ReduceBackward"
    assert out.grad_fn.next_functions[0][0].variable is x


def test_results_may_be_changed_in_place(graph):
    x = torch.randn(N, 8, dtype=torch.float64, requires_grad=True)
    out = ops.spmm(graph, x)
    out += 1
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    matrix = torch.zeros(N, N, dtype=torch.float64)
    rows = torch.repeat_interleave(graph.degree)
    matrix.index_put_((rows, graph.col.long()), torch.ones(E, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(grad, matrix.T @ (2 * (matrix @ x.detach() + 1)))


@pytest.mark.parametrize("formula", ["u0", "mul(u0,e1)", "relu(add(u0,v1))"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_can_be_differentiated_and_batched(graph, formula, reduce):
    rows = {"u": N, "v": N, "e": E}
    sides = {"u0": "u", "mul(u0,e1)": "ue", "relu(add(u0,v1))": "uv"}[formula]
    operands = [torch.randn(rows[s], 3, dtype=torch.float64, requires_grad=True) for s in sides]

    def run(*given):
        return ops.gspmm(graph, formula, list(given), reduce=reduce)

    assert torch.autograd.gradcheck(run, operands, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, operands)


def test_a_gradient_that_nobody_wants_is_none(graph):
    x = torch.randn(N, 4, requires_grad=True)
    together = ops.spmm(graph, x, reduce=["sum", "max"])
    (grad,) = torch.autograd.grad(together[0].sum(), x)
    (alone,) = torch.autograd.grad(ops.spmm(graph, x).sum(), x)
    torch.testing.assert_close(grad, alone)


@pytest.mark.parametrize("size", [*range(20), 1000, 1025, 2**31 + 1])
def test_sizes_are_rounded_up_to_three_bits(size):
    found = rounded(size)
    assert size <= found <= size * 1.25
    assert rounded(found) == found
    assert found == 0 or (found // (found & -found)) < 8


def test_facts_go_with_the_arrays_they_are_of(graph):
    csr = graph.csr()
    facts = facts_of(csr.rowptr, csr.col, csr.num_cols)
    assert facts_of(csr.rowptr, csr.col, csr.num_cols) is facts
    assert facts_of(csr.rowptr.clone(), csr.col, csr.num_cols) is not facts
    facts = facts_of(csr.rowptr, csr.col, csr.num_cols)
    csr.col.add_(0)
    assert facts_of(csr.rowptr, csr.col, csr.num_cols) is not facts


def test_arrays_with_facts_are_copied_and_saved(graph):
    csr = graph.csr()
    facts = facts_of(csr.rowptr, csr.col, csr.num_cols)
    twin = copy.deepcopy(csr.col)
    assert facts_of(csr.rowptr, twin, csr.num_cols) is not facts
    file = io.BytesIO()
    torch.save(csr.col, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False), csr.col)


def test_a_mean_over_more_edges_than_half_precision_can_count_has_a_gradient():
    edges = torch.stack([torch.arange(70_000) % 7, torch.zeros(70_000, dtype=torch.long)])
    graph = Graph.from_edge_index(edges, (7, 1))
    x = torch.ones(7, 2, dtype=torch.float16, requires_grad=True)
    out = ops.spmm(graph, x, reduce="mean")
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.float(), torch.full((7, 2), 1 / 7), rtol=5e-3, atol=0)
