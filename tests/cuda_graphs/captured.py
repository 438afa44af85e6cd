"""Models to capture on a GPU, or to tape without one, and their twins."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential

import pyg_accel
from tests.cuda_graphs.models import close

CUDA = torch.cuda.is_available()


DEVICE, NODES = ("cuda", 30_000) if CUDA else ("cpu", 2_000)


needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def network(one: int, two: int, edges: bool = False) -> Sequential:
    return Sequential(
        Linear(2 * one if edges else one, two), BatchNorm1d(two), ReLU(), Linear(two, two)
    )


CONVS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "GIN": lambda i, o: pyg.GINConv(network(i, o), train_eps=True),
    "GINE": lambda i, o: pyg.GINEConv(network(i, o), edge_dim=3),
    "SAGE": pyg.SAGEConv,
    "GCN": pyg.GCNConv,
    "GAT": lambda i, o: pyg.GATConv(i, o // 4, heads=4),
    "GATv2": lambda i, o: pyg.GATv2Conv(i, o // 4, heads=4, edge_dim=3),
    "Cheb": lambda i, o: pyg.ChebConv(i, o, 3),
    "PDN": lambda i, o: pyg.PDNConv(i, o, 3, 8),
    "Edge": lambda i, o: pyg.EdgeConv(network(i, o, edges=True)),
}


class Molecules(torch.nn.Module):
    """A network over batches of small graphs."""

    def __init__(self, kind: str = "GIN", hidden: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.convs = torch.nn.ModuleList([CONVS[kind](8, hidden), CONVS[kind](hidden, hidden)])
        self.norms = torch.nn.ModuleList([BatchNorm1d(hidden), pyg.GraphNorm(hidden)])
        self.head = Linear(hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            more = (edge_attr,) if self.kind in ("GINE", "GATv2", "PDN") else ()
            x = conv(x, edge_index, *more)
            x = norm(x, batch) if isinstance(norm, pyg.GraphNorm) else norm(x)
            x = x.relu()
        return self.head(pyg.global_mean_pool(x, batch) + 0.1 * pyg.global_add_pool(x, batch))


def molecules(graphs: int, seed: int) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(seed)
    nodes = torch.randint(8, 24, (graphs,), generator=numbers)
    batch = torch.repeat_interleave(torch.arange(graphs), nodes)
    starts = nodes.cumsum(0) - nodes
    which = torch.randint(len(batch), (2 * len(batch),), generator=numbers)
    one = torch.rand(len(which), generator=numbers)
    source = starts[batch[which]] + (one * nodes[batch[which]]).long()
    edge_index = torch.stack([source, which])
    rows = [torch.randn(n, f, generator=numbers) for n, f in ((len(batch), 8), (len(which), 3))]
    y = torch.randn(graphs, 1, generator=numbers)
    return tuple(t.to(DEVICE) for t in (rows[0], edge_index, rows[1], batch, y))


def twins(model: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = model.to(DEVICE)
    return copy.deepcopy(model), pyg_accel.graphed(model, **options)


def near(one: Tensor, other: Tensor, tolerance: float = 1e-3) -> None:
    close([one], [other], tolerance)
