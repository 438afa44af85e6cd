"""Layers that are recorded: of PyG, and as users write them."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import remove_self_loops, softmax

from tests.record.steps import THREE, WEIGHT, WIDTH, E, features
from tests.user_layers import Layer, Weighted, written

DEGREES = torch.tensor([0, 2, 4, 6])


def scaled(aggrs: Any = "mean", learned: bool = True) -> pyg.aggr.DegreeScalerAggregation:
    """Aggregations times one number per target, which is learned."""
    scaler = "amplification" if isinstance(aggrs, str) else ["amplification"]
    return pyg.aggr.DegreeScalerAggregation(aggrs, scaler, DEGREES, learned)


def pna(aggrs: Any = ("mean", "sum"), **options: Any) -> pyg.PNAConv:
    return pyg.PNAConv(WIDTH, 4, list(aggrs), ["identity", "attenuation"], DEGREES,
                   **{"towers": 2, **options})  # fmt: skip


# Layers of PyG, and what they take beside features and edges.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "sage": (lambda: pyg.SAGEConv(WIDTH, 4), ()),
    "sage max": (lambda: pyg.SAGEConv(WIDTH, 4, aggr="max"), ()),
    "gcn": (lambda: pyg.GCNConv(WIDTH, 4), (WEIGHT,)),
    "graph": (lambda: pyg.GraphConv(WIDTH, 4), (WEIGHT,)),
    "gin": (lambda: pyg.GINConv(nn.Linear(WIDTH, 4), train_eps=True), ()),
    "gine": (lambda: pyg.GINEConv(nn.Linear(WIDTH, 4)), (features(E, WIDTH),)),
    "gat": (lambda: pyg.GATConv(WIDTH, 4, heads=2), ()),
    "gatv2": (lambda: pyg.GATv2Conv(WIDTH, 4, heads=2), ()),
    "transformer": (lambda: pyg.TransformerConv(WIDTH, 4, heads=2), ()),
    "gine edge_dim": (lambda: pyg.GINEConv(nn.Linear(WIDTH, 4), edge_dim=3), (THREE,)),
    "gat edge_dim": (lambda: pyg.GATConv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "gatv2 edge_dim": (lambda: pyg.GATv2Conv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "transformer edge_dim": (lambda: pyg.TransformerConv(WIDTH, 4, heads=2, edge_dim=3), (THREE,)),
    "tag": (lambda: pyg.TAGConv(WIDTH, 4), ()),
    "sg": (lambda: pyg.SGConv(WIDTH, 4, K=2), ()),
    "sage several": (lambda: pyg.SAGEConv(WIDTH, 4, aggr=["mean", "sum", "std"]), ()),
    "graph scaled": (lambda: pyg.GraphConv(WIDTH, 4, aggr=scaled()), (WEIGHT,)),
    "pna": (lambda: pna(), ()),
    "pna edge_dim": (lambda: pna(towers=1, edge_dim=3), (THREE,)),
    "cg": (lambda: pyg.CGConv(WIDTH, 3), (THREE,)),
}
ATTENTION = ("gat", "gatv2", "transformer")

# -- messages of users ---------------------------------------------------------------------------

Plain = written(message=lambda self, x_j: x_j)
Unused = written(message=lambda self, x_i, x_j: x_j)
Sum = written(message=lambda self, x_i, x_j: F.leaky_relu(x_i + x_j, 0.3))
Scaled = written(message=lambda self, x_i, x_j: (x_i + x_j) * self.scale)
Rectified = written(message=lambda self, x_i, x_j: F.relu(x_i + x_j))
ByWeight = written(
    Weighted, message=lambda self, x_i, x_j, w: x_i + x_j if w is None else (x_i + x_j) * w
)


class Factor(pyg.aggr.Aggregation):
    factor = 1.0

    def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None,
                dim: int = -2) -> Tensor:  # fmt: skip
        return self.reduce(x, index, ptr, dim_size, dim, reduce="sum") * self.factor


# -- attention of users --------------------------------------------------------------------------


class Attending(Layer):
    propagate_type: ClassVar = dict(x=Any, alpha=Any)
    edge_updater_type: ClassVar = dict(s=Any)

    def edge_update(self, s_i: Tensor, s_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        return softmax(s_i + s_j, index, ptr, size_i)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha.view(-1, 1)

    def forward(self, x: Tensor, edge_index: Tensor, other: Any = None,
                change: Any = lambda alpha: alpha) -> Tensor:  # fmt: skip
        alpha = change(self.edge_updater(edge_index, s=x[:, 0].exp()))
        return self.propagate(edge_index if other is None else other, x=x, alpha=alpha)


AsNumber = written(Attending, message=lambda self, x_j, alpha: x_j * float(alpha.sum()))
Unweighted = written(Attending, message=lambda self, x_j, alpha: alpha.unsqueeze(-1))


class UnusedMask(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        unused = F.dropout(alpha, 0.5)  # noqa: F841
        return x_j * alpha.unsqueeze(-1)


class TwoMasks(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, index: Any, ptr: Any, size_i: Any) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, ptr, size_i)
        self.put_aside = F.dropout(alpha, 0.5)
        return x_j * F.dropout(alpha, 0.5).unsqueeze(-1)


class InPlace(pyg.MessagePassing):
    """Attention whose result is changed in place."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.lin = nn.Linear(WIDTH, 6)
        self.score = nn.Parameter(features(1, 2, 3))
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x).view(-1, 2, 3))
        self.change(out)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        score = ((x_i + x_j).relu() * self.score).sum(-1)
        return x_j * softmax(score, index).unsqueeze(-1)


# -- whole calls of users ------------------------------------------------------------------------


class Divided(Plain):
    """Its result has the sign of a number that may be zero."""

    def forward(self, x: Tensor, edge_index: Tensor, number: float) -> Tensor:
        return self.propagate(edge_index, x=x) * math.copysign(1.0, number)


class Positions(Layer):
    """A layer that makes tensors on the default device."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=self.lin(x))
        places = torch.arange(4.0)
        return out if places.is_meta else out * places


class ScatteredMaximum(Layer):
    """A maximum by scatter_reduce_, into zeros of which a function may change some."""

    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        out = inputs.new_zeros(dim_size, inputs.size(-1))
        self.change(out)
        index = index.view(-1, 1).expand_as(inputs)
        return out.scatter_reduce_(0, index, inputs, reduce="amax", include_self=False)


class Degrees(pyg.MessagePassing):
    """A layer that counts edges which it derives of its edge_index, maybe with learned weights."""

    def __init__(self, learned: bool) -> None:
        super().__init__(aggr="sum")
        self.weight = nn.Parameter(torch.rand(1)) if learned else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.expand(edge_index.size(1))
        edges, weight = remove_self_loops(edge_index, weight)
        places = torch.arange(edges.size(1)).view(-1, 1) / edges.size(1)
        places = places if weight is None else places * weight.view(-1, 1)
        return self.propagate(edges, x=x, places=places)

    def message(self, x_j: Tensor, places: Tensor) -> Tensor:
        return places * x_j
