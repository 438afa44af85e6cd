"""What the tests of samplers share."""

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_geometric.typing
from torch.utils._pytree import tree_map_only
from torch_geometric.data import HeteroData

import pyg_accel
from pyg_accel.pyg_lib import neighbors
from pyg_accel.runtime.native import cuda_library

CUDA = torch.cuda.is_available()


@pytest.fixture
def typed() -> HeteroData:
    """Return a graph of two types of nodes."""
    data = HeteroData()
    data["u"].x, data["v"].x = torch.randn(50, 8), torch.randn(80, 8)
    data["u"].time, data["v"].time = torch.arange(50), torch.arange(80)
    data["u", "buys", "v"].edge_index = torch.stack(
        [torch.randint(50, (300,)), torch.randint(80, (300,))]
    )
    data["v", "sold", "u"].edge_index = data["u", "buys", "v"].edge_index.flip(0)
    return data


@pytest.fixture
def patched_without_other_samplers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch patch() on where PyG has been installed by itself."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", False)
    torch.manual_seed(12345)
    with pyg_accel.patched():
        yield


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu,
                                    pytest.mark.skipif(not CUDA, reason="there is no GPU")]),
        pytest.param("cuda on cpu", marks=[pytest.mark.skipif(CUDA, reason="there is a GPU"),
            pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]),
    ]
)  # fmt: skip
def each_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sample CPU tensors with the CPU library, on a GPU, or with its kernels run by a processor."""

    def on_gpu(*args: Any) -> Any:
        there = tree_map_only(torch.Tensor, lambda t: t.cuda(), args)
        return tree_map_only(
            torch.Tensor, lambda t: t.cpu(), cuda_library().neighbor_sample(*there)
        )

    if request.param == "cuda":
        library: Any = SimpleNamespace(neighbor_sample=on_gpu)
        monkeypatch.setattr(neighbors, "cpu_library", lambda: library)
    if request.param == "cuda on cpu":
        emulated = request.getfixturevalue("cuda_on_cpu")
        monkeypatch.setattr(neighbors, "cpu_library", lambda: emulated)
    return str(request.param)
