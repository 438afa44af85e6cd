"""GraphSAGE on a whole graph, or on batches of sampled neighbours.

    python examples/applications/graphsage.py [--batch-size 1024] [--data products-like@0.01]

On a graph of college friends (gender from year, dorm and studies) where PYG_ACCEL_DATA names its
folder, and on a generated graph like ogbn-products otherwise.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyg_accel  # before torch_geometric: it switches on large memory pages
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import index_sort

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is never installed
from benchmarks.tools import training

DATA = ("cornell5", "products-like@0.01")
STATIC = ("x",)
FAN_OUTS = (15, 10)


def build(data: Data) -> torch.nn.Module:
    return GraphSAGE(data.num_features, 128, 2, int(data.y.max()) + 1, dropout=0.5)


def arguments(data: Data) -> tuple[Tensor, Tensor]:
    """What the model is called with."""
    return data.x, data.edge_index


class Sampler:
    """Batches of training nodes, as NeighborLoader with pyg-lib or torch-sparse draws them."""

    def __init__(self, data: Data, size: int) -> None:
        target, order = index_sort(data.edge_index[1], data.num_nodes)
        self.data, self.size, self.col = data, size, data.edge_index[0, order]
        self.rowptr = torch._convert_indices_from_coo_to_csr(target, data.num_nodes)

    def __iter__(self) -> Iterator[Data]:
        seeds = self.data.train_mask.nonzero().squeeze(1)
        for roots in seeds[torch.randperm(seeds.numel(), device=seeds.device)].split(self.size):
            yield self.drawn(roots)

    def drawn(self, roots: Tensor) -> Data:
        nodes, frontier, found, device = roots, roots, [], roots.device
        for fan_out in FAN_OUTS:
            degree = (self.rowptr[frontier + 1] - self.rowptr[frontier]).unsqueeze(1)
            edges = (torch.rand(frontier.numel(), fan_out, device=device) * degree).long()
            edges += self.rowptr[frontier].unsqueeze(1)
            some = (degree > 0).expand_as(edges)
            ends = self.col[edges[some]], frontier.unsqueeze(1).expand_as(edges)[some]
            found.append(torch.stack(ends))
            new = torch.zeros(self.data.num_nodes, dtype=torch.bool, device=device)
            new[ends[0]] = True
            new[nodes] = False
            frontier = new.nonzero().squeeze(1)
            nodes = torch.cat([nodes, frontier])
        place = torch.empty(self.data.num_nodes, dtype=torch.long, device=device)
        place[nodes] = torch.arange(nodes.numel(), device=device)
        x, y, mask = self.data.x[nodes], self.data.y[nodes], place[nodes] < roots.numel()
        return Data(x=x, y=y, edge_index=place[torch.cat(found, dim=1)], train_mask=mask)


def batches(data: Data, size: int | None) -> Iterable[Data]:
    """The graph, or batches of it where there is a size."""
    return Sampler(data, size) if size else [data]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Data) -> float:
    """One step; returns the loss."""
    model.train()
    optimizer.zero_grad()
    out = model(batch.x, batch.edge_index)[batch.train_mask]
    loss = F.cross_entropy(out, batch.y[batch.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> float:
    """Share of the test nodes that are classified correctly, on the whole graph."""
    out = model.eval()(data.x, data.edge_index).argmax(dim=1)
    return float((out == data.y)[data.test_mask].float().mean())


def main() -> None:
    pyg_accel.patch()
    training.run(
        __doc__, DATA, build, train, test, epochs=20, lr=0.01, batches=batches,
        of="of sampled nodes; without it the graph", device=False,
    )  # fmt: skip
    pyg_accel.report()


if __name__ == "__main__":
    main()
