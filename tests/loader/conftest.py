"""Samplers as users have them after one ``pip install``: without pyg-lib and torch-sparse."""

from collections.abc import Iterator

import pytest
import torch
import torch_geometric.typing

import pyg_accel


@pytest.fixture(autouse=True)
def patched_without_other_samplers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    torch.manual_seed(12345)
    with pyg_accel.patched():
        yield
