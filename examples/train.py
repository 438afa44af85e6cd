"""Somebody's training script. It knows nothing of pyg_accel.

    python examples/train.py                      # PyG as it is
    python -m pyg_accel run examples/train.py     # the same under patch(), then the report

Two of its layers are accelerated; the report says why the third is not.
"""

import time

import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn import EdgeConv, GATConv, SAGEConv


class Net(torch.nn.Module):
    """Three layers, the last of them with a network on every edge."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv(features, hidden)
        self.second = GATConv(hidden, hidden // 4, heads=4)
        self.third = EdgeConv(Sequential(Linear(2 * hidden, 32), ReLU(), Linear(32, classes)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.third(x, edge_index)


def main() -> None:
    torch.manual_seed(0)
    nodes, edges = 10_000, 200_000
    x, edge_index = torch.randn(nodes, 64), torch.randint(nodes, (2, edges))
    y = torch.randint(8, (nodes,))
    model = Net(64, 64, 8)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(5):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}, {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
