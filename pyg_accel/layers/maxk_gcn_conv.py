"""The graph convolution with MaxK."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import Adj, OptTensor

from pyg_accel.graph import CBSR
from pyg_accel.graph.memo import is_sparse_tensor, remembered
from pyg_accel.layers.activation import copied, masked, needs_torch
from pyg_accel.layers.aggregation import (
    Features,
    aggregate,
    compress,
    dtype_of,
    is_recorded,
    multiplies_first,
    num_nodes,
    pyg_reasons,
    written_out,
)
from pyg_accel.ops.maxk import check_k

__all__ = ["MaxKGCNConv"]


class MaxKGCNConv(GCNConv):
    """:class:`~torch_geometric.nn.conv.GCNConv` on the k largest features of every node.

    ``MaxKGCNConv(..., k=k)(x, edge_index)`` is ``GCNConv(...)(MaxK(k)(x), edge_index)``: MaxK
    replaces the ReLU in front of the layer. The cheaper order of the matrix products runs:
    ``(A h) W``, which exploits the sparsity of ``h = MaxK(k)(x)``, or PyG's ``A (h W)`` if rows of
    ``h W`` are shorter than compressed rows of h.

    Args:
        in_channels: size of each input sample, or -1.
        out_channels: size of each output sample.
        improved: self-loops count twice.
        cached: compute the normalised graph in the first call only.
        add_self_loops: by default, if ``normalize``.
        normalize: divide by the square roots of both degrees.
        bias: learn an additive bias.
        k: how many features of each node to keep.
        **kwargs: further arguments of MessagePassing; MaxK's kernels compute ``aggr="sum"`` and
            ``"mean"``; for others, PyG aggregates dense features.

    Raises:
        ValueError: unless k is a whole number of at least 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        k: int,
        **kwargs: Any,
    ) -> None:
        check_k(k)
        super().__init__(
            in_channels, out_channels, improved, cached, add_self_loops, normalize, bias, **kwargs
        )
        self.k = k

    _of_pyg = copied(GCNConv.forward, "_of_pyg")

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], or that as a CBSR.
            edge_index: as for GCNConv.
            edge_weight: [E], one per edge.

        Returns:
            [N, H].

        Raises:
            ValueError: for a pair of features, as GCNConv does.
        """
        if not torch.jit.is_scripting():
            return self._forward(x, edge_index, edge_weight)
        return self._of_pyg(masked(x, self.k), edge_index, edge_weight)

    def _forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None) -> Tensor:
        if isinstance(x, (tuple, list)) and not isinstance(x, CBSR):
            raise ValueError(
                f"{type(self).__name__} takes the features of one set of nodes (got a pair); "
                f"MaxKSAGEConv takes those of two"
            )
        if needs_torch(x):
            return self._of_pyg(masked(x, self.k), edge_index, edge_weight)
        features = compress(x, self.k)
        if self.normalize:
            edge_index, edge_weight = self._normalized(features, edge_index, edge_weight)
        by_pyg = pyg_reasons(self, features, edge_index)  # hooks expect the order of PyG
        if by_pyg or multiplies_first(self, features, edge_index, self.out_channels):
            product = self.lin(written_out(features))
            out = aggregate(self, product, edge_index, edge_weight=edge_weight)
        else:
            weight = None if edge_weight is None else edge_weight.to(dtype_of(features))
            out = self.lin(aggregate(self, features, edge_index, edge_weight=weight))
            if edge_weight is not None:  # promoted as in PyG, where weights multiply this result
                out = out.to(torch.promote_types(out.dtype, edge_weight.dtype))
        return out if self.bias is None else out + self.bias

    def _normalized(
        self, features: Features, edge_index: Any, edge_weight: Tensor | None
    ) -> tuple[Any, Tensor | None]:
        """Normalise as GCNConv; without ``cached``, the result is stored with the edge_index."""
        cached: Any = self._cached_edge_index
        if is_sparse_tensor(edge_index):
            cached = None if self._cached_adj_t is None else (self._cached_adj_t, None)
        if cached is not None:
            edge_index, edge_weight = cached
            return edge_index, edge_weight
        args = (edge_index, edge_weight, num_nodes(features), self.improved, self.add_self_loops,
                self.flow, dtype_of(features))  # fmt: skip
        # A layer must not share its cached tensors, and optimize() has to record the call.
        direct = self.cached or torch.compiler.is_compiling() or is_recorded()
        normalised = gcn_norm(*args) if direct else remembered(gcn_norm, *args)
        if is_sparse_tensor(edge_index):
            self._cached_adj_t = normalised if self.cached else None
            return normalised, None
        self._cached_edge_index = normalised if self.cached else None
        edge_index, edge_weight = normalised
        return edge_index, edge_weight

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + f", k={self.k})"
