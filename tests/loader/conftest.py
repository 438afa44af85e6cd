"""What the tests of samplers share."""

from collections.abc import Iterator

import pytest
import torch
import torch_geometric.typing

import pyg_accel


@pytest.fixture
def patched_without_other_samplers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch patch() on where PyG has been installed by itself."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    torch.manual_seed(12345)
    with pyg_accel.patched():
        yield
