"""What a user waits for before the first epoch is over: compiling kernels and building the graph.

    python -m benchmarks.gpu_first_call [--out FOLDER]

Every row is a process of its own that makes a GPU context, one model and one arxiv-like edge_index,
and then times the first training step and the second one. `cold`: Triton's cache is empty. `warm`:
it holds what the process before compiled. Models start side by side, but their steps take turns.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import cross_entropy

import pyg_accel
from benchmarks import gpu_epochs, gpu_machine, graphs

NAME = "gpu_first_call"
GRAPH = "arxiv-like"
MODELS = ("GraphSAGE", "GCN", "GIN", "GAT", "GATv2", "Transformer")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(first_steps(*options.one)))
        return
    with ThreadPoolExecutor() as pool:
        rows = [row for found in pool.map(processes, options.models) for row in found]
    facts = gpu_machine.facts()
    options.out.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([row | facts for row in rows])
    frame.to_csv(options.out / f"{NAME}.csv", index=False, float_format="%.5g")


def processes(model: str) -> list[dict[str, Any]]:
    """A row a process, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for backend, state in (("stock", ""), ("patched", "cold"), ("patched", "warm")):
            command = [sys.executable, "-m", "benchmarks.gpu_first_call", "--one"]
            answer = subprocess.run(
                [*command, model, backend], env=os.environ | {"TRITON_CACHE_DIR": cache},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            row = {"graph": GRAPH, "model": model, "backend": backend, "kernel_cache": state}
            rows.append(row | json.loads(answer.stdout.splitlines()[-1]))
            print("  ".join(map(str, rows[-1].values())), flush=True)
    return rows


def first_steps(name: str, backend: str) -> dict[str, float]:
    """Seconds of the first and the second training step."""
    rowptr, col = graphs.load(GRAPH, device="cuda")
    edge_index = graphs.edge_list((rowptr, col))
    x = torch.randn(rowptr.numel() - 1, gpu_epochs.FEATURES[GRAPH], device="cuda")
    y = torch.randint(gpu_epochs.CLASSES, (x.size(0),), device="cuda")
    model = gpu_epochs.build(name, x.size(1))
    (x @ x[:128].T).sum().item()  # cuBLAS starts up for everybody
    seconds = []
    turn = Path(tempfile.gettempdir()) / f"{NAME}.lock"
    with turn.open("w") as file, pyg_accel.patched() if backend == "patched" else nullcontext():
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            cross_entropy(model(x, edge_index), y).backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return {"first_step_s": seconds[0], "second_step_s": seconds[1]}


if __name__ == "__main__":
    main()
