"""GCN without a share of its edges, drawn at random: accuracy, time, and what drawing costs.

    python -m benchmarks.dropped_edges [--device cuda] [--graphs NAME ...] [--quick]

Figure 5 and table II of the ES-SpMM paper, why that samples inside the kernel. Two layers, 64
hidden; on real graphs (PYG_ACCEL_DATA names their folder) they have learned over all edges, and
draws of several seeds are judged on the test nodes. `sample_ms` draws the edges and sorts them into
a graph. A row of results/dropped_edges_DEVICE.csv is a share of a graph; run again, it goes on.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from math import nan
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import pyg_accel
from benchmarks import by_graph, graphs, tasks
from benchmarks.datasets import load_task
from benchmarks.sampled_accuracy import EPOCHS, HIDDEN, Net, accuracy, train
from benchmarks.sampled_inference import laps
from benchmarks.table_lines import NONE
from pyg_accel import Graph, ops

NAME = "dropped_edges"
DROPPED = (0.0, 0.2, 0.4, 0.6, 0.8)
SEEDS = 3
REAL = ("Cora", "facebook-pages", "cornell5")
FEATURES, CLASSES = 128, 40  # of graphs that have none
GRAPHS_OF = {
    "cpu": (*REAL, "pubmed-like", "arxiv-like", "reddit-like@0.02"),
    "cuda": (*REAL, "pubmed-like", "arxiv-like", "proteins-like", "reddit-like"),
}


def load(name: str, device: str) -> Data:
    """A graph, with its task where it is real."""
    if name in ("cornell5", "pubmed-like"):
        data = tasks.load(name)
    elif name in REAL:
        data = load_task(name, os.environ.get("PYG_ACCEL_DATA"))
    else:
        csr = graphs.load(name, device=device)
        x = torch.randn(csr[0].numel() - 1, FEATURES, device=device)
        data = Data(x=x, edge_index=graphs.edge_list(csr))
    return data.to(device)


def without(edge_index: Tensor, share: float, seed: int) -> Tensor:
    """The edges that are left."""
    generator = torch.Generator(edge_index.device).manual_seed(seed)
    drawn = torch.rand(edge_index.size(1), generator=generator, device=edge_index.device)
    return edge_index[:, drawn >= share]


def measure(name: str, data: Data, epochs: int) -> Iterator[dict[str, Any]]:
    """A row a share."""
    nodes, device = data.num_nodes, data.x.device.type
    torch.manual_seed(0)
    if name in REAL:
        model = train(GCNConv, data, epochs=epochs, seed=0)
    else:
        model = Net(GCNConv, data.num_features, CLASSES).to(device).eval()
    hidden = torch.randn(nodes, HIDDEN, device=device)

    def sample(share: float) -> Graph:
        return Graph.from_edge_index(without(data.edge_index, share, 0), (nodes, nodes))

    def inference(edge_index: Tensor) -> None:
        with torch.no_grad():
            model(data.x, edge_index)

    with pyg_accel.patched(model):
        left = {share: without(data.edge_index, share, 0) for share in DROPPED}
        sums = {share: partial(ops.spmm, sample(share), hidden) for share in DROPPED}
        spmm = laps(sums, device)
        whole = laps({share: partial(inference, edges) for share, edges in left.items()}, device)
        drawing = laps({share: partial(sample, share) for share in DROPPED[1:]}, device)
        for share in DROPPED:
            right = [nan]
            if name in REAL:
                right = [_judge(model, data, share, seed) for seed in range(SEEDS)]
            yield {"dropped": share, "E": left[share].size(1), "spmm_ms": spmm[share],
                   "inference_ms": whole[share], "sample_ms": drawing.get(share, 0.0),
                   "accuracy": statistics.mean(right),
                   "deviation": nan if name not in REAL else statistics.stdev(right)}  # fmt: skip


def _judge(model: Net, data: Data, share: float, seed: int) -> float:
    part = data.clone()
    part.edge_index = without(data.edge_index, share, seed)
    with torch.no_grad():
        return accuracy(model, part, data.test_mask)


def table(frame: pd.DataFrame) -> list[str]:
    """The lines of docs/results.md: speed-up of SpMM, inference with the drawing, accuracy."""
    lines = ["| graph | dropped | SpMM ms | speed-up | inference ms | drawing ms | drawing and "
             "inference over that of all edges | accuracy |", "|---|" + "--:|" * 7]  # fmt: skip
    for graph, group in frame.groupby("graph", sort=False):
        first = group.iloc[0]
        for row in group.to_dict("records"):
            right = NONE
            if not pd.isna(row["accuracy"]):
                right = f"{row['accuracy']:.1%} ± {row['deviation']:.1%}"
            over = (row["inference_ms"] + row["sample_ms"]) / first["inference_ms"]
            shown = [graph, f"{row['dropped']:.0%}", f"{row['spmm_ms']:.4g}",
                     f"{first['spmm_ms'] / row['spmm_ms']:.2f}x", f"{row['inference_ms']:.4g}",
                     f"{row['sample_ms']:.4g}", f"{over:.2f}x", right]  # fmt: skip
            lines.append(f"| {' | '.join(shown)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    options = by_graph.options_of(arguments, __doc__, GRAPHS_OF, "a small graph")
    graphs_of = ("rmat-2.7k",) if options.quick else GRAPHS_OF[options.device]

    def rows_of(name: str) -> Iterator[dict[str, Any]]:
        data = load(name, options.device)
        return ({"N": data.num_nodes} | row for row in measure(name, data, EPOCHS))

    print("\n".join(table(by_graph.run(options, NAME, graphs_of, REAL, rows_of))))


if __name__ == "__main__":
    main()
