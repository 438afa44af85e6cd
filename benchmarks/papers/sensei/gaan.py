"""GaAN's layer, which PyG lacks (Zhang et al., 2018, arXiv:1803.07294), for `optimize()`.

Attention by dot products, each head times a gate. `lifts` promises that the code of the attention
does the same in every call of a kind; then its values are a product of matrices that may be
multiplied in either order, `α (X W)` or `(α X) W`, as in the SENSEi paper. For that the values are
linear in the features: the leaky ReLU behind them that GaAN has by default is left out. Gates come
after the attention, whatever its order.
"""

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.nn import MessagePassing, SimpleConv
from torch_geometric.utils import softmax

WIDTH = 24  # of keys, and of what a gate hears of the neighbours


class DotAttention(MessagePassing):
    """x [N, F] to [N, heads * out]: what each head takes from the neighbours, before its gate."""

    def __init__(self, in_channels: int, out_channels: int, heads: int = 1) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.heads, self.out_channels = heads, out_channels
        self.query, self.key = (Linear(in_channels, heads * WIDTH) for _ in range(2))
        self.value = Linear(in_channels, heads * out_channels, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        query = self.query(x).view(-1, self.heads, WIDTH)
        key = self.key(x).view(-1, self.heads, WIDTH)
        value = self.value(x).view(-1, self.heads, self.out_channels)
        return self.propagate(edge_index, query=query, key=key, value=value).flatten(1)

    def message(
        self, query_i: Tensor, key_j: Tensor, value_j: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        alpha = softmax((query_i * key_j).sum(-1), index, num_nodes=size_i)
        return alpha.unsqueeze(-1) * value_j


class GaANConv(Module):
    """The layer; gates read the node, the maximum of what its neighbours say, and their mean."""

    def __init__(self, in_channels: int, out_channels: int, heads: int = 8) -> None:
        super().__init__()
        self.attention = DotAttention(in_channels, out_channels, heads)
        self.most, self.mean = SimpleConv(aggr="max"), SimpleConv(aggr="mean")
        self.said = Linear(in_channels, WIDTH)
        self.gate = Linear(2 * in_channels + WIDTH, heads)
        self.out = Linear(in_channels + heads * out_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        most, mean = self.most(self.said(x), edge_index), self.mean(x, edge_index)
        gate = self.gate(torch.cat([x, most, mean], dim=-1)).sigmoid().unsqueeze(-1)
        heads = self.attention(x, edge_index).unflatten(1, (gate.size(1), -1))
        return self.out(torch.cat([x, (heads * gate).flatten(1)], dim=-1))
