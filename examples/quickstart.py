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
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils import parameters_to_vector
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

# GIN adds up neighbours without a mean, so it needs normalisation between its layers; statistics of
# the batch, because running ones lag behind in a training as short as this.
BATCH_NORM = {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}}
MODELS = {"GraphSAGE": (GraphSAGE, {}), "GCN": (GCN, {}), "GIN": (GIN, BATCH_NORM)}
ROW = "{:10} {:8} {:>9} {:>6} {:>7} {:>9} {:>9} {:>10}"
LEGEND = """
epoch ms: the median; first: the first epoch, which also sorts the edges; peak MiB: memory above
that before training, on Linux; differ by: the largest difference of a parameter. Parameters differ
because floats are added up in another order: about 1e-7 in each sum, which Adam turns into some
1e-4, and more where a gradient is close to zero.
"""


class Run(NamedTuple):
    """What came out of one training."""

    epoch_ms: list[float]
    peak_mib: float
    accuracy: float
    parameters: Tensor
    report: str

    def cells(self) -> dict[str, str]:
        return {
            "epoch": f"{self.median:.1f}",
            "first": f"{self.epoch_ms[0]:.0f}",
            "peak": f"{self.peak_mib:.0f}",
            "accuracy": f"{self.accuracy:.3f}",
        }

    @property
    def median(self) -> float:
        return sorted(self.epoch_ms)[len(self.epoch_ms) // 2]


def main() -> None:
    options = parse_options()
    graph = options.dataset
    if graph == "community":
        graph += f", {options.nodes:,} nodes, {options.edges:,} edges"
    print(f"{graph}: 3 layers, hidden {options.hidden}, {options.epochs} epochs\n")
    columns = ("epoch ms", "ratio", "first", "peak MiB", "accuracy", "differ by")
    print(ROW.format("model", "PyG", *columns), flush=True)
    reports = {}
    for name in options.models:
        # Stock PyG gets the small memory pages that it has without pyg_accel.
        stock = in_new_process(name, options, accelerate=False)
        patched = in_new_process(name, options, accelerate=True)
        ratio = f"{stock.median / patched.median:.2f}x"
        differ = f"{float((stock.parameters - patched.parameters).abs().max()):.1e}"
        for label, run, *ends in (("stock", stock, "", ""), ("patched", patched, ratio, differ)):
            epoch, *others = run.cells().values()
            print(ROW.format(name, label, epoch, ends[0], *others, ends[1]), flush=True)
        reports[name] = patched.report
    print(LEGEND)
    for name, report in reports.items():
        print(f"pyg_accel.report() after training {name}:\n{report}\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    datasets = ["community", "Cora", "CiteSeer", "PubMed"]
    parser.add_argument("--dataset", choices=datasets, default="community")
    parser.add_argument("--root", help="folder for PyG's files of a real data set")
    parser.add_argument("--nodes", type=int, default=20_000, help="of the community graph")
    parser.add_argument("--edges", type=int, default=400_000, help="of the community graph")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    if options.dataset != "community" and options.root is None:
        parser.error(f"--dataset {options.dataset} needs --root, the folder with its files")
    return options


def in_new_process(name: str, options: argparse.Namespace, *, accelerate: bool) -> Run:
    """Train in a process that has done nothing else, so that memory and times are its own."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1" if accelerate else "0"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        return process.submit(train, name, options, accelerate=accelerate).result()


def train(name: str, options: argparse.Namespace, *, accelerate: bool) -> Run:
    """Train one model from seed 0 and test it."""
    if options.dataset == "community":
        data = community(options.nodes, options.edges)
    else:
        data = Planetoid(options.root, options.dataset)[0]
    torch.manual_seed(0)
    kind, extra = MODELS[name]
    model = kind(data.num_features, options.hidden, 3, int(data.y.max()) + 1, **extra)
    # The larger eps keeps Adam from blowing up gradients that are zero but for rounding, such as
    # those of a bias in front of a batch norm.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    epoch_ms = []
    before = memory_mib("VmRSS", reset=True)
    with pyg_accel.patched() if accelerate else contextlib.nullcontext():
        for _ in range(options.epochs):
            start = time.perf_counter()
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            loss = cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            epoch_ms.append((time.perf_counter() - start) * 1e3)
        peak = memory_mib("VmHWM") - before
        accuracy = test(model, data)
    report = str(pyg_accel.report(io.StringIO())) if accelerate else ""
    parameters = parameters_to_vector(model.parameters()).detach()
    return Run(epoch_ms, peak, accuracy, parameters, report)


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """Share of the test nodes that are classified correctly."""
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=1)
    return float((predicted == data.y)[data.test_mask].float().mean())


def community(nodes: int, edges: int, classes: int = 16) -> Data:
    """Classes as communities: half of the edges stay in a class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % classes
    source = torch.randint(nodes, (edges // 2,), generator=generator)
    near = source + classes * torch.randint(nodes // classes, source.shape, generator=generator)
    far = torch.randint(nodes, source.shape, generator=generator)
    inside = torch.rand(source.shape, generator=generator) < 0.5
    pairs = torch.stack([source, torch.where(inside, near % nodes, far)])
    x = 2 * one_hot(y, 128) + torch.randn(nodes, 128, generator=generator)
    train_mask = torch.rand(nodes, generator=generator) < 0.5
    return Data(
        x=x,
        y=y,
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        train_mask=train_mask,
        test_mask=~train_mask,
    )


def memory_mib(line: str, *, reset: bool = False) -> float:
    """A line of the process's status on Linux, nan elsewhere; `reset` lets the peak start anew."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = next(row for row in status.read_text().splitlines() if row.startswith(line))
    return int(text.split()[1]) / 1024


if __name__ == "__main__":
    main()
