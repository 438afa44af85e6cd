"""Whole training epochs on the CPU, stock PyG against `pyg_accel.patched()`: time and memory.

    python -m benchmarks.cpu_epochs [--quick]

An epoch is forward, backward and Adam on the whole graph; 3 layers, 128 hidden. Every run has a
process of its own and the same seed; the backends take turns for a few rounds, a row of the CSV
each. `stock` is PyG and torch as they come; `large pages` is stock PyG with the one thing that
importing pyg_accel does, torch's variable for large memory pages; `patched` is pyg_accel. The first
forward pass is timed apart: under `patched()` it builds the graph, which a training pays once. Real
graphs join in where PYG_ACCEL_DATA names their folder (`datasets.py`).
"""

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE
from tqdm import tqdm

from benchmarks import machine, results
from benchmarks.datasets import REAL, load_task
from benchmarks.fresh import PeakMemory, in_fresh_process, small_pages

NAME = "cpu_epochs"
HIDDEN, LAYERS = 128, 3
MODELS = {
    "GraphSAGE": (GraphSAGE, {}),
    "GCN": (GCN, {}),
    "GIN": (GIN, {}),
    "GAT": (GAT, {"heads": 4}),
}
BACKENDS = ("stock", "large pages", "patched")
ROUNDS, MIN_EPOCHS, MAX_EPOCHS = 2, 2, 30
BUDGET = 3.0  # seconds of epochs in one run, beyond the minimum


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small graph only")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(arguments)
    console = Console()
    facts, rows = machine.facts(), []
    root = os.environ.get("PYG_ACCEL_DATA")
    names = datasets(root, quick=options.quick, tell=console.print)
    rounds = range(1 if options.quick else ROUNDS)
    plan = list(itertools.product(names, options.models, rounds, BACKENDS))
    for dataset, model, _, backend in (progress := tqdm(plan, unit="run")):
        progress.set_postfix_str(f"{model} on {dataset}, {backend}")
        with small_pages() if backend == "stock" else contextlib.nullcontext():
            run = in_fresh_process(measure, dataset, root, model, accelerate=backend == "patched")
        rows.append({"dataset": dataset, "model": model, "backend": backend, **run, **facts})
    console.print(summary(results.write(rows, NAME, quick=options.quick)))


def datasets(root: str | None, *, quick: bool, tell: Callable[[str], None]) -> list[str]:
    """The synthetic graph, and every real one whose files are there."""
    names = ["arxiv-like@0.1" if quick else "arxiv-like"]
    if root is None:
        tell("real graphs are left out: PYG_ACCEL_DATA is not set")
        return names
    for name in ("Cora",) if quick else REAL:
        try:
            load_task(name, root)
        except FileNotFoundError as missing:
            tell(f"{name} is left out: {missing}")
        else:
            names.append(name)
    return names


def measure(dataset: str, root: str | None, name: str, *, accelerate: bool) -> dict[str, float]:
    """The figures of one training, as columns of the CSV; times in ms, memory in MiB."""
    import pyg_accel

    data = load_task(dataset, root)
    num_classes = int(data.y.max()) + 1
    torch.manual_seed(0)
    kind, extra = MODELS[name]
    model = kind(data.num_features, HIDDEN, LAYERS, num_classes, **extra)
    optimizer = torch.optim.Adam(model.parameters())
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # starts the threads for both alike

    def forward() -> torch.Tensor:
        return model(data.x, data.edge_index)

    def epoch() -> None:
        optimizer.zero_grad()
        cross_entropy(forward()[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    with PeakMemory() as memory, pyg_accel.patched() if accelerate else contextlib.nullcontext():
        with torch.no_grad():
            first_forward = seconds(forward)
            forwards = machine.quantiles([seconds(forward) for _ in range(3)])
        first_epoch = seconds(epoch)
        times: list[float] = []
        while len(times) < MIN_EPOCHS or (len(times) < MAX_EPOCHS and sum(times) < BUDGET):
            times.append(seconds(epoch))
    epochs = machine.quantiles(times)
    return {
        "N": data.num_nodes,
        "E": data.num_edges,
        "features": data.num_features,
        "hidden": HIDDEN,
        "classes": num_classes,
        "first_forward_ms": first_forward * 1e3,
        "forward_ms": forwards.median,
        "first_epoch_ms": first_epoch * 1e3,
        "epoch_ms": epochs.median,
        "epoch_ms_p20": epochs.p20,
        "epoch_ms_p80": epochs.p80,
        "epochs": len(times),
        "peak_mib": memory.mib,
    }


def seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def side_by_side(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a data set and model, with the columns (figure, backend): medians over the rounds."""
    figures = ["epoch_ms", "peak_mib", "first_forward_ms", "forward_ms"]
    order = frame[["dataset", "model"]].drop_duplicates()
    index = ["dataset", "model"]
    wide = frame.pivot_table(figures, index=index, columns="backend", aggfunc="median")
    return wide.loc[list(order.itertuples(index=False, name=None))]


def summary(frame: pd.DataFrame) -> Table:
    shape = f"{LAYERS} layers, {HIDDEN} hidden"
    table = Table(title=f"Epochs on the CPU, {shape}: stock | large pages | patched")
    for column in ("data set", "model"):
        table.add_column(column)
    for column in ("epoch ms", "ratio", "peak MiB", "ratio", "forward ms | first"):
        table.add_column(column, justify="right")
    for (dataset, model), row in side_by_side(frame).iterrows():
        times, peaks = row["epoch_ms"], row["peak_mib"]
        time_ratio = times["stock"] / times["patched"]
        memory_ratio = peaks["stock"] / peaks["patched"]
        table.add_row(
            dataset,
            model,
            " | ".join(f"{times[backend]:.4g}" for backend in BACKENDS),
            f"{time_ratio:.2f}",
            " | ".join(f"{peaks[backend]:.0f}" for backend in BACKENDS),
            f"{memory_ratio:.2f}",
            f"{row['forward_ms', 'stock']:.4g} | {row['first_forward_ms', 'patched']:.4g}",
            style="red" if time_ratio < 1 else None,
        )
    return table


if __name__ == "__main__":
    main()
