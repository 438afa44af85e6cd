"""Inference on a part of each node's edges: accuracy and time by width, and the width to use.

    python examples/calibrate_sampling.py [--nodes 10000 --degree 180] [--plot figure.png]

Trains GraphSAGE on a graph with many edges a node, runs it over at most 4, 8, 16 ... of them, and
draws accuracy and speed-up by width (ES-SpMM, arXiv 2104.10716, figure 8). `calibrate_sampling`
finds the smallest width at which the validation nodes lose at most 0.01 of accuracy; test nodes,
which it does not see, may lose more.
"""

import argparse
import time

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from tqdm import tqdm


def noisy_communities(nodes: int, degree: int, classes: int = 8) -> Data:
    """Features that say little by themselves; a quarter of all edges is drawn inside a class."""
    y = torch.randint(classes, (nodes,)).sort().values
    target = torch.arange(nodes).repeat_interleave(degree)
    first, count = torch.searchsorted(y, torch.arange(classes)), torch.bincount(y, None, classes)
    inside = first[y[target]] + (torch.rand(target.numel()) * count[y[target]]).long()
    anywhere = torch.randint(nodes, target.shape)
    source = torch.where(torch.rand(target.numel()) < 0.25, inside, anywhere)
    x = torch.randn(nodes, 64) + torch.randn(classes, 64)[y] * 0.2
    split = torch.rand(nodes)
    return Data(x=x, y=y, edge_index=torch.stack([source, target]), train_mask=split < 0.4,
                val_mask=(split >= 0.4) & (split < 0.7), test_mask=split >= 0.7)  # fmt: skip


def train(model: torch.nn.Module, data: Data, epochs: int = 20) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        torch.nn.functional.cross_entropy(out, data.y[data.train_mask]).backward()
        optimizer.step()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> tuple[float, float]:
    """Accuracy on the test nodes, and milliseconds of a forward pass after the first."""
    for _ in range(2):
        start = time.perf_counter()
        out: Tensor = model(data.x, data.edge_index)
    milliseconds = 1e3 * (time.perf_counter() - start)
    hits = out[data.test_mask].argmax(-1) == data.y[data.test_mask]
    return float(hits.double().mean()), milliseconds


def plot(rows: dict[int, tuple[float, float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    left = figure.subplots()
    left.semilogx([*rows], [accuracy for accuracy, _ in rows.values()], "o-", base=2)
    left.set(xlabel="edges of a node at most", ylabel="accuracy on the test nodes")
    right = left.twinx()
    right.plot([*rows], [speedup for _, speedup in rows.values()], "s--", color="tab:orange")
    right.set_ylabel("speed-up of a forward pass")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2_000)
    parser.add_argument("--degree", type=int, default=100, help="edges a node")
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy and speed-up")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = noisy_communities(options.nodes, options.degree)
    model = GraphSAGE(64, 64, num_layers=2, out_channels=8)
    with pyg_accel.patched():
        train(model, data)
        model.eval()
        accuracy, milliseconds = test(model, data)
        print(f"all edges: accuracy {accuracy:.4f}, {milliseconds:.1f} ms")
        rows = {}
        widths = [4 << i for i in range((options.degree - 1).bit_length() - 1)]
        for width in tqdm(widths, desc="width"):
            with pyg_accel.sampled(width):
                found, sampled_ms = test(model, data)
            rows[width] = found, milliseconds / sampled_ms
        for width, (found, speedup) in rows.items():
            print(f"{width:9}: accuracy {found:.4f}, {speedup:.2f} times as fast")
        best = pyg_accel.calibrate_sampling(model, data, data.val_mask, max_drop=0.01)
        print(f"width to use, by the validation nodes: {best or 'all edges'}")
        if options.plot:
            plot(rows, options.plot)


if __name__ == "__main__":
    main()
