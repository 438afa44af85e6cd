"""Training epochs on a GPU or CPU: stock PyG, `patched()`, and `optimize()`.

    python -m benchmarks.rewrite_epochs [--device cuda] [--graphs NAME ...] [--models NAME ...]

An epoch is forward, backward and Adam on the whole graph; 3 layers, 256 hidden, 40 classes, random
features. `rewritten` knows nothing of the features; `rewritten, static` is told that they are the
same in every epoch. Outputs are compared before anything is timed. `peak_mib` is what an epoch
takes beyond what was there; `optimize_ms` is what the call of `optimize()` took, graph features and
decisions included, on a graph that patch() had not sorted.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import pyg_accel
from benchmarks import gpu_machine, graphs, machine
from benchmarks.compared import Case, compared

NAME = "rewrite_epochs"
HIDDEN, LAYERS, CLASSES = 256, 3, 40
FEATURES = {"arxiv-like": 128, "products-like": 100, "reddit-like": 602}
MODELS = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GIN": GIN, "GAT": GAT}
VARIANTS = ("stock", "patched", "rewritten", "rewritten, static")
ALLOWED = 2e-3  # of the largest output: fp32 sums in another order, through three layers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", nargs="+", default=list(FEATURES))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    facts = gpu_machine.facts_of(options.device)
    rows = []
    for graph in options.graphs:
        rowptr, col = graphs.load(graph, device=options.device)
        for model in options.models:
            for row in measure(graph, rowptr, col, model, options):
                rows.append({"graph": graph, "model": model, **row, **facts})
                shown = list(rows[-1].values())[:8]
                print("  ".join(f"{v:.5g}" if isinstance(v, float) else f"{v:<17}" for v in shown),
                      flush=True)  # fmt: skip
            frame = pd.DataFrame(rows)
            suffix = "" if options.device == "cuda" else "_cpu"
            frame.to_csv(folder / f"{NAME}{suffix}.csv", index=False, float_format="%.5g")


def measure(
    graph: str, rowptr: Tensor, col: Tensor, name: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row a variant; the first that ran is the truth of the others."""
    nodes, device = rowptr.numel() - 1, options.device
    edge_index = graphs.edge_list((rowptr, col.long()), shuffled=True)
    x = torch.randn(nodes, FEATURES[graph.partition("@")[0]], device=device)
    y = torch.randint(CLASSES, (nodes,), device=device)

    def cases() -> Iterator[Case]:
        for variant in options.variants:
            facts = {"variant": variant, "N": nodes, "E": col.numel()}
            yield facts, partial(run, name, x, y, edge_index, variant, options)

    return compared(cases(), f"{name} on {graph}", ALLOWED)


def run(
    name: str, x: Tensor, y: Tensor, edge_index: Tensor, variant: str, options: argparse.Namespace
) -> tuple[Tensor, dict[str, Any]]:
    """The output before training, and the median of epochs."""
    with pyg_accel.patched() if variant == "patched" else nullcontext():
        return _run(name, x, y, edge_index, variant, options)


def _run(
    name: str, x: Tensor, y: Tensor, edge_index: Tensor, variant: str, options: argparse.Namespace
) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    cuda = options.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    model: torch.nn.Module = MODELS[name](x.size(1), HIDDEN, LAYERS, CLASSES).to(x.device)
    optimize_ms, chosen = float("nan"), ""
    if variant.startswith("rewritten"):
        static = ("x",) if variant.endswith("static") else ()
        wait()
        start = time.perf_counter()
        model = pyg_accel.optimize(model, x, edge_index, train=True, static=static)
        wait()
        optimize_ms = (time.perf_counter() - start) * 1e3
        chosen = " | ".join(layer.trees[0].tree for layer in pyg_accel.plan(model).layers)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        out = model(x, edge_index)

    def epoch() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x, edge_index), y).backward()
        optimizer.step()
        wait()

    epoch()
    peak = gpu_machine.peak_memory(epoch) if cuda else float("nan")
    times = []
    for _ in range(options.epochs):
        start = time.perf_counter()
        epoch()
        times.append(time.perf_counter() - start)
    return out, {
        "epoch_ms": machine.quantiles(times).median,
        "peak_mib": peak,
        "optimize_ms": optimize_ms,
        "chosen": chosen,
    }


if __name__ == "__main__":
    main()
