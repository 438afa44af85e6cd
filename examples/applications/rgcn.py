"""R-GCN: classes of the entities of a typed graph, which have no features.

    python examples/applications/rgcn.py [--data bgs-like@0.1] [--device cuda]

Schlichtkrull's network for BGS: a learned vector of 16 numbers an entity, two layers with a matrix
each of the 103 relations and their inverses, made of 40 bases. The graph is generated, and of BGS's
size with `--data bgs-like`.
"""

import argparse
import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks import tasks

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default=tasks.first(*DATA), help=f"{', '.join(DATA)}, NAME@0.1")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    pyg_accel.patch()
    torch.manual_seed(0)
    data = tasks.load(options.data).to(options.device)
    model = build(data).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    print(f"{options.data}: accuracy {test(model, data):.3f} before training")
    for _ in (progress := trange(options.epochs, unit="epoch")):
        progress.set_postfix(loss=f"{train(model, optimizer, data):.3f}", refresh=False)
    print(f"{options.data}: accuracy {test(model, data):.3f} after {options.epochs} epochs")
    pyg_accel.report()


if __name__ == "__main__":
    main()
