"""Where the time of a step goes: matrix products, sums over edges, values of edges, all else.

    python -m benchmarks.papers.sensei.shares [--device cuda] [--only layers] [--quick]

`layers` is figure 2 of the SENSEi paper: one layer by graph and sizes, inference and training;
`models` is figure 3 of the ES-SpMM paper: inference of its models (table III) on graphs of its
sizes, or of a share of them. Everything is under `patch()`. Times are those that torch's profiler
counts to an operator itself, without what it calls: on a GPU the time of its kernels, on a CPU its
own. Writes results/shares_DEVICE.csv, a row a case; run again, it goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import GAT, GCN, GraphSAGE

import pyg_accel
from benchmarks.papers.sensei import orders
from benchmarks.tools import plot, results, tasks
from benchmarks.tools.frames import PARTS

NAME = "papers/sensei/shares"
# What the names of operators hold; the first that fits counts. Attention in one kernel is a sum.
PRIMITIVES = {
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "edges": ("::dot", "::softmax", "::sddmm", "::edge", "aten::gather", "aten::index"),
    "SpMM": (
        "spmm",
        "::stages",
        "::attention",
        "::sampled",
        "segment",
        "aten::scatter",
    ),
}
STEPS = 3  # of which the shortest counts
GRAPHS_OF = {
    "cpu": ("mycielskian13", "reddit-like@0.01", "arxiv-like@0.3", "roads-like@0.05"),
    "cuda": ("mycielskian17", "reddit-like", "products-like", "arxiv-like", "roads-like"),
}
SIZES = ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32), (32, 1024))
LAYERS = {"GCN": GCN, "GAT": GAT}
# Table III of ES-SpMM: graph, features, layers, hidden features, classes.
MODELS = {"GCN": GCN, "GraphSAGE": GraphSAGE}
SHAPES = {
    "pubmed-like": (500, 2, 32, 3),
    "arxiv-like": (128, 3, 256, 40),
    "proteins-like": (8, 3, 256, 112),
    "reddit-like": (602, 2, 128, 41),
}
SHARE_ON_CPU = {"proteins-like": "@0.05", "reddit-like": "@0.05"}
KEY = ["what", "graph", "model", "in", "hidden", "out", "layers", "mode"]


def parts(run: Callable[[], Any], device: str) -> dict[str, float]:
    """Milliseconds of the primitives of one call."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):
        run()
    found = []
    for _ in range(STEPS):
        with profile(activities=activities) as profiler:
            run()
            if device == "cuda":
                torch.cuda.synchronize()
        found.append(totals(profiler.key_averages(), device))
    return min(found, key=lambda times: sum(times.values()))


def totals(events: Iterable[Any], device: str) -> dict[str, float]:
    """Milliseconds of the primitives: of operators, which on a GPU stand beside their kernels."""
    times, kernels = dict.fromkeys(PARTS, 0.0), 0.0
    for event in events:
        on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        took = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if on_gpu:
            kernels += took / 1e3
        else:
            times[primitive(event.key)] += took / 1e3
    if device == "cuda":  # what no operator has launched
        times["rest"] += max(0.0, kernels - sum(times.values()))
    return times


def primitive(operator: str) -> str:
    """Which part an operator belongs to."""
    for name, marks in PRIMITIVES.items():
        if any(mark in operator for mark in marks):
            return name
    return "rest"


def load(name: str, device: str) -> tuple[Tensor, int]:
    """The edge list of a graph, and its number of nodes."""
    if name.startswith("pubmed-like"):
        data = tasks.load(name)
        return data.edge_index.to(device), data.num_nodes
    return orders.load(name, device)


def step(model: torch.nn.Module, edge_index: Tensor, nodes: int, width: int, mode: str,
         ) -> Callable[[], Any]:  # fmt: skip
    """Inference, or forward and backward with features that have gradients."""
    train = mode == "training"
    model.train(train)
    x = torch.randn(nodes, width, device=edge_index.device, requires_grad=train)

    def inference() -> None:
        with torch.no_grad():
            model(x, edge_index)

    def training() -> None:
        x.grad = None
        model.zero_grad()
        model(x, edge_index).sum().backward()

    return training if train else inference


def plan(device: str, only: str, quick: bool) -> Iterator[tuple[Any, ...]]:
    """The cases, in the order of KEY."""
    if only != "models":
        for graph in ("rmat-2.7k",) if quick else GRAPHS_OF[device]:
            for model in LAYERS:
                for n_in, n_out in SIZES[: 1 if quick else None]:
                    for mode in ("inference", "training"):
                        yield "layers", graph, model, n_in, n_out, n_out, 1, mode
    if only != "layers":
        for graph, (n_in, layers, hidden, classes) in SHAPES.items():
            share = "@0.01" if quick else SHARE_ON_CPU.get(graph, "") if device == "cpu" else ""
            for model in MODELS:
                yield "models", graph + share, model, n_in, hidden, classes, layers, "inference"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=tuple(GRAPHS_OF), only="")
    options = parser.parse_args(arguments)
    device, loaded = options.device, ""
    rows = results.Rows(f"{NAME}_{device}", options, device, KEY)
    for case in results.each(rows.missing(plan(device, options.only, options.quick))):
        what, graph, name, n_in, hidden, n_out, layers, mode = case
        if graph != loaded:
            (edge_index, nodes), loaded = load(graph, device), graph
        torch.manual_seed(0)
        kind = (LAYERS if what == "layers" else MODELS)[name]
        model = kind(n_in, hidden, layers, n_out).to(device)
        with pyg_accel.patched(model):
            found = parts(step(model, edge_index, nodes, n_in, mode), device)
        rows.add([found], **dict(zip(KEY, case, strict=True)), N=nodes, E=edge_index.size(1))
    rows.done()
    plot.beside(rows.path)


if __name__ == "__main__":
    main()
