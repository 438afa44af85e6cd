"""GCN: which kind is a page, from the pages that it likes and that like it.

    python examples/applications/gcn.py [--data pubmed-like] [--device cuda]

Kipf and Welling's network of two layers, on Facebook's pages where PYG_ACCEL_DATA names their
folder, and on a generated citation graph of PubMed's size otherwise.
"""

import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training

DATA = ("facebook-pages", "pubmed-like")
STATIC = ()  # no layer gets the features as they are


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden)
        self.second = GCNConv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.second(x, edge_index)


def build(data: Data) -> Net:
    return Net(data.num_features, 64, int(data.y.max()) + 1)


def arguments(data: Data) -> tuple[Tensor, Tensor]:
    """What the model is called with."""
    return data.x, data.edge_index


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> float:
    """One epoch; returns the loss."""
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """Share of the test nodes that are classified correctly."""
    out = model.eval()(data.x, data.edge_index).argmax(dim=1)
    return float((out == data.y)[data.test_mask].float().mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=50, lr=0.01, weight_decay=5e-4,
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
