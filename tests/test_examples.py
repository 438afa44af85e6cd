"""The examples run where they were copied to, with nothing but torch, PyG and pyg_accel."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIBRARIES = {"pyg_accel", "torch", "torch_geometric", *sys.stdlib_module_names}
TOOLS = {"calibrate_sampling": {"matplotlib", "tqdm"}}  # a plot, and a bar while it measures


def started(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of an example in a folder that has nothing else."""
    copy = folder / name
    copy.write_text((ROOT / "examples" / name).read_text())
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("WORLD_SIZE", None)
    command = [sys.executable, name, *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_needs_no_other_file_and_no_other_library(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    assert imported <= LIBRARIES | TOOLS.get(path.stem, set())


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """Run a copy of an example in this process, which it ends; returns its status and messages."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> tuple[object, str]:
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(name, run_name="__main__")
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("distributed_folder.py", ["train", "graph"]), ("distributed_fsdp.py", [])],
)
def test_an_example_for_several_processes_names_the_command_that_starts_it(name, arguments, ended):
    status, messages = ended(name, *arguments)
    assert status == 2
    assert f"torchrun --nproc-per-node 4 {name}" in messages


def test_the_example_with_a_folder_asks_for_its_arguments(ended):
    status, messages = ended("distributed_folder.py")
    assert status == 2 and "usage: distributed_folder.py" in messages


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [
        ("quickstart.py", ["--nodes", "2000", "--edges", "40000", "--models", "GCN"], "GCNConv"),
        ("maxk_sage.py", ["--nodes", "400", "--epochs", "2", "--seeds", "1"], "MaxK 32"),
        ("neighbor_loader.py", ["2000", "1"], "neighbors [15, 10]"),
        ("relational.py", ["400", "1"], "neighbors [16, 16]"),
        ("molecules.py", ["300", "1"], "graphs"),
        ("patch_any_model.py", [], "14 of 14 forward calls accelerated"),
    ],
    ids=[
        "quickstart",
        "maxk_sage",
        "neighbor_loader",
        "relational",
        "molecules",
        "patch_any_model",
    ],
)
def test_an_example_runs_out_of_the_checkout(name, arguments, printed, tmp_path):
    done = started(name, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
