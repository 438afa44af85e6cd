"""GraphSAGE with MaxK."""

from typing import Any

from torch import Tensor
from torch.nn.functional import normalize
from torch_geometric.nn import SAGEConv

from pyg_accel.cbsr import CBSR
from pyg_accel.layers.aggregation import (
    aggregate,
    compress,
    compress_both,
    is_plain,
    linear_map,
    multiplies_first,
    transformed,
    written_out,
)
from pyg_accel.ops.maxk import check_k

__all__ = ["MaxKSAGEConv"]


class MaxKSAGEConv(SAGEConv):
    """:class:`~torch_geometric.nn.conv.SAGEConv` on the k largest features of every node.

    ``MaxKSAGEConv(..., k=k)(x, edge_index)`` is ``SAGEConv(...)(MaxK(k)(x), edge_index)``: MaxK
    stands where the ReLU in front of the layer would, for neighbours and root alike. With
    ``project=True`` it takes the place of the layer's own ReLU instead, between projection and
    aggregation, and the root's features stay as they are.

    The matrix products are bracketed as costs less: ``(A h) W`` sums up compressed features,
    ``A (h W)`` multiplies them, which pays where outputs are few, and on a CPU where edges are.

    Other aggregations than sum and mean are right too, but PyG's, on features with their zeros;
    ``pyg_accel.report()`` says so.

    Args:
        in_channels: size of each input sample, or -1; a tuple for source and target features.
        out_channels: size of each output sample.
        aggr: as for SAGEConv; MaxK's kernels compute ``"mean"`` and ``"sum"``.
        normalize: scale every output to length 1.
        root_weight: add transformed features of the root node.
        project: transform the features of neighbours before they are aggregated.
        bias: learn an additive bias.
        k: how many features of each node to keep.
        **kwargs: further arguments of MessagePassing.

    Raises:
        ValueError: unless k is a whole number of at least 1.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: Any = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        *,
        k: int,
        **kwargs: Any,
    ) -> None:
        check_k(k)
        super().__init__(
            in_channels, out_channels, aggr, normalize, root_weight, project, bias, **kwargs
        )
        self.k = k

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], that as a CBSR, or a pair of them for source and target nodes, the second of
                which may be None.
            edge_index: whatever SAGEConv takes.
            size: numbers of source and target nodes.

        Returns:
            [N, H].
        """
        if self.project:
            x = (x, x) if isinstance(x, (Tensor, CBSR)) else x
            x = (compress(self.lin(written_out(x[0])), self.k), x[1])
        else:
            x = compress_both(x, self.k)
        lin = self.lin_l
        if is_plain(lin) and multiplies_first(self, x[0], edge_index, self.out_channels):
            product = linear_map(x[0], lin.weight)
            out = aggregate(self, (product, x[1]), edge_index, size)
            # Under autocast the product is narrower than the bias, and PyG's linear map adds both.
            out = out if lin.bias is None else out + lin.bias.to(out.dtype)
        else:
            out = lin(aggregate(self, x, edge_index, size))
        if self.root_weight and x[1] is not None:
            out = out + transformed(self.lin_r, x[1])
        return normalize(out, p=2.0, dim=-1) if self.normalize else out

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", k={self.k})"
