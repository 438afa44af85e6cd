"""Train the same models twice, with stock PyG and under `pyg_accel.patched()`, and compare.

    python examples/quickstart.py
    python examples/quickstart.py --nodes 100000 --edges 3000000 --models GCN
    python examples/quickstart.py --dataset Cora --root DIR --models GCN GIN --epochs 100

Each training runs in a process of its own and from the same seed. The model code does not change:
see `train()`, where one `with` line is all the difference.
"""

import argparse
import contextlib
import io
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN, GIN, GraphSAGE
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is never installed
from benchmarks.datasets import load_task
from benchmarks.fresh import PeakMemory, fresh_process, small_pages, wait_for_imports
from benchmarks.graphs import community_task

# GIN adds up neighbours without a mean, so it needs normalisation between its layers; statistics of
# the batch, because running ones lag behind in a training as short as this.
BATCH_NORM = {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}}
ROUNDING = (
    "Parameters differ because floats are added up in another order: about 1e-7 in each sum, "
    "which Adam turns into some 1e-4, and more where a gradient is close to zero.\n"
)
MODELS = {"GraphSAGE": (GraphSAGE, {}), "GCN": (GCN, {}), "GIN": (GIN, BATCH_NORM)}


class Run(NamedTuple):
    """What came out of one training."""

    epoch_ms: list[float]
    peak_mib: float
    accuracy: float
    parameters: np.ndarray
    report: str


def main() -> None:
    options = parse_options()
    console = Console()
    runs = {}
    for name in options.models:
        with small_pages():
            one = fresh_process()
        other = fresh_process()
        wait_for_imports(one, other)  # side by side; trainings follow one another
        with one:
            stock = one.submit(train, name, options, accelerate=False).result()
        with other:
            runs[name] = (stock, other.submit(train, name, options, accelerate=True).result())
    console.print(comparison(runs, options))
    console.print(ROUNDING)
    for name, (_, patched) in runs.items():
        console.rule(f"pyg_accel.report() after training {name}")
        console.print(patched.report, markup=False, highlight=False)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    datasets = ["community", "Cora", "CiteSeer", "facebook-pages"]
    parser.add_argument("--dataset", choices=datasets, default="community")
    parser.add_argument("--root", help="folder with the files of a real data set")
    parser.add_argument("--nodes", type=int, default=20_000, help="of the community graph")
    parser.add_argument("--edges", type=int, default=400_000, help="of the community graph")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    if options.dataset != "community" and options.root is None:
        parser.error(f"--dataset {options.dataset} needs --root, the folder with its files")
    return options


def train(name: str, options: argparse.Namespace, *, accelerate: bool) -> Run:
    """Train one model from seed 0 and test it."""
    if options.dataset == "community":
        data = community_task(options.nodes, options.edges)
    else:
        data = load_task(options.dataset, options.root)
    torch.manual_seed(0)
    kind, extra = MODELS[name]
    model = kind(data.num_features, options.hidden, 3, int(data.y.max()) + 1, **extra)
    # The larger eps keeps Adam from blowing up gradients that are zero but for rounding, such as
    # those of a bias in front of a batch norm.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    progress = tqdm(range(options.epochs), f"{name}, {'patched' if accelerate else 'stock'}")
    epoch_ms = []
    with PeakMemory() as memory, pyg_accel.patched() if accelerate else contextlib.nullcontext():
        for _ in progress:
            start = time.perf_counter()
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            loss = cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            epoch_ms.append((time.perf_counter() - start) * 1e3)
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        accuracy = test(model, data)
    with contextlib.redirect_stdout(io.StringIO()):  # it also prints; the parent does that
        report = str(pyg_accel.report()) if accelerate else ""
    parameters = parameters_to_vector(model.parameters()).detach().numpy()
    return Run(epoch_ms, memory.mib, accuracy, parameters, report)


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """Share of the test nodes that are classified correctly."""
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=1)
    return float((predicted == data.y)[data.test_mask].float().mean())


def comparison(runs: dict[str, tuple[Run, Run]], options: argparse.Namespace) -> Table:
    """Two rows a model: stock, then patched with its ratio and parameter difference."""
    layers = f"3 layers, hidden {options.hidden}, {options.epochs} epochs"
    graph = options.dataset
    if graph == "community":
        graph += f", {options.nodes:,} nodes, {options.edges:,} edges"
    caption = "epoch: median; first: builds the graph; differ by: largest parameter"
    table = Table(
        title=f"{graph}: {layers}",
        caption=caption,
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("model")
    table.add_column("PyG")
    for column in ("epoch ms", "ratio", "first", "peak MiB", "accuracy", "differ by"):
        table.add_column(column, justify="right")
    for name, (stock, patched) in runs.items():
        ratio = np.median(stock.epoch_ms) / np.median(patched.epoch_ms)
        difference = np.abs(stock.parameters - patched.parameters).max()
        shown = f"[bold {'green' if ratio > 1 else 'red'}]{ratio:.2f}x"
        table.add_row(name, "stock", *measured(stock))
        table.add_row("", "patched", *measured(patched, shown), f"{difference:.1e}")
        table.add_section()
    return table


def measured(run: Run, ratio: str = "") -> tuple[str, ...]:
    epoch, first = np.median(run.epoch_ms), run.epoch_ms[0]
    return f"{epoch:.1f}", ratio, f"{first:.0f}", f"{run.peak_mib:.0f}", f"{run.accuracy:.3f}"


if __name__ == "__main__":
    main()
