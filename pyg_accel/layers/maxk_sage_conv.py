"""GraphSAGE with MaxK."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize
from torch_geometric.nn import SAGEConv
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_accel.graph import CBSR
from pyg_accel.layers.activation import masked, masked_pair, needs_torch
from pyg_accel.layers.aggregation import (
    aggregate,
    compress,
    compress_both,
    is_plain,
    multiplies_first,
    written_out,
)
from pyg_accel.ops.maxk import check_k

__all__ = ["MaxKSAGEConv"]


class MaxKSAGEConv(SAGEConv):
    """:class:`~torch_geometric.nn.conv.SAGEConv` on the k largest features of every node.

    ``MaxKSAGEConv(..., k=k)(x, edge_index)`` is ``SAGEConv(...)(MaxK(k)(x), edge_index)``: MaxK
    replaces the ReLU in front of the layer, for neighbours and root. With ``project=True`` it
    replaces the ReLU inside of the layer instead, between projection and aggregation, and features
    of the root are unchanged.

    The cheaper order of the matrix products runs: ``(A h) W`` aggregates compressed features,
    ``A (h W)`` dense ones, which is faster with few outputs.

    For other aggregations than sum and mean, PyG aggregates dense features;
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

    def forward(self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], that as a CBSR, or a pair of them for source and target nodes, the second of
                which may be None.
            edge_index: as for SAGEConv.
            size: numbers of source and target nodes.

        Returns:
            [N, H].
        """
        if not torch.jit.is_scripting():
            return self._forward(x, edge_index, size)
        return self._by_torch(x, edge_index, size)

    def _by_torch(self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size) -> Tensor:
        """Run the layer by functions of torch and PyG, as TorchScript compiles it."""
        if self.project and hasattr(self, "lin"):
            pair = (x, x) if isinstance(x, Tensor) else x
            pair = (masked(self.lin(pair[0]), self.k), pair[1])
        else:
            pair = masked_pair(x, self.k)
        # propagate_type: (x: OptPairTensor)
        out = self.lin_l(self.propagate(edge_index, x=pair, size=size))
        root = pair[1]
        if hasattr(self, "lin_r") and root is not None:
            out = out + self.lin_r(root)
        return normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _forward(self, x: Any, edge_index: Any, size: Any) -> Tensor:
        if needs_torch(x):
            return self._by_torch(x, edge_index, size)
        if self.project:
            x = (x, x) if isinstance(x, (Tensor, CBSR)) else x
            x = (compress(self.lin(written_out(x[0])), self.k), x[1])
        else:
            x = compress_both(x, self.k)
        lin = self.lin_l
        if is_plain(lin) and multiplies_first(self, x[0], edge_index, self.out_channels):
            product = linear(written_out(x[0]), lin.weight)
            out = aggregate(self, (product, x[1]), edge_index, size)
            # Under autocast the product has a lower precision than the bias.
            out = out if lin.bias is None else out + lin.bias.to(out.dtype)
        else:
            out = lin(aggregate(self, x, edge_index, size))
        if self.root_weight and x[1] is not None:
            out = out + self.lin_r(written_out(x[1]))
        return normalize(out, p=2.0, dim=-1) if self.normalize else out

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", k={self.k})"
