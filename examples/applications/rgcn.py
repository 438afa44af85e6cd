"""R-GCN: classes of the entities of a typed graph, which have no features.

    python examples/applications/rgcn.py [--data bgs-like@0.1] [--device cuda]

Schlichtkrull's network for BGS: a learned vector of 16 numbers an entity, two layers with a matrix
each of the 103 relations and their inverses, made of 40 bases. The graph is generated, and of BGS's
size with `--data bgs-like`.
"""

import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training

DATA = ("bgs-like@0.1",)
STATIC = ()


class Net(torch.nn.Module):
    """Vectors of the entities, and two layers."""

    def __init__(self, entities: int, relations: int, classes: int) -> None:
        super().__init__()
        self.entities = torch.nn.Embedding(entities, 16)
        self.first = RGCNConv(16, 16, relations, num_bases=40)
        self.second = RGCNConv(16, classes, relations, num_bases=40)

    def forward(self, nodes: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.first(self.entities(nodes), edge_index, edge_type).relu()
        return self.second(x, edge_index, edge_type)


def build(data: Data) -> Net:
    return Net(data.num_nodes, data.num_relations, int(data.y.max()) + 1)


def arguments(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """What the model is called with."""
    if "nodes" not in data:
        data.nodes = torch.arange(data.num_nodes, device=data.y.device)
    return data.nodes, data.edge_index, data.edge_type


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> float:
    """One epoch; returns the loss."""
    model.train()
    optimizer.zero_grad()
    out = model(*arguments(data))
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """Share of the test entities that are classified correctly."""
    out = model.eval()(*arguments(data)).argmax(dim=1)
    return float((out == data.y)[data.test_mask].float().mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=30, lr=0.01,
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
