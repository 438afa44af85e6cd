"""SpMM against dense matrices."""

import pytest
import torch

from pyg_accel import Graph, ops

ROWS, COLS = 6, 9


@pytest.fixture
def matrix() -> torch.Tensor:
    dense = torch.randn(ROWS, COLS, dtype=torch.float64)
    dense[torch.rand(ROWS, COLS) < 0.6] = 0
    dense[2] = 0
    return dense


def graph_of(matrix: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    csr = matrix.to_sparse_csr()
    graph = Graph.from_csr(csr.crow_indices(), csr.col_indices(), num_cols=COLS)
    return graph, csr.values()


def test_a_weighted_sum_is_a_matrix_product(matrix):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64)
    torch.testing.assert_close(ops.spmm(graph, x, weight), matrix @ x)


def test_gradients_are_those_of_the_matrix_product(matrix):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64, requires_grad=True)
    dense, weight = matrix.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = torch.autograd.grad(ops.spmm(graph, x, weight).sin().sum(), [x, weight])
    right = torch.autograd.grad((dense @ x).sin().sum(), [x, dense])
    torch.testing.assert_close(ours[0], right[0])
    torch.testing.assert_close(ours[1], right[1][matrix != 0])


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "prod"])
def test_other_reductions_skip_what_is_not_stored(matrix, reduce):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64)
    found = ops.spmm(graph, x, weight, reduce=reduce)
    for row in range(ROWS):
        stored = matrix[row] != 0
        terms = matrix[row][stored].unsqueeze(1) * x[stored]
        if not bool(stored.any()):
            expected = torch.full((4,), float(reduce == "prod"), dtype=torch.float64)
        elif reduce in ("max", "min"):
            expected = getattr(terms, reduce)(0).values
        else:
            expected = getattr(terms, reduce)(0)
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize("heads", [1, 3])
def test_weights_of_heads_multiply_their_head_only(matrix, heads):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, heads, 4, dtype=torch.float64)
    per_head = weight.unsqueeze(1) * torch.arange(1, heads + 1)
    expected = torch.stack([(h + 1) * (matrix @ x[:, h]) for h in range(heads)], 1)
    torch.testing.assert_close(ops.spmm(graph, x, per_head), expected)
    torch.testing.assert_close(
        ops.spmm(graph, x, weight), torch.stack([matrix @ x[:, h] for h in range(heads)], 1)
    )


def test_weights_of_features_multiply_their_feature_only(matrix):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64)
    scale = torch.tensor([1.0, 2.0, -1.0, 0.0], dtype=torch.float64)
    found = ops.spmm(graph, x, weight.unsqueeze(1) * scale)
    torch.testing.assert_close(found, (matrix @ x) * scale)


def test_several_reductions_come_in_the_order_asked_for(matrix):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64)
    outs = ops.spmm(graph, x, weight, reduce=["max", "sum", "max"])
    assert isinstance(outs, list)
    torch.testing.assert_close(outs[1], matrix @ x)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], ops.spmm(graph, x, weight, reduce="max"))


def test_edges_listed_twice_count_twice():
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 1], [1, 1, 0]]))
    x = torch.tensor([[1.0], [10.0]])
    assert ops.spmm(graph, x).tolist() == [[10.0], [2.0]]
    assert ops.spmm(graph, x, reduce="mean").tolist() == [[10.0], [1.0]]


def test_features_without_columns_take_weights():
    graph = Graph.from_edge_index(torch.randint(6, (2, 20)), (6, 6))
    weight = torch.randn(20, requires_grad=True)
    out = ops.spmm(graph, torch.empty(6, 0), weight)
    out.sum().backward()
    assert out.shape == (6, 0)
    assert weight.grad is not None and not weight.grad.any()
