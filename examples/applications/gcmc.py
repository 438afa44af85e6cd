"""GC-MC: ratings of films, completed from the ratings that are known.

    python examples/applications/gcmc.py [--data ml-1m-like] [--device cuda]

A graph auto-encoder: users and films have learned vectors, a known rating is an edge of one of five
kinds in either direction, the encoder has a matrix for each kind, and the decoder scores each mark
from 1 to 5 of a pair by products of both. On Douban's ratings where PYG_ACCEL_DATA names their
folder, and on generated ones of MovieLens-1M's size otherwise.
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

DATA = ("douban", "ml-1m-like")
STATIC = ()
MARKS, BASES = 5, 2


class Net(torch.nn.Module):
    """The encoder of the nodes, then the decoder of pairs."""

    def __init__(self, nodes: int, hidden: int, out: int) -> None:
        super().__init__()
        self.nodes = torch.nn.Embedding(nodes, hidden)
        self.encoder = RGCNConv(hidden, hidden, 2 * MARKS)
        self.dense = torch.nn.Linear(hidden, out)
        self.bases = torch.nn.Linear(out, BASES * out, bias=False)
        self.marks = torch.nn.Linear(BASES, MARKS)

    def forward(self, edge_index: Tensor, edge_type: Tensor, pairs: Tensor) -> Tensor:
        x = F.dropout(self.nodes.weight, p=0.3, training=self.training)
        x = self.dense(self.encoder(x, edge_index, edge_type).relu())
        user, film = self.bases(x)[pairs[0]], x[pairs[1]].unsqueeze(1)
        return self.marks((user.view(-1, BASES, film.size(-1)) * film).sum(dim=-1))


def build(data: Data) -> Net:
    return Net(data.num_nodes, 64, 32)


def arguments(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """What the model is called with."""
    return data.edge_index, data.edge_type, data.train


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> float:
    """One epoch over all training ratings; returns the loss."""
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(*arguments(data)), data.y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """The root of the mean squared error of the expected mark of test pairs."""
    chances = model.eval()(data.edge_index, data.edge_type, data.test).softmax(dim=1)
    expected = chances @ torch.arange(MARKS, device=chances.device, dtype=chances.dtype)
    return float((expected - data.test_y).square().mean().sqrt())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=60, lr=0.01, score="error",
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
