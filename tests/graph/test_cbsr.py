"""The CBSR format."""

import copy

import pytest
import torch

from pyg_accel import CBSR
from pyg_accel.graph.cbsr import index_dtype


def stored(values: list[list[float]], columns: list[list[int]], width: int) -> CBSR:
    return CBSR(torch.tensor(values), torch.tensor(columns).to(index_dtype(width)), width)


def test_zeros_are_written_where_nothing_is_stored():
    cbsr = stored([[2.0, -1.0], [0.0, 0.0], [5.0, 0.0]], [[1, 3], [0, 1], [0, 1]], 4)
    assert (cbsr.k, cbsr.width) == (2, 4)
    assert cbsr.dense().tolist() == [[0, 2, 0, -1], [0, 0, 0, 0], [5, 0, 0, 0]]


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.uint8), (256, torch.uint8), (257, torch.uint16), (65_536, torch.uint16)],
)
def test_indices_are_as_narrow_as_the_width_allows(width, dtype):
    assert index_dtype(width) == dtype
    dense = torch.zeros(2, width)
    dense[:, -1] = 1.0
    assert torch.equal(stored([[1.0], [1.0]], [[width - 1]] * 2, width).dense(), dense)


def test_the_widest_matrix_has_65536_columns():
    with pytest.raises(ValueError, match="65536 columns"):
        index_dtype(65_537)


def test_gradients_go_to_what_is_stored():
    cbsr = stored([[2.0, 1.0], [3.0, 0.0]], [[1, 2], [0, 2]], 3)
    values = cbsr.values.requires_grad_()
    (cbsr.dense() * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad.tolist() == [[1.0, 2.0], [3.0, 5.0]]


def test_matrices_without_rows_are_matrices():
    empty = torch.empty(0, 1)
    assert CBSR(empty, empty.to(torch.uint8), 5).dense().shape == (0, 5)


def test_copies_are_independent():
    cbsr = stored([[1.0], [1.0], [1.0]], [[0], [1], [2]], 3)
    other = copy.deepcopy(cbsr)
    other.values.zero_()
    assert isinstance(other, CBSR)
    assert torch.equal(cbsr.dense(), torch.eye(3))
