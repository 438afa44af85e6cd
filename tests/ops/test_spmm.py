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
    actual = ops.spmm(graph, x, weight.unsqueeze(1) * scale)
    torch.testing.assert_close(actual, (matrix @ x) * scale)


def test_several_reductions_come_in_the_order_asked_for(matrix):
    graph, weight = graph_of(matrix)
    x = torch.randn(COLS, 4, dtype=torch.float64)
    outs = ops.spmm(graph, x, weight, reduce=["max", "sum", "max"])
    assert isinstance(outs, list)
    torch.testing.assert_close(outs[1], matrix @ x)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], ops.spmm(graph, x, weight, reduce="max"))
