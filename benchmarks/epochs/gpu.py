"""Whole training epochs on a GPU: PyG on `edge_index`, compiled, on torch's CSR; `patched()`.

    python -m benchmarks.epochs.gpu [--quick] [--graphs NAME ...] [--models NAME ...]
    python -m benchmarks.epochs.gpu --rewrite [--device cpu]      # optimize(): rewrite_epochs.csv

An epoch is forward, backward and Adam on the whole graph; 3 layers, 256 hidden, 40 classes, random
features. The outputs of all backends are compared on the same parameters before anything is timed.
`stock, compiled` is torch.compile of stock PyG, without its compilation; `patched, graph` the same
step captured in a CUDA graph: what the device needs, without Python. `rewritten` is what
`optimize()` returns, which knows nothing of the features; `rewritten, static` is told that they are
the same in every epoch; `optimize_ms` is its call, on a graph that patch() had not sorted. Where a
backend runs out of memory its row says so.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import pyg_accel
from benchmarks.tools import graphs, plot, results, timing
from benchmarks.tools.variants import Case, compared, epoch_of, patched

HIDDEN, LAYERS, CLASSES, HEADS = 256, 3, 40, 4
FEATURES = {"arxiv-like": 128, "amazon0505-like": 96, "products-like": 100, "reddit-like": 602}
ATTENTION = {"GAT": GATConv, "GATv2": GATv2Conv, "Transformer": TransformerConv}
BASIC = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GIN": GIN}
BACKENDS = ("stock", "stock, compiled", "torch CSR", "patched", "patched, graph")
REWRITTEN = ("stock", "patched", "rewritten", "rewritten, static")
ALLOWED = 2e-3  # of the largest output: fp32 sums in another order, through three layers


class Attention(Module):
    """Layers of one attention convolution, 4 heads x 64, with relu between them."""

    def __init__(self, kind: type[Module], in_channels: int) -> None:
        super().__init__()
        sizes = [in_channels, *[HIDDEN] * (LAYERS - 2)]
        convs = [kind(size, HIDDEN // HEADS, heads=HEADS) for size in sizes]
        self.convs = ModuleList([*convs, kind(HIDDEN, CLASSES, heads=1)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


def build(name: str, in_channels: int, *, one_head: bool = False) -> Module:
    torch.manual_seed(0)
    if name in ATTENTION and not one_head:
        return Attention(ATTENTION[name], in_channels)
    return (BASIC | {"GAT": GAT})[name](in_channels, HIDDEN, LAYERS, CLASSES)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cuda", "cpu"), quick="a small graph only", graphs=None,
        models=BASIC | ATTENTION, backends=None, rewrite=False, minutes=30.0,
    )  # fmt: skip
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    name = "rewrite_epochs" if options.rewrite else "gpu_epochs"
    suffix = "" if options.device == "cuda" else "_cpu"
    rows = results.Rows(f"epochs/{name}{suffix}", options, options.device)
    chosen = [g for g in FEATURES if not (options.rewrite and g == "amazon0505-like")]
    names = options.graphs or (["arxiv-like@0.1"] if options.quick else chosen)
    models = [m for m in options.models if not (options.rewrite and m in ("GATv2", "Transformer"))]
    for graph in names:
        csr = graphs.load(graph, device=options.device)
        for model in models:
            if time.monotonic() > deadline:
                print(f"out of time before {model} on {graph}")
                break
            rows.add(measure(graph, csr, model, options), show=True, graph=graph, model=model)
        del csr
        torch.cuda.empty_cache()
    frame = rows.done()
    by = "variant" if options.rewrite else "backend"
    print(frame.pivot_table(["epoch_ms", "peak_mib"], ["graph", "model"], by, sort=False))
    plot.beside(rows.path)


def measure(
    graph: str, csr: graphs.Csr, name: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row a backend, those that agree; the first that ran is the truth of the others."""
    nodes, entries, device = csr[0].numel() - 1, csr[1].numel(), options.device
    edge_index = graphs.edge_list(csr, shuffled=True)
    x = torch.randn(nodes, FEATURES[graph.partition("@")[0]], device=device)
    y = torch.randint(CLASSES, (nodes,), device=device)

    def cases() -> Iterator[Case]:
        for backend in options.backends or (REWRITTEN if options.rewrite else BACKENDS):
            if backend == "torch CSR" and name not in BASIC:
                continue
            given: Any = edge_index
            if backend == "torch CSR":  # the graphs are symmetric: A is its own transpose
                values = torch.ones(entries, device=device)
                given = torch.sparse_csr_tensor(*csr, values, (nodes, nodes))
            facts = {"variant" if options.rewrite else "backend": backend, "N": nodes, "E": entries}
            yield facts, partial(run, name, x, y, given, backend, options)

    return compared(cases(), f"{name} on {graph}", ALLOWED)


def run(
    name: str, x: Tensor, y: Tensor, edge_index: Any, backend: str, options: argparse.Namespace
) -> tuple[Tensor, dict[str, Any]]:
    """The output before training, and the figures of epochs."""
    device, capture = options.device, backend.endswith("graph")
    with patched("patched" in backend):
        model = build(name, x.size(1), one_head=options.rewrite).to(device)
        extra: dict[str, Any] = {}
        if backend.endswith("compiled"):
            torch.compiler.reset()
            model = torch.compile(model)
        if backend.startswith("rewritten"):
            static = ("x",) if backend.endswith("static") else ()
            timing.synchronize(device)
            start = time.perf_counter()
            model = pyg_accel.optimize(model, x, edge_index, train=True, static=static)
            timing.synchronize(device)
            extra["optimize_ms"] = (time.perf_counter() - start) * 1e3
            trees = [layer.trees[0].tree for layer in pyg_accel.plan(model).layers]
            extra["chosen"] = " | ".join(trees)
        outs: list[Tensor] = []
        with torch.no_grad():
            first = timing.seconds_of(lambda: outs.append(model(x, edge_index)), device) * 1e3
        epoch = epoch_of(model, (x, edge_index), y, capturable=capture)
        step = timing.captured(epoch) if capture else epoch
        cuda = device == "cuda"
        peak = timing.peak_memory(step) if cuda and not capture else float("nan")
        took = timing.timed(step, device, repeats=3, budget=1.0)
    return outs[0], {**took.columns("epoch_ms"), "peak_mib": peak, "first_forward_ms": first,
                     **extra}  # fmt: skip


if __name__ == "__main__":
    main()
