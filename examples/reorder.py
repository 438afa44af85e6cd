"""Renumber the nodes of a graph once, and train faster on it with the same results.

    python examples/reorder.py

Real graphs have communities, and ids that know nothing of them. `reorder` puts the members of a
community next to one another, so that the rows which a kernel gathers are still in the cache.
"""

import time

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE


def shuffled_communities(nodes: int, groups: int, degree: int, width: int) -> Data:
    """A graph where nine of ten edges stay inside a community, and ids are drawn at random."""
    source = torch.randint(nodes, (nodes * degree // 2,))
    size = nodes // groups
    near = source // size * size + torch.randint(size, source.shape)
    target = torch.where(torch.rand(source.shape) < 0.9, near, torch.randint(nodes, source.shape))
    edges = torch.randperm(nodes)[torch.stack([source, target])]
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    y = torch.randint(16, (nodes,))
    mask = torch.rand(nodes) < 0.5
    return Data(x=torch.randn(nodes, width), edge_index=edges, y=y, train_mask=mask)


def train(data: Data, steps: int = 4) -> tuple[Tensor, float]:
    """Outputs after a few steps of training, and the median milliseconds of a step."""
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 128, num_layers=2, out_channels=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = torch.nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    with torch.no_grad():
        return model(data.x, data.edge_index), 1e3 * sorted(times)[steps // 2]


def main() -> None:
    torch.manual_seed(0)
    data = shuffled_communities(nodes=200_000, groups=400, degree=20, width=128)

    result = pyg_accel.reorder(data)
    print(result)
    ordered, inverse = result  # ids of the old graph: inverse[ids]; rows of a result: out[inverse]

    with pyg_accel.patched():
        expected, shuffled_ms = train(data)
        out, ordered_ms = train(ordered)
    print(f"a step of training: {shuffled_ms:.0f} ms shuffled, {ordered_ms:.0f} ms in this order")
    print(f"outputs in the old order differ by {(out[inverse] - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
