"""MoNet: convolution with Gaussian kernels of the degrees at both ends of an edge.

    python examples/applications/monet.py [--data pubmed-like] [--device cuda]

On Facebook's pages where PYG_ACCEL_DATA names their folder, and on a generated citation graph of
PubMed's size otherwise; three kernels of two pseudo-coordinates, as the paper has them for
citations.
"""

import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GMMConv
from torch_geometric.utils import degree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training

DATA = ("facebook-pages", "pubmed-like")
STATIC = ("x", "pseudo")


class Net(torch.nn.Module):
    """Two layers of three kernels."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GMMConv(features, hidden, dim=2, kernel_size=3)
        self.second = GMMConv(hidden, classes, dim=2, kernel_size=3)

    def forward(self, x: Tensor, edge_index: Tensor, pseudo: Tensor) -> Tensor:
        x = self.first(x, edge_index, pseudo).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.second(x, edge_index, pseudo)


def build(data: Data) -> Net:
    return Net(data.num_features, 32, int(data.y.max()) + 1)


def arguments(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """What the model is called with: one over the root of the degree, at both ends of an edge."""
    if "pseudo" not in data:
        source, target = data.edge_index
        scale = (degree(target, data.num_nodes) + 1).rsqrt()
        data.pseudo = torch.stack([scale[source], scale[target]], dim=1)
    return data.x, data.edge_index, data.pseudo


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
    """Share of the test nodes that are classified correctly."""
    out = model.eval()(*arguments(data)).argmax(dim=1)
    return float((out == data.y)[data.test_mask].float().mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=50, lr=0.01,
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
