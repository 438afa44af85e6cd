"""Importing the package does nothing. Every test asks a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ask(code: str, folder: Path, *flags: str) -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYG_ACCEL_")}
    ran = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=folder, capture_output=True, text=True,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_the_import_loads_nothing_heavy_writes_nothing_and_is_quick(tmp_path):
    code = """
import json, sys, time
start = time.process_time()
import pyg_accel
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""
    actual = ask(code, tmp_path, "-W", "error")
    heavy = {"torch", "torch_geometric", "triton", "xgboost", "numpy", "scipy", "pandas"}
    assert heavy & set(actual["modules"]) == set()
    assert actual["seconds"] < 0.1  # 5 ms on an idle machine
    assert list(tmp_path.iterdir()) == []


def test_behind_pyg_the_import_brings_three_modules_of_ours_alone(tmp_path):
    code = """
import json, sys, time
import torch_geometric
before = set(sys.modules)
start = time.process_time()
import pyg_accel
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""
    actual = ask(code, tmp_path)
    assert actual["modules"] == ["pyg_accel", "pyg_accel.runtime", "pyg_accel.runtime.large_pages"]
    assert actual["seconds"] < 0.03


def test_operators_need_neither_pyg_nor_a_gpu_and_every_public_name_can_be_had(tmp_path):
    code = """
import json, sys
import pyg_accel
pyg_accel.ops.spmm, pyg_accel.Graph, pyg_accel.settings, pyg_accel.use_backend
import torch
found = {"modules": sorted(sys.modules), "cuda": torch.cuda.is_initialized()}
for name in pyg_accel.__all__:
    getattr(pyg_accel, name)
found["unlisted"] = sorted(set(pyg_accel.__all__) - set(dir(pyg_accel)))
print(json.dumps(found))
"""
    actual = ask(code, tmp_path)
    assert {"torch_geometric", "xgboost"} & set(actual["modules"]) == set()
    assert actual["cuda"] is False
    assert actual["unlisted"] == []
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_is_an_attribute_error():
    import pyg_accel

    with pytest.raises(AttributeError, match="module 'pyg_accel' has no attribute 'patches'"):
        pyg_accel.patches  # noqa: B018
