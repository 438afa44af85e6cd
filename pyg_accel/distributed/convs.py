"""Layers that reverse edges, over the nodes of all ranks.

As for norms, the ``__class__`` of a module in the model is set to a subclass below.
"""

import torch
from torch import Tensor
from torch_geometric.nn import DirGNNConv

from pyg_accel.distributed.tracking import RUNNING, Following

__all__ = ["CONVS"]


class AllNodesDirGNNConv(DirGNNConv):
    """``DirGNNConv`` that reverses the edges of all ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run the layer."""
        if RUNNING.wire is None:
            return super().forward(x, edge_index)
        with Following():
            return super().forward(x, edge_index)


CONVS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {DirGNNConv: AllNodesDirGNNConv}
