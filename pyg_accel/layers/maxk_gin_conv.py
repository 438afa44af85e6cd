"""The graph isomorphism layer with MaxK."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_accel.layers.activation import copied, masked_pair, needs_torch
from pyg_accel.layers.aggregation import aggregate, compress_both, written_out
from pyg_accel.ops.maxk import check_k

__all__ = ["MaxKGINConv"]


class MaxKGINConv(GINConv):
    """:class:`~torch_geometric.nn.conv.GINConv` on the k largest features of every node.

    ``MaxKGINConv(nn, k=k)(x, edge_index)`` is ``GINConv(nn)(MaxK(k)(x), edge_index)``: MaxK
    replaces the ReLU in front of the layer, for neighbours and root.

    Args:
        nn: the network that transforms the sums, [N, F] to [N, H].
        eps: initial value; the root is multiplied by ``1 + eps``.
        train_eps: learn eps.
        k: how many features of each node to keep.
        **kwargs: further arguments of MessagePassing; MaxK's kernels compute ``aggr="sum"`` and
            ``"mean"``; for others, PyG aggregates dense features.

    Raises:
        ValueError: unless k is a whole number of at least 1.
    """

    def __init__(
        self,
        nn: Callable[..., Any],
        eps: float = 0.0,
        train_eps: bool = False,
        *,
        k: int,
        **kwargs: Any,
    ) -> None:
        check_k(k)
        super().__init__(nn, eps, train_eps, **kwargs)
        self.k = k

    _of_pyg = copied(GINConv.forward, "_of_pyg")

    def forward(self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], that as a CBSR, or a pair of them for source and target nodes, the second of
                which may be None.
            edge_index: as for GINConv.
            size: numbers of source and target nodes.

        Returns:
            [N, H].
        """
        if not torch.jit.is_scripting():
            return self._forward(x, edge_index, size)
        return self._of_pyg(masked_pair(x, self.k), edge_index, size)

    def _forward(self, x: Any, edge_index: Any, size: Any) -> Tensor:
        if needs_torch(x):
            return self._of_pyg(masked_pair(x, self.k), edge_index, size)
        x = compress_both(x, self.k)
        out = aggregate(self, x, edge_index, size)
        if x[1] is not None:
            out = out + (1 + self.eps) * written_out(x[1])
        result: Tensor = self.nn(out)
        return result

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", k={self.k})"
