"""LGNN: two communities, found on the graph and on its line graph.

    python examples/applications/lgnn.py [--batch-size 1] [--device cuda]

Chen, Li and Bruna's network: sums over 1, 2 and 4 steps in a graph and in that of its directed
edges, where u -> v leads to v -> w but never back to u (the non-backtracking operator); both read
each other. Communities have no names: the loss is the smaller one of both ways to name them.
"""

import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.nn import SimpleConv, global_mean_pool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training
from benchmarks.tools.tasks import batches

DATA, STATIC = ("block-models",), ()


class Half(torch.nn.Module):
    """What nodes (or edges) learn in a layer, from themselves and from edges (or nodes)."""

    def __init__(self, features: int, others: int, hidden: int) -> None:
        super().__init__()
        self.own = torch.nn.Linear(5 * features + 2 * others, 2 * hidden)
        # As in the paper: by what the graphs at hand have, in evaluation too.
        self.norm = torch.nn.BatchNorm1d(2 * hidden, track_running_stats=False)
        self.sum = SimpleConv(aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor, other: Tensor, ends: Tensor, sign: Tensor,
                degree: Tensor) -> Tensor:  # fmt: skip
        two = self.sum(near := self.sum(x, edge_index), edge_index)
        four = self.sum(self.sum(two, edge_index), edge_index)
        size = (other.size(0), x.size(0))
        across = [self.sum((other, x), ends, size=size), self.sum((other, x), ends, sign, size)]
        out = self.norm(self.own(torch.cat([x, degree * x, near, two, four, *across], dim=1)))
        return torch.cat([out[:, ::2], out[:, 1::2].relu()], dim=1)


class Net(torch.nn.Module):
    """Layers of two halves; degrees are the first features."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [1] + [2 * hidden] * (layers - 1)
        self.nodes = torch.nn.ModuleList(Half(w, w, hidden) for w in widths)
        self.edges = torch.nn.ModuleList(Half(w, 2 * hidden, hidden) for w in widths)
        self.out = torch.nn.Linear(2 * hidden, 2)

    def forward(self, edge_index: Tensor, line: Tensor, ends: Tensor, sign: Tensor,
                node_degree: Tensor, edge_degree: Tensor) -> Tensor:  # fmt: skip
        x, e, back = node_degree, edge_degree, ends.flip(0)
        for nodes, edges in zip(self.nodes, self.edges, strict=True):
            x = nodes(x, edge_index, e, ends, sign, node_degree)
            e = edges(e, line, x, back, sign, edge_degree)
        return self.out(x)


def build(data: Batch) -> Net:
    return Net(16, 6)


def arguments(data: Batch) -> tuple[Tensor, ...]:
    """What the model is called with: both graphs, ends of edges with signs, degrees in both."""
    names = ("edge_index", "line_index", "end_index", "sign", "node_degree", "edge_degree")
    return tuple(data[name] for name in names)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step; returns the loss, that of the better naming of each graph."""
    optimizer.zero_grad()
    out = model.train()(*arguments(batch))
    both = [F.cross_entropy(out, y, reduction="none") for y in (batch.y, 1 - batch.y)]
    loss = global_mean_pool(torch.stack(both, dim=1), batch.batch).min(dim=1).values.mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Batch) -> float:
    """Share of the nodes of test graphs in the right community, by the better naming of each."""
    right = (model.eval()(*arguments(data)).argmax(dim=1) == data.y).float().unsqueeze(1)
    share = global_mean_pool(right, data.batch)[~data.train_mask]
    return float(torch.maximum(share, 1 - share).mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=40, lr=0.005, score="overlap", batches=batches,
        of="graphs; without it all of them",
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
