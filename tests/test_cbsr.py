"""The CBSR format."""

import copy

import pytest
import torch

from pyg_accel import CBSR
from pyg_accel.cbsr import index_dtype


def test_a_matrix_survives_the_round_trip():
    dense = torch.tensor([[0.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    cbsr = CBSR.from_dense(dense)
    assert (cbsr.k, cbsr.width) == (2, 4)
    assert cbsr.indices.dtype == torch.uint8
    assert cbsr.indices.tolist() == [[1, 3], [0, 1], [0, 1]]
    assert torch.equal(cbsr.dense(), dense)
    assert torch.equal(CBSR.from_dense(dense, 3).dense(), dense)


@pytest.mark.parametrize(
    ("width", "dtype"), [(1, torch.uint8), (256, torch.uint8), (257, torch.uint16)]
)
def test_indices_are_as_narrow_as_the_width_allows(width, dtype):
    dense = torch.zeros(2, width)
    dense[:, -1] = 1.0
    cbsr = CBSR.from_dense(dense)
    assert cbsr.indices.dtype == dtype == index_dtype(width)
    assert cbsr.indices.long().tolist() == [[width - 1]] * 2
    assert torch.equal(cbsr.dense(), dense)


def test_the_widest_matrix_has_65536_columns():
    dense = torch.zeros(1, 65_536)
    dense[0, -1] = 1.0
    assert CBSR.from_dense(dense).indices.long().tolist() == [[65_535]]
    with pytest.raises(ValueError, match="65536 columns"):
        CBSR.from_dense(torch.zeros(1, 65_537))


def test_gradients_go_to_what_is_stored():
    dense = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]], requires_grad=True)
    (CBSR.from_dense(dense).dense() * torch.arange(6.0).view(2, 3)).sum().backward()
    assert dense.grad.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 0.0]]


def test_matrices_without_rows_are_matrices():
    cbsr = CBSR.from_dense(torch.zeros(0, 5))
    assert cbsr.values.shape == (0, 1)
    assert cbsr.dense().shape == (0, 5)


def test_copies_are_independent():
    cbsr = CBSR.from_dense(torch.eye(3))
    other = copy.deepcopy(cbsr)
    other.values.zero_()
    assert isinstance(other, CBSR)
    assert torch.equal(cbsr.dense(), torch.eye(3))


@pytest.mark.parametrize(
    ("dense", "k", "message"),
    [
        (torch.eye(3)[0], None, r"\[N, F\]"),
        (torch.eye(3).int(), None, "floating-point"),
        (torch.ones(2, 3), 2, "ops.maxk keeps"),
        (torch.ones(2, 3), 4, "between 3"),
        (torch.zeros(2, 0), None, "at least one column"),
    ],
)
def test_what_does_not_fit_is_refused(dense, k, message):
    with pytest.raises(ValueError, match=message):
        CBSR.from_dense(dense, k)
