"""Whole inference with sampled edges against all edges, by width (ES-SpMM, figure 9).

    python -m benchmarks.sampled_inference [--device cuda] [--graphs NAME ...] [--quick]

GCN and GraphSAGE of two layers. cornell5 and facebook-pages are real (PYG_ACCEL_DATA names their
folder): there the models have learned over all edges, and the accuracy of the test nodes stands
beside each time. The other graphs have Reddit's and ogbn-proteins' sizes, or a share of them, and
nothing to learn. Widths take turns. A row of results/sampled_inference_DEVICE.csv is a width, 0 for
all edges under `patch()` and, where `case` says so, for stock PyG, unless it runs out of memory;
parts are those of :mod:`benchmarks.shares`. Run again, it goes on.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import nan
from typing import Any

import pandas as pd
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import degree

import pyg_accel
from benchmarks import association, by_graph, graphs, machine, tasks
from benchmarks.sampled_accuracy import EPOCHS, Net, accuracy, train
from benchmarks.shares import PARTS, parts
from benchmarks.table_lines import NONE
from pyg_accel import sampling_rates

NAME = "sampled_inference"
CONVS = {"GCN": GCNConv, "GraphSAGE": SAGEConv}
REAL = ("cornell5", "facebook-pages")
GRAPHS_OF = {"cpu": (*REAL, "reddit-like@0.02"), "cuda": (*REAL, "reddit-like", "proteins-like")}
WIDTHS = (16, 32, 64, 128, 256, 512)
STRATEGY = "fastrand"
FEATURES, CLASSES = 602, 41  # Reddit's
ROUNDS, STOCK = 5, -1
EDGES = {"stock": "all, stock PyG", "all edges": "all"}


def load(name: str, device: str) -> Data:
    """A graph, with its task where it is real."""
    if name in REAL:
        return tasks.load(name).to(device)
    csr = graphs.load(name, device=device)
    nodes = csr[0].numel() - 1
    return Data(x=torch.randn(nodes, FEATURES, device=device), edge_index=graphs.edge_list(csr))


def models(data: Data) -> Iterator[tuple[str, torch.nn.Module]]:
    """Models that have learned what there is to learn."""
    for name, conv in CONVS.items():
        torch.manual_seed(0)
        if data.y is None:
            yield name, Net(conv, FEATURES, CLASSES).to(data.x.device).eval()
        else:
            yield name, train(conv, data, epochs=EPOCHS, seed=0)


def measure(model: torch.nn.Module, data: Data, widths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row a width."""
    device, stock = data.x.device.type, copy.deepcopy(model)
    kept = sampling_rates(degree(data.edge_index[1], data.num_nodes).long(), widths)
    # The weights of a GCN are those of the degrees; means need nothing.
    rescale = "gcn" if isinstance(model.first, GCNConv) else "row"

    def how(width: int) -> AbstractContextManager[None]:
        return pyg_accel.sampled(width, STRATEGY, rescale=rescale) if width > 0 else nullcontext()

    def inference(width: int) -> None:
        with torch.no_grad(), how(width):
            (stock if width == STOCK else model)(data.x, data.edge_index)

    with pyg_accel.patched(model):
        runs = {width: partial(inference, width) for width in (STOCK, 0, *widths)}
        try:
            inference(STOCK)
        except torch.OutOfMemoryError:  # one tensor of it is larger than a GPU's memory
            del runs[STOCK]
        times = laps(runs, device)
        for width, run in runs.items():
            right = nan
            if data.y is not None:
                with torch.no_grad(), how(width):
                    right = accuracy(stock if width == STOCK else model, data, data.test_mask)
            case = "stock" if width == STOCK else "sampled" if width else "all edges"
            yield {"case": case, "width": max(width, 0), "kept": kept.get(width, 1.0),
                   "accuracy": right, "ms": times[width], **parts(run, device)}  # fmt: skip


def laps(runs: dict[Any, Callable[[], Any]], device: str) -> dict[Any, float]:
    """Milliseconds of calls, the median of rounds in turns; the first round warms up."""
    association.clock = machine.clock_of(device)
    rounds = [{name: association.lap(run, device) for name, run in runs.items()}
              for _ in range(ROUNDS + 1)]  # fmt: skip
    return {name: statistics.median(each[name] for each in rounds[1:]) for name in runs}


def table(frame: pd.DataFrame) -> list[str]:
    """The lines of docs/results.md: time over that of all edges, by parts."""
    lines = ["| graph | model | edges | kept | ms | of all edges | " + " | ".join(PARTS)
             + " | accuracy |", "|---|---|---|" + "--:|" * (4 + len(PARTS))]  # fmt: skip
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        whole = group.loc[group["case"] == "all edges", "ms"].iloc[0]
        for row in group.to_dict("records"):
            total = sum(row[part] for part in PARTS)
            right = NONE if pd.isna(row["accuracy"]) else f"{row['accuracy']:.1%}"
            edges = f"width {row['width']}" if row["width"] else EDGES[row["case"]]
            shown = [graph, model, edges, f"{row['kept']:.1%}", f"{row['ms']:.4g}",
                     f"{row['ms'] / whole:.0%}",
                     *(NONE if pd.isna(total) else f"{row[part] / total:.0%}" for part in PARTS),
                     right]  # fmt: skip
            lines.append(f"| {' | '.join(shown)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    options = by_graph.options_of(arguments, __doc__, GRAPHS_OF, "a small graph, two widths")
    graphs_of = ("reddit-like@0.002",) if options.quick else GRAPHS_OF[options.device]
    widths = (16, 64) if options.quick else WIDTHS

    def rows_of(name: str) -> Iterator[dict[str, Any]]:
        data = load(name, options.device)
        for kind, model in models(data):
            for row in measure(model, data, widths):
                yield {"N": data.num_nodes, "E": data.num_edges, "model": kind,
                       "strategy": STRATEGY, **row}  # fmt: skip

    print("\n".join(table(by_graph.run(options, NAME, graphs_of, REAL, rows_of))))


if __name__ == "__main__":
    main()
