"""Whole training epochs on a GPU: stock PyG on `edge_index`, compiled, on torch's CSR; `patched()`.

    python -m benchmarks.gpu_epochs [--quick] [--graphs NAME ...] [--models NAME ...] [--out FOLDER]

An epoch is forward, backward and Adam on the whole graph; 3 layers, 256 hidden, 40 classes, random
features. The outputs of all backends are compared on the same parameters before anything is timed.
`stock, compiled` is torch.compile of stock PyG; its compilation is not in the figure.
`patched, graph` is the same training step captured in a CUDA graph and replayed: what the device
needs, without Python. Where a backend runs out of memory its row says so.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

import pyg_accel
from benchmarks import gpu_machine, graphs
from benchmarks.compared import Case, compared

NAME = "gpu_epochs"
HIDDEN, LAYERS, CLASSES, HEADS = 256, 3, 40, 4
FEATURES = {"arxiv-like": 128, "amazon0505-like": 96, "products-like": 100, "reddit-like": 602}
ATTENTION = {"GAT": GATConv, "GATv2": GATv2Conv, "Transformer": TransformerConv}
BASIC = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GIN": GIN}
BACKENDS = ("stock", "stock, compiled", "torch CSR", "patched", "patched, graph")
ALLOWED = 2e-3  # of the largest output: fp32 sums in another order, through three layers


class Attention(Module):
    """Layers of one attention convolution, 4 heads x 64, with relu between them."""

    def __init__(self, kind: type[Module], in_channels: int) -> None:
        super().__init__()
        sizes = [in_channels, *[HIDDEN] * (LAYERS - 1)]
        last = kind(HIDDEN, CLASSES, heads=1)
        convs = [kind(size, HIDDEN // HEADS, heads=HEADS) for size in sizes[:-1]]
        self.convs = ModuleList([*convs, last])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def build(name: str, in_channels: int) -> Module:
    torch.manual_seed(0)
    if name in ATTENTION:
        return Attention(ATTENTION[name], in_channels).cuda()
    return BASIC[name](in_channels, HIDDEN, LAYERS, CLASSES).cuda()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small graph only")
    parser.add_argument("--graphs", nargs="+", default=list(FEATURES))
    parser.add_argument("--models", nargs="+", default=[*BASIC, *ATTENTION])
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop before the next model")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    names = ["arxiv-like@0.1"] if options.quick else options.graphs
    facts, rows = gpu_machine.facts(), []
    for graph in names:
        rowptr, col = graphs.load(graph, device="cuda")
        for model in options.models:
            if time.monotonic() > deadline:
                print(f"out of time before {model} on {graph}")
                break
            for row in measure(graph, rowptr, col, model, options.backends):
                rows.append({"graph": graph, "model": model, **row, **facts})
                print("  ".join(f"{value:.5g}" if isinstance(value, float) else f"{value:<14}"
                                for value in list(rows[-1].values())[:9]), flush=True)  # fmt: skip
            suffix = "_quick" if options.quick else ""
            frame = pd.DataFrame(rows)
            frame.to_csv(folder / f"{NAME}{suffix}.csv", index=False, float_format="%.5g")
        del rowptr, col
        torch.cuda.empty_cache()


def measure(
    graph: str, rowptr: Tensor, col: Tensor, name: str, backends: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row a backend, those that agree; the first that ran is the truth of the others."""
    nodes, entries = rowptr.numel() - 1, col.numel()
    edge_index = graphs.edge_list((rowptr, col), shuffled=True)
    x = torch.randn(nodes, FEATURES[graph.partition("@")[0]], device="cuda")
    y = torch.randint(CLASSES, (nodes,), device="cuda")

    def cases() -> Iterator[Case]:
        for backend in backends:
            if backend == "torch CSR" and name not in BASIC:
                continue
            given: Any = edge_index
            if backend == "torch CSR":  # the graphs are symmetric: A is its own transpose
                values = torch.ones(entries, device="cuda")
                given = torch.sparse_csr_tensor(rowptr, col, values, (nodes, nodes))
            facts = {"backend": backend, "N": nodes, "E": entries}
            yield facts, partial(run, name, x, y, given, backend)

    return compared(cases(), f"{name} on {graph}", ALLOWED)


def run(
    name: str, x: Tensor, y: Tensor, edge_index: Any, backend: str
) -> tuple[Tensor, dict[str, Any]]:
    """The output before training, and the figures of epochs."""
    with pyg_accel.patched() if "patched" in backend else nullcontext():
        return _run(name, x, y, edge_index, backend)


def _run(
    name: str, x: Tensor, y: Tensor, edge_index: Any, backend: str
) -> tuple[Tensor, dict[str, Any]]:
    model, capture = build(name, x.size(1)), backend.endswith("graph")
    if backend.endswith("compiled"):
        torch.compiler.reset()
        model = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), capturable=capture)

    def epoch() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x, edge_index), y).backward()
        optimizer.step()

    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        out = model(x, edge_index)
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.empty_cache()
    step: Callable[[], Any] = gpu_machine.captured(epoch) if capture else epoch
    peak = gpu_machine.peak_memory(step)
    took = gpu_machine.timed(step, budget=1.0)
    return out, {
        "epoch_ms": took.median,
        "p20": took.p20,
        "p80": took.p80,
        "peak_mib": float("nan") if capture else peak,
        "first_forward_ms": first_ms,
    }


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per graph and model: epochs and peaks by backend, and the ratio to the better stock."""
    table = frame.pivot_table(["epoch_ms", "peak_mib"], ["graph", "model"], "backend", sort=False)
    best = table["epoch_ms"].reindex(columns=BACKENDS[:3]).min(axis=1)
    table["ratio", "best stock / patched"] = best / table["epoch_ms", "patched"]
    return table


if __name__ == "__main__":
    main()
