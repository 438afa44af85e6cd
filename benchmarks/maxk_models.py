"""The networks of the MaxK experiments: with ReLU, or the same parameters with MaxK."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module, ModuleList
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import pyg_accel

CONVS: dict[str, Callable[[int], Module]] = {
    "SAGE": lambda hidden: SAGEConv(hidden, hidden),
    "GCN": lambda hidden: GCNConv(hidden, hidden),
    "GIN": lambda hidden: GINConv(Linear(hidden, hidden)),
}


class Network(Module):
    """The models of the MaxK-GNN paper: a linear map, layers behind a nonlinearity, a linear map.

    So every aggregation is of `hidden` columns and has a nonlinearity in front; the input features,
    however wide, are never aggregated.
    """

    def __init__(
        self, kind: str, inputs: int, hidden: int, layers: int, classes: int, *,
        dropout: float = 0.0, norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.last = Linear(inputs, hidden), Linear(hidden, classes)
        self.convs = ModuleList(CONVS[kind](hidden) for _ in range(layers))
        norms = [LayerNorm(hidden) if norm else torch.nn.Identity() for _ in range(layers)]
        self.norms, self.dropout = ModuleList(norms), Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(self.dropout(x.relu()), edge_index))
        return self.last(x)


def build(k: int | None, *args: Any, seed: int = 0, **options: Any) -> Module:
    """A `Network`; of one seed, those of all k and that with ReLU (None) begin alike."""
    torch.manual_seed(seed)
    network = Network(*args, **options)
    return network if k is None else pyg_accel.to_maxk(network, k)
