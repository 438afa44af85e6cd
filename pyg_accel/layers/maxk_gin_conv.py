"""The graph isomorphism layer with MaxK."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import GINConv

from pyg_accel.layers.aggregation import KeepsLargest, aggregate, compress_both, written_out

__all__ = ["MaxKGINConv"]


class MaxKGINConv(KeepsLargest, GINConv):
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

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], that as a CBSR, or a pair of them for source and target nodes, the second of
                which may be None.
            edge_index: as for GINConv.
            size: numbers of source and target nodes.

        Returns:
            [N, H].
        """
        x = compress_both(x, self.k)
        out = aggregate(self, x, edge_index, size)
        if x[1] is not None:
            out = out + (1 + self.eps) * written_out(x[1])
        result: Tensor = self.nn(out)
        return result
