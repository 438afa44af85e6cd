"""The examples, started by torchrun as a user starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def started(*command: str, ranks: int = 0) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *(launcher if ranks else []), *command],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_example_on_two_ranks_learns_like_one_process():
    alone = started("examples/distributed.py")
    both = started("examples/distributed.py", ranks=2)
    accuracies = [float(re.search(r"accuracy ([\d.]+)", text)[1]) for text in (alone, both)]
    assert min(accuracies) > 0.8 and abs(accuracies[0] - accuracies[1]) < 0.05
    assert re.search(r"^halo +\d+", both, re.M)


@pytest.mark.full
def test_the_example_with_a_folder_goes_on_with_other_ranks(tmp_path):
    folder = str(tmp_path / "graph")
    started("examples/distributed_folder.py", "save", folder)
    first = started("examples/distributed_folder.py", "train", folder, ranks=2)
    assert "epochs 0 to 20" in first
    again = started("examples/distributed_folder.py", "train", folder, ranks=3)
    assert "epochs 20 to 20" in again
    actual = [float(re.search(r"accuracy ([\d.]+)", text)[1]) for text in (first, again)]
    assert actual[0] == actual[1] > 0.8


@pytest.mark.full
def test_the_example_with_sharded_parameters(tmp_path):
    assert "on 2 ranks" in started("examples/distributed_fsdp.py", ranks=2)


@pytest.mark.full
def test_the_benchmark_runs(tmp_path):
    options = ["--quick", "--worlds", "1", "2", "--models", "GCN", "--minutes", "2"]
    out = started("-m", "benchmarks.distributed", *options)
    assert "halo, torch CSR, DDP" in out and "written" in out
