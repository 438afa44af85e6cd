"""What a user waits for before the first epoch is over: compiling kernels and building the graph.

    python -m benchmarks.epochs.first_call [--models NAME ...] [--out FOLDER]

Every row is a process of its own that makes a GPU context, one model and one arxiv-like edge_index,
and then times the first training step and the second one. `cold`: Triton's cache is empty. `warm`:
it holds what the process before compiled. Models start side by side, but their steps take turns.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.epochs import gpu
from benchmarks.tools import graphs, results, timing
from benchmarks.tools.fresh import in_fresh_process
from benchmarks.tools.variants import patched

NAME, GRAPH = "epochs/gpu_first_call", "arxiv-like"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cuda",), models=gpu.BASIC | gpu.ATTENTION)
    options = parser.parse_args(arguments)
    rows = results.Rows(NAME, options, "cuda")
    with ThreadPoolExecutor() as pool:
        for found in pool.map(processes, options.models[: 1 if options.quick else None]):
            rows.add(found, show=True, graph=GRAPH)
    rows.done()


def processes(model: str) -> list[dict[str, Any]]:
    """A row a process, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for backend, state in (("stock", ""), ("patched", "cold"), ("patched", "warm")):
            row = {"model": model, "backend": backend, "kernel_cache": state}
            rows.append(row | in_fresh_process(first_steps, model, backend, cache))
    return rows


def first_steps(name: str, backend: str, cache: str) -> dict[str, float]:
    """Seconds of the first and the second training step, in a process that has run nothing."""
    os.environ["TRITON_CACHE_DIR"] = cache
    csr = graphs.load(GRAPH, device="cuda")
    edge_index = graphs.edge_list(csr)
    x = torch.randn(csr[0].numel() - 1, gpu.FEATURES[GRAPH], device="cuda")
    y = torch.randint(gpu.CLASSES, (x.size(0),), device="cuda")
    model = gpu.build(name, x.size(1)).cuda()
    (x @ x[:128].T).sum().item()  # cuBLAS starts up for everybody
    turn = Path(tempfile.gettempdir()) / "gpu_first_call.lock"
    with turn.open("w") as file, patched(backend == "patched"):
        fcntl.flock(file, fcntl.LOCK_EX)
        step = lambda: cross_entropy(model(x, edge_index), y).backward()  # noqa: E731
        first, second = (timing.seconds_of(step, "cuda") for _ in range(2))
    return {"first_step_s": first, "second_step_s": second}


if __name__ == "__main__":
    main()
