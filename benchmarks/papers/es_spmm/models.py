"""Models with fewer edges: sampled in the kernel, or dropped beforehand (ES-SpMM).

    python -m benchmarks.papers.es_spmm.models --what accuracy        # table III and figure 8
    python -m benchmarks.papers.es_spmm.models --what inference [--device cuda]   # figure 9
    python -m benchmarks.papers.es_spmm.models --what dropped [--device cuda]   # 5, table II

GCN and GraphSAGE of two layers, 64 hidden. On real graphs (PYG_ACCEL_DATA names their folder) they
have learned over all edges, and are judged on the test nodes; other graphs have the paper's sizes
or a share of them, and nothing to learn. Run again, it goes on with the graphs that the CSV lacks.

accuracy    the smallest width that loses at most 1% on the validation nodes, as
            `calibrate_sampling` finds it, and what it does on the test nodes
inference   whole inference by width, 0 for all edges under `patch()` and, where `case` says so, for
            stock PyG, unless it runs out of memory; widths take turns, parts are those of `shares`
dropped     GCN without a share of its edges, drawn at random: `sample_ms` draws them and sorts the
            others into a graph; accuracy is of draws of several seeds
"""

import copy
import os
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import degree

import pyg_accel
from benchmarks.papers import tables
from benchmarks.papers.sensei.shares import parts
from benchmarks.tools import graphs, plot, results, tasks
from benchmarks.tools.datasets import load_task
from benchmarks.tools.graphs import community_task
from benchmarks.tools.timing import in_turns
from benchmarks.tools.variants import epoch_of
from pyg_accel import Graph, ops, sampling_rates
from pyg_accel.backends.sampling import STRATEGIES

CONVS = {"GCN": GCNConv, "GraphSAGE": SAGEConv}
EPOCHS, HIDDEN, MAX_DROP, SEEDS, ROUNDS = 60, 64, 0.01, 3, 5
REAL = ("Cora", "facebook-pages", "cornell5")
COMMUNITY = "community, degree 50"
GRAPHS = {
    ("accuracy", "cpu"): ("Cora", "facebook-pages", COMMUNITY),
    ("inference", "cpu"): ("cornell5", "facebook-pages", "reddit-like@0.02"),
    ("inference", "cuda"): ("cornell5", "facebook-pages", "reddit-like", "proteins-like"),
    ("dropped", "cpu"): (*REAL, "pubmed-like", "arxiv-like", "reddit-like@0.02"),
    ("dropped", "cuda"): (*REAL, "pubmed-like", "arxiv-like", "proteins-like", "reddit-like"),
}
QUICK = {"accuracy": (COMMUNITY,), "inference": ("reddit-like@0.002",), "dropped": ("rmat-2.7k",)}
WIDTHS, QUICK_WIDTHS = (16, 32, 64, 128, 256, 512), (16, 64)
DROPPED = (0.0, 0.2, 0.4, 0.6, 0.8)


class Net(torch.nn.Module):
    """Two layers of one kind."""

    def __init__(self, conv: type[torch.nn.Module], inputs: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = conv(inputs, HIDDEN), conv(HIDDEN, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.first(x, edge_index).relu(), 0.5, self.training)
        return self.second(x, edge_index)


def load(name: str, device: str, features: int = 602) -> Data:
    """A graph, with its task where there is something to learn."""
    if name == COMMUNITY:
        return community_task(10_000, 500_000, 64, 8, signal=1.5).to(device)
    if name in ("cornell5", "pubmed-like"):
        return tasks.load(name).to(device)
    if name in REAL:
        return load_task(name, os.environ.get("PYG_ACCEL_DATA")).to(device)
    csr = graphs.load(name, device=device)
    x = torch.randn(csr[0].numel() - 1, features, device=device)
    return Data(x=x, edge_index=graphs.edge_list(csr))


def learns(name: str) -> bool:
    return name in (*REAL, COMMUNITY)


def model_of(
    conv: type[torch.nn.Module], data: Data, *, learned: bool, epochs: int = EPOCHS
) -> Net:
    """A model that has learned on the training nodes, over all edges, what there is to learn."""
    torch.manual_seed(0)
    classes = int(data.y.max()) + 1 if data.y is not None else 41
    model = Net(conv, data.num_features, classes).to(data.x.device)
    if learned:
        with pyg_accel.patched(model):
            step = epoch_of(model, (data.x, data.edge_index), data.y, data.train_mask, lr=0.01,
                            weight_decay=5e-4)  # fmt: skip
            for _ in range(epochs):
                step()
    return model.eval()


def accuracy(model: torch.nn.Module, data: Data, mask: Tensor) -> float:
    """Share of the nodes of a mask that are classified right."""
    with torch.no_grad():
        found = model(data.x, data.edge_index)[mask].argmax(-1)
    return float((found == data.y[mask]).double().mean())


def chosen_widths(name: str, device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each width of a model, strategy and rescaling."""
    data = load(name, device)
    counts = torch.bincount(data.edge_index[1])
    widths = [4 << i for i in range((int(counts.max()) - 1).bit_length() - 1)] or [4]
    for conv in CONVS.values():
        model = model_of(conv, data, learned=True, epochs=10 if quick else EPOCHS)
        with pyg_accel.patched(model):
            exact, test_all = (accuracy(model, data, m) for m in (data.val_mask, data.test_mask))
            for strategy in STRATEGIES:
                for rescale in ("row", "none") if conv is GCNConv else ("row",):
                    found = False
                    for width, share in sampling_rates(counts, widths).items():
                        with pyg_accel.sampled(width, strategy, rescale=rescale):
                            val, test = (accuracy(model, data, mask)
                                         for mask in (data.val_mask, data.test_mask))  # fmt: skip
                        good = exact - val <= MAX_DROP + 1e-9 and not found
                        found |= good
                        yield {"model": conv.__name__, "strategy": strategy, "rescale": rescale,
                               "width": width, "chosen": good, "edges": share, "val_all": exact,
                               "val": val, "test_all": test_all, "test": test,
                               "test_drop": test_all - test}  # fmt: skip


def by_width(name: str, device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """A row a model and width; -1 is stock PyG."""
    data, widths = load(name, device), QUICK_WIDTHS if quick else WIDTHS
    kept = sampling_rates(degree(data.edge_index[1], data.num_nodes).long(), widths)
    for kind, conv in CONVS.items():
        model = model_of(conv, data, learned=learns(name))
        stock = copy.deepcopy(model)

        def how(width: int) -> AbstractContextManager[None]:
            return pyg_accel.sampled(width, "fastrand") if width > 0 else nullcontext()

        def inference(width: int, model: Net = model, stock: Net = stock) -> None:
            with torch.no_grad(), how(width):
                (stock if width < 0 else model)(data.x, data.edge_index)

        with pyg_accel.patched(model):
            runs = {width: partial(inference, width) for width in (-1, 0, *widths)}
            try:
                inference(-1)
            except torch.OutOfMemoryError:  # one tensor of it is larger than a GPU's memory
                del runs[-1]
            times = in_turns(runs, device, ROUNDS)
            for width, run in runs.items():
                right = nan
                if learns(name):
                    with how(width):
                        right = accuracy(stock if width < 0 else model, data, data.test_mask)
                case = "stock" if width < 0 else "sampled" if width else "all edges"
                yield {"N": data.num_nodes, "E": data.num_edges, "model": kind,
                       "strategy": "fastrand", "case": case, "width": max(width, 0),
                       "kept": kept.get(width, 1.0), "accuracy": right, "ms": times[width].median,
                       **parts(run, device)}  # fmt: skip


def without(edge_index: Tensor, share: float, seed: int) -> Tensor:
    """The edges that are left."""
    generator = torch.Generator(edge_index.device).manual_seed(seed)
    drawn = torch.rand(edge_index.size(1), generator=generator, device=edge_index.device)
    return edge_index[:, drawn >= share]


def by_share(name: str, device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """A row a share of edges that is dropped."""
    data = load(name, device, features=128)
    nodes, model = data.num_nodes, model_of(GCNConv, data, learned=learns(name))
    hidden = torch.randn(nodes, HIDDEN, device=device)

    def sample(share: float) -> Graph:
        return Graph.from_edge_index(without(data.edge_index, share, 0), (nodes, nodes))

    def inference(edge_index: Tensor) -> None:
        with torch.no_grad():
            model(data.x, edge_index)

    def judged(share: float, seed: int) -> float:
        part = data.clone()
        part.edge_index = without(data.edge_index, share, seed)
        return accuracy(model, part, data.test_mask)

    with pyg_accel.patched(model):
        left = {share: without(data.edge_index, share, 0) for share in DROPPED}
        sums = {share: partial(ops.spmm, sample(share), hidden) for share in DROPPED}
        spmm, whole, drawing = (in_turns(runs, device, ROUNDS) for runs in (
            sums, {share: partial(inference, edges) for share, edges in left.items()},
            {share: partial(sample, share) for share in DROPPED[1:]}))  # fmt: skip
        for share in DROPPED:
            right = [judged(share, seed) for seed in range(SEEDS)] if learns(name) else [nan, nan]
            yield {"N": nodes, "dropped": share, "E": left[share].size(1),
                   "spmm_ms": spmm[share].median, "inference_ms": whole[share].median,
                   "sample_ms": drawing[share].median if share else 0.0,
                   "accuracy": statistics.mean(right),
                   "deviation": statistics.stdev(right) if learns(name) else nan}  # fmt: skip


WHAT = {
    "accuracy": ("sampled_accuracy", chosen_widths, tables.sampled_models),
    "inference": ("sampled_inference", by_width, tables.inference),
    "dropped": ("dropped_edges", by_share, tables.dropped),
}


def main(arguments: Any = None) -> None:
    parser = results.parser(__doc__, devices=("cpu", "cuda"), graphs=None, what=WHAT)
    options = parser.parse_args(arguments)
    device = options.device
    for what in options.what:
        if (what, device) not in GRAPHS:
            continue
        name, measure, table = WHAT[what]
        name += "" if what == "accuracy" else f"_{device}"
        rows = results.Rows(f"papers/es_spmm/{name}", options, device, ["graph"])
        names = options.graphs or (QUICK[what] if options.quick else GRAPHS[what, device])
        if not os.environ.get("PYG_ACCEL_DATA"):
            names = [n for n in names if n not in REAL]
            print("real graphs are left out: PYG_ACCEL_DATA is not set")
        for (graph,) in results.each(rows.missing((n,) for n in names), "graph"):
            rows.add(list(measure(graph, device, options.quick)), graph=graph)
        print("\n".join(table(rows.done())))
        plot.beside(rows.path)


if __name__ == "__main__":
    main()
