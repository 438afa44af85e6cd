"""Large memory pages: asked for at import, left alone where somebody decided, explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_accel.runtime import large_pages

ROOT = Path(__file__).parents[2]


def ask(code: str, **environment: str) -> object:
    kept = {k: v for k, v in os.environ.items() if k != large_pages.VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"], capture_output=True, text=True, timeout=120,
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def system(monkeypatch, tmp_path, choice: str) -> None:
    file = tmp_path / "enabled"
    file.write_text("always madvise never".replace(choice, f"[{choice}]"))
    monkeypatch.setattr(large_pages, "_SYSTEM", file)


def test_the_import_sets_the_variable_unless_it_is_set():
    code = f"import os, pyg_accel; print(json.dumps(os.environ['{large_pages.VARIABLE}']))"
    assert ask(code) == "1"
    assert ask(code, **{large_pages.VARIABLE: "0"}) == "0"


REASONS = """
from pyg_accel.runtime import large_pages
class Madvise:
    def exists(self): return True
    def read_text(self): return "always [madvise] never"
large_pages._SYSTEM = Madvise()
print(json.dumps(large_pages.small_pages_reasons()))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has transparent huge pages")
@pytest.mark.parametrize("first", ["torch, pyg_accel", "pyg_accel"])
def test_imported_first_large_tensors_lie_on_large_pages(first):
    assert ask(f"import {first}, torch_geometric{REASONS}") == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has transparent huge pages")
def test_imported_too_late_the_reason_says_what_to_do():
    (reason,) = ask("import torch; torch.zeros(9); import pyg_accel" + REASONS)
    assert "import pyg_accel before torch_geometric" in reason


def test_a_variable_of_the_users_own_is_the_reason(monkeypatch, tmp_path):
    system(monkeypatch, tmp_path, "madvise")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv(large_pages.VARIABLE, "0")
    assert large_pages.small_pages_reasons() == ["THP_MEM_ALLOC_ENABLE is '0'"]


def test_the_system_may_give_them_always_or_never(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    system(monkeypatch, tmp_path, "always")
    assert large_pages.small_pages_reasons() == []
    system(monkeypatch, tmp_path, "never")
    (reason,) = large_pages.small_pages_reasons()
    assert "never gives large pages" in reason


def test_elsewhere_there_is_nothing_to_say(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert large_pages.small_pages_reasons() == []
