"""Inference on a part of each node's edges: calibrate, serve, read the report.

    python examples/sampled_inference.py [figure.png]

Trains GraphSAGE on a graph of 180 edges a node and finds the smallest width, the number of edges
that are read of a node, at which the validation nodes lose at most 0.01 of accuracy. Then it prints
accuracy and time on the test nodes, over all edges and at that width. Test nodes may lose
more than 0.01, because the width was chosen by the validation nodes. With a path it draws accuracy
by width.
"""

import sys
import time

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE


def noisy_communities(nodes: int = 10_000, degree: int = 180, classes: int = 8) -> Data:
    """Features that say little by themselves; a quarter of all edges is drawn inside a class."""
    y = torch.randint(classes, (nodes,)).sort().values
    target = torch.arange(nodes).repeat_interleave(degree)
    first, count = torch.searchsorted(y, torch.arange(classes)), torch.bincount(y)
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


def test(model: torch.nn.Module, data: Data) -> tuple[float, float]:
    """Accuracy on the test nodes, and milliseconds."""
    start = time.perf_counter()
    with torch.no_grad():
        out: Tensor = model(data.x, data.edge_index)
    milliseconds = 1e3 * (time.perf_counter() - start)
    hits = out[data.test_mask].argmax(-1) == data.y[data.test_mask]
    return float(hits.double().mean()), milliseconds


def main() -> None:
    torch.manual_seed(0)
    data = noisy_communities()
    model = GraphSAGE(64, 64, num_layers=2, out_channels=8)
    pyg_accel.patch()
    train(model, data)

    found = pyg_accel.calibrate_sampling(model, data, data.val_mask, max_drop=0.01)
    print(found)
    for path in sys.argv[1:]:
        found.plot(path)
        print(f"drawn: {path}")

    pyg_accel.reset_report()
    model.eval()
    print("test nodes, all edges:  accuracy {:.4f}, {:.1f} ms".format(*test(model, data)))
    if found.width is not None:
        with pyg_accel.sampled(found.width):
            print("test nodes, sampled:    accuracy {:.4f}, {:.1f} ms".format(*test(model, data)))
    pyg_accel.report()


if __name__ == "__main__":
    main()
