"""GAT: twelve properties of molecules, from attention between bound atoms.

    python examples/applications/gat.py [--batch-size 128] [--device cuda]

The predictor of DGL's life sciences: two attention layers, and the mean and the maximum over the
atoms of a molecule. Molecules are generated, as many and as large as those of Tox21, and all of
them are one batch unless `--batch-size` says otherwise.
"""

import sys
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.nn import GATConv, global_max_pool, global_mean_pool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training
from benchmarks.tools.tasks import batches

DATA = ("molecules-like",)
STATIC = ("x",)


class Net(torch.nn.Module):
    """Two layers of attention, a readout, and a network behind it."""

    def __init__(self, features: int, hidden: int, targets: int, heads: int = 4) -> None:
        super().__init__()
        self.first = GATConv(features, hidden, heads)
        self.second = GATConv(hidden * heads, hidden, heads)
        self.out = torch.nn.Sequential(
            torch.nn.Linear(2 * hidden * heads, 128), torch.nn.ReLU(), torch.nn.Linear(128, targets)
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        x = F.elu(self.first(x, edge_index))
        x = F.elu(self.second(x, edge_index))
        pooled = [global_mean_pool(x, batch, size), global_max_pool(x, batch, size)]
        return self.out(torch.cat(pooled, dim=1))


def build(data: Batch) -> Net:
    return Net(data.num_features, 32, data.y.size(1))


def arguments(data: Batch) -> tuple[Tensor, Tensor, Tensor, int]:
    """What the model is called with."""
    return data.x, data.edge_index, data.batch, data.num_graphs


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step; returns the loss."""
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model.train()(*arguments(batch)), batch.y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Batch) -> float:
    """Share of the properties of test molecules that are told correctly."""
    out = model.eval()(*arguments(data)) > 0
    return float((out == data.y)[~data.train_mask].float().mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=30, lr=0.005, batches=batches,
        of="molecules; without it all of them",
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
