"""Layers with a network on every edge, and what they are called with."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP
from torch_geometric.nn import conv as pyg

from tests.user_layers import Weighted, written

N, E = 40, 300


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Mine(Weighted):
    """A user's network of both ends and the edge."""

    def __init__(self, network: nn.Module, aggr: str = "sum") -> None:
        super().__init__(aggr, network=network)

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return self.network(torch.cat([x_i, x_j, w], dim=-1))


def best(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    """Looks at the largest number of a message, and at where it is."""
    out = self.network(torch.cat([x_i, x_j], dim=-1))
    best, place = out.max(dim=-1, keepdim=True)
    least, _ = torch.min(out, 1, True)
    return (out - least) / (best - least + 1) * (1 + place.to(out.dtype))


# A matrix of every edge, chosen by a product of the user's own.
PRODUCT = written(Weighted, message=lambda self, x_j, w: torch.bmm(
    x_j.unsqueeze(1), self.network(w).view(-1, 18, 20)).view(-1, 20))  # fmt: skip


BEST = written(message=best)


# Reads the same features as sources and as targets, and others that are made of them.
NORMALISED_PRODUCT = written(
    propagate_type=dict(x=Any, wave=Any),
    forward=lambda self, x, edge_index: self.propagate(edge_index, x=x, wave=x.sin()),
    message=lambda self, x_i, x_j, wave_j: nn.functional.layer_norm(
        x_i * x_j + wave_j, x_j.shape[1:]),
)  # fmt: skip


def world(*names: str, nodes: int = N, edges: int = E) -> tuple[Any, ...]:
    """A graph with a hub, duplicates and idle nodes, and what layers take beside it."""
    edge_index = torch.randint(0, nodes - 4, (2, edges))
    edge_index[1, :70] = 3
    edge_index[:, 70:80] = edge_index[:, 80:90]
    made = {
        "x": torch.randn(nodes, 18, dtype=torch.double, requires_grad=True),
        "pos": torch.randn(nodes, 3, dtype=torch.double, requires_grad=True),
        "normal": torch.randn(nodes, 3, dtype=torch.double, requires_grad=True),
        "e": torch.randn(edges, 5, dtype=torch.double, requires_grad=True),
        "edges": edge_index,
    }
    if "history" in names:
        made["history"] = torch.randn(nodes, 3, 18, dtype=torch.double, requires_grad=True)
    return tuple(made[name] for name in names)


X_E, X = ("x", "edges", "e"), ("x", "edges")


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "nn": (lambda: pyg.NNConv(18, 20, mlp(5, 7, 360)), X_E),
    "nn-mean": (lambda: pyg.NNConv(18, 20, mlp(5, 7, 9, 360), aggr="mean"), X_E),
    "nn-linear": (lambda: pyg.NNConv(18, 20, nn.Linear(5, 360, bias=False)), X_E),
    "nn-max": (lambda: pyg.NNConv(18, 20, mlp(5, 360), aggr="max"), X_E),
    "nn-mlp": (lambda: pyg.NNConv(18, 20, MLP([5, 7, 360], norm=None)), X_E),
    "nn-in-place": (lambda: pyg.NNConv(18, 20, nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 360))), X_E),
    "product": (NORMALISED_PRODUCT, X),
    "bmm": (lambda: PRODUCT("mean", network=mlp(5, 7, 360)), X_E),
    "edge": (lambda: pyg.EdgeConv(mlp(36, 20, 24)), X),
    "edge-mean": (lambda: pyg.EdgeConv(mlp(36, 20, 24), aggr="mean"), X),
    "edge-several": (lambda: pyg.EdgeConv(mlp(36, 20, 24), aggr=["sum", "max", "std"]), X),
    "edge-elu": (
        lambda: pyg.EdgeConv(MLP([36, 20, 24, 8], norm=None, act="elu"), aggr="sum"), X),
    "edge-layer-norm": (lambda: pyg.EdgeConv(nn.Sequential(
        nn.Linear(36, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 24))), X),
    "edge-batch-norm-eval": (lambda: pyg.EdgeConv(MLP([36, 20, 24])).eval(), X),
    "edge-dropout-eval": (
        lambda: pyg.EdgeConv(MLP([36, 20, 24], norm=None, dropout=0.5)).eval(), X),
    "point-net": (lambda: pyg.PointNetConv(mlp(21, 20, 24)), ("x", "pos", "edges")),
    "point-net-no-network": (lambda: pyg.PointNetConv(None), ("x", "pos", "edges")),
    "point-gnn": (
        lambda: pyg.PointGNNConv(mlp(18, 3), mlp(21, 20, 24), mlp(24, 18)), ("x", "pos", "edges")),
    "ppf": (
        lambda: pyg.PPFConv(mlp(22, 20, 24), add_self_loops=False),
        ("x", "pos", "normal", "edges")),
    "cg": (lambda: pyg.CGConv(18, 5), X_E),
    "pna": (
        lambda: pyg.PNAConv(
            18, 20, ["mean", "max", "std"], ["identity", "amplification"],
            torch.tensor([4, 5, 9, 9]), edge_dim=5, towers=2, pre_layers=2,
        ),
        X_E,
    ),
    "dna": (lambda: pyg.DNAConv(18), ("history", "edges")),
    "dna-heads": (lambda: pyg.DNAConv(18, heads=3, bias=False), ("history", "edges")),
    "best": (lambda: BEST("mean", network=mlp(36, 20, 24)), X),
    "mine": (lambda: Mine(mlp(41, 20, 24)), X_E),
    "mine-max": (lambda: Mine(mlp(41, 20, 20, 24), aggr="max"), X_E),
}  # fmt: skip


def case(name: str, **sizes: int) -> tuple[Any, tuple[Any, ...]]:
    """A layer, and what it is called with."""
    make, names = LAYERS[name]
    return make().double(), world(*names, **sizes)
