"""Tests of kernels run on graphs of which everything is known."""

import fcntl
import os
import subprocess
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from pyg_accel import facts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def graphs_stay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, let a graph's first kernel wait for its longest row, as later ones would.

    Long rows are not cut before, and a test runs too few kernels on a graph to get there.
    """
    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.setattr(facts, "_USES", 0)
        monkeypatch.setattr(facts, "_USES_OF_LARGE", 0)


@pytest.fixture(scope="session")
def cuda_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The operators of the CUDA library for CPU tensors, compiled once for all processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folder is in that of the run
        folder = folder.parent
    built = folder / "cuda_on_cpu.so"
    with open(folder / "cuda_on_cpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compile_for_cpu(built)
    torch.ops.load_library(built)
    return torch.ops.pyg_accel_cuda


def compile_for_cpu(built: Path) -> None:
    """Compile the kernels of MaxK and those that run plans."""
    names = ("cbsr_*.c*", "row_spmm*.c*", "maxk.cu", "take.cu")
    sources = [path for name in names for path in glob(f"{ROOT}/csrc/cuda/{name}")]
    sources = [path for path in sources if not path.endswith(".cuh")]
    sources.append(f"{ROOT}/tests/cuda_on_cpu/fibers.cpp")
    folders = [f"-I{path}" for path in (f"{ROOT}/tests/cuda_on_cpu", f"{ROOT}/csrc",
                                        *include_paths())]  # fmt: skip
    subprocess.check_call([
        "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-x", "c++", *folders, *sources,
        "-DTORCH_TARGET_VERSION=0x020a000000000000", "-o", str(built),
        *(f"-L{path}" for path in library_paths()), "-ltorch_cpu",
    ])  # fmt: skip
