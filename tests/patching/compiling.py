"""Models to compile, and what is compared of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

F = 6


class Two(torch.nn.Module):
    def __init__(self, make: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(F, 8), make(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: GCN(F, 8, 2),
    "sage": lambda: GraphSAGE(F, 8, 2),
    "sage-max": lambda: GraphSAGE(F, 8, 2, aggr="max"),
    "gin": lambda: GIN(F, 8, 2),
    "gat": lambda: GAT(F, 8, 2, heads=2),
    "gatv2": lambda: Two(lambda i, o: pyg.GATv2Conv(i, o // 2, heads=2)),
    "transformer": lambda: Two(lambda i, o: pyg.TransformerConv(i, o // 2, heads=2)),
}


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """The others are left to the full tier."""
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.full) for n in names]


def graph(width: int = F) -> tuple[Tensor, Tensor]:
    return torch.randn(20, width), torch.randint(0, 20, (2, 60))


def batches() -> list[tuple[Tensor, Tensor]]:
    actual = []
    for nodes in (20, 30, 12, 40, 25):
        x = torch.randn(nodes, F, requires_grad=True)
        actual.append((x, torch.randint(0, nodes, (2, 3 * nodes))))
    return actual


def results(run: Callable[..., Tensor], model: torch.nn.Module, x: Tensor, edges: Tensor) -> Any:
    out = run(x, edges)
    return out, *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])
