"""Whole training epochs on the CPU, stock PyG against `pyg_accel.patched()`: time and memory.

    python -m benchmarks.epochs.cpu [--quick] [--models GCN ...]

An epoch is forward, backward and Adam on the whole graph; 3 layers, 128 hidden. Every run has a
process of its own and the same seed; the backends take turns for a few rounds, a row of the CSV
each. `stock` is PyG and torch as they come; `large pages` is stock PyG with the one thing that
importing pyg_accel does, torch's variable for large memory pages; `patched` is pyg_accel. The first
forward pass is timed apart: under `patched()` it builds the graph, which a training pays once. Real
graphs join in where PYG_ACCEL_DATA names their folder (`tools/datasets.py`).
"""

import contextlib
import itertools
import os
from collections.abc import Sequence

import torch
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

from benchmarks.tools import frames, plot, results, timing
from benchmarks.tools.datasets import REAL, load_task
from benchmarks.tools.fresh import PeakMemory, in_fresh_process, small_pages
from benchmarks.tools.timing import seconds_of
from benchmarks.tools.variants import epoch_of, patched

NAME = "epochs/cpu_epochs"
HIDDEN, LAYERS = 128, 3
MODELS = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GIN": GIN, "GAT": GAT}
BACKENDS = ("stock", "large pages", "patched")
ROUNDS, MIN_EPOCHS, MAX_EPOCHS = 2, 2, 30
BUDGET = 3.0  # seconds of epochs in one run, beyond the minimum


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, quick="a small graph only", models=MODELS)
    options = parser.parse_args(arguments)
    rows, root = results.Rows(NAME, options), os.environ.get("PYG_ACCEL_DATA")
    names = datasets(root, quick=options.quick)
    rounds = range(1 if options.quick else ROUNDS)
    plan = itertools.product(names, options.models, rounds, BACKENDS)
    for dataset, model, _, backend in results.each(plan, "run"):
        with small_pages() if backend == "stock" else contextlib.nullcontext():
            run = in_fresh_process(measure, dataset, root, model, accelerate=backend == "patched")
        rows.add([run], dataset=dataset, model=model, backend=backend)
    print(frames.epochs(rows.done())[["epoch_ms", "peak_mib"]].round(1).to_string())
    plot.beside(rows.path)


def datasets(root: str | None, *, quick: bool) -> list[str]:
    """The synthetic graph, and every real one whose files are there."""
    names = ["arxiv-like@0.1" if quick else "arxiv-like"]
    if root is None:
        print("real graphs are left out: PYG_ACCEL_DATA is not set")
        return names
    for name in ("Cora",) if quick else REAL:
        try:
            load_task(name, root)
        except FileNotFoundError as missing:
            print(f"{name} is left out: {missing}")
        else:
            names.append(name)
    return names


def measure(dataset: str, root: str | None, name: str, *, accelerate: bool) -> dict[str, float]:
    """The figures of one training, as columns of the CSV; times in ms, memory in MiB."""
    data = load_task(dataset, root)
    num_classes = int(data.y.max()) + 1
    torch.manual_seed(0)
    extra = {"heads": 4} if name == "GAT" else {}
    model = MODELS[name](data.num_features, HIDDEN, LAYERS, num_classes, **extra)
    epoch = epoch_of(model, (data.x, data.edge_index), data.y, data.train_mask)
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # starts the threads for both alike

    def forward() -> None:
        with torch.no_grad():
            model(data.x, data.edge_index)

    with PeakMemory() as memory, patched(accelerate):
        first_forward = seconds_of(forward)
        forwards = timing.quantiles([seconds_of(forward) for _ in range(3)])
        first_epoch = seconds_of(epoch)
        times: list[float] = []
        while len(times) < MIN_EPOCHS or (len(times) < MAX_EPOCHS and sum(times) < BUDGET):
            times.append(seconds_of(epoch))
    return {
        "N": data.num_nodes, "E": data.num_edges, "features": data.num_features, "hidden": HIDDEN,
        "classes": num_classes, "first_forward_ms": first_forward * 1e3,
        "forward_ms": forwards.median, "first_epoch_ms": first_epoch * 1e3,
        **timing.quantiles(times).columns("epoch_ms", "epoch_ms_"), "epochs": len(times),
        "peak_mib": memory.mib,
    }  # fmt: skip


if __name__ == "__main__":
    main()
