"""A small graph and its features, for tests that ask for no graph of their own."""

import pytest
import torch
from torch import Tensor

N = 20


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, 6)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, N, (2, 90))
