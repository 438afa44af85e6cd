"""The attention of GaAN, which PyG lacks (Zhang et al., 2018, arXiv:1803.07294), for `optimize()`.

Its values are a product of matrices that may be multiplied in either order, `α (X W)` or
`(α X) W`, as in the SENSEi paper. For that they are linear in the features: the leaky ReLU behind
them that GaAN has by default is left out. So are its gates, which come after the attention.
"""

from torch import Tensor
from torch.nn import Linear
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

WIDTH = 24  # of queries and keys


class DotAttention(MessagePassing):
    """Attention by dot products: x [N, F] to [N, heads * out]."""

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
