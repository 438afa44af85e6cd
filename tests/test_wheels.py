"""What the wheel is tried with, and by."""

import importlib.util
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from pyg_accel.runtime.native import cpu_unavailable_reasons

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "wheels" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_matrix_begins_where_the_requirements_of_the_package_do(check):
    text = (ROOT / "pyproject.toml").read_text()

    def lowest(package: str) -> str:
        actual = re.search(rf'{package}>=([0-9.]+)"', text)
        assert actual is not None
        return actual[1]

    def number(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    def least(versions: tuple[str, ...]) -> str:
        return min((v for v in versions if v != "newest"), key=number)

    assert least(check.PYTHONS) == re.search(r'requires-python = ">=([0-9.]+)"', text)[1]
    assert least(check.TORCHES) == lowest("torch")
    assert least(check.PYGS) == lowest("torch-geometric")
    assert number(check.OLD_TORCH) < number(lowest("torch"))


def test_without_all_one_list_varies_at_a_time(check):
    few = Namespace(python=["a", "b"], torch=["1", "2", "3"], pyg=["x"], all=False)
    assert list(check.cells(few)) == [
        ("a", "1", "x"), ("b", "1", "x"), ("a", "2", "x"), ("a", "3", "x"),
    ]  # fmt: skip
    few.all = True
    assert len(list(check.cells(few))) == 6


def test_the_line_that_is_told_of_a_failure_names_the_error(check):
    traceback = "  File 'a.py'\na.exc.Unsupported: x\nValueError: no\n\nSet A=1 for more\n"
    assert check.last_line(traceback) == "ValueError: no"
    assert check.last_line("WARNING: x\nERROR: no torch\nnotice\n") == "ERROR: no torch"
    assert check.last_line("Killed\n") == "Killed"


@pytest.mark.full
@pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="the CPU library is not built")
def test_the_smoke_suite_of_wheels_passes_here(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYG_ACCEL_")}
    ran = subprocess.run(
        [sys.executable, ROOT / "wheels" / "smoke.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for part in ("library", "backends", "patch", "compile", "MaxK", "optimize"):
        assert re.search(rf"^{part}: +\S", ran.stdout, re.MULTILINE), ran.stdout
