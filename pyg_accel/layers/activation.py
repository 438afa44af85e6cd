"""MaxK as a nonlinearity: the function, and a module to use instead of ``ReLU``."""

import torch
from torch import Tensor

from pyg_accel.cbsr import CBSR
from pyg_accel.checks import shown
from pyg_accel.ops import maxk
from pyg_accel.ops.maxk import check_k

__all__ = ["MaxK", "dense_maxk", "maxk"]


def dense_maxk(x: Tensor | CBSR, k: int) -> Tensor:
    """Return [..., F] with all but the k largest features of each row set to 0.

    A CBSR is the result of MaxK already, and is converted to dense features.
    """
    if isinstance(x, CBSR):
        return x.dense()
    if not isinstance(x, Tensor) or x.dim() == 0:
        raise ValueError(f"expected 'x' to be features [..., F] or a CBSR (got {shown(x)})")
    if k >= x.size(-1):
        return x
    if x.dim() == 2:
        return maxk(x, k).dense()
    return maxk(x.reshape(-1, x.size(-1)), k).dense().view(x.shape)


class MaxK(torch.nn.Module):
    """The MaxK nonlinearity as a layer (MaxK-GNN paper, section 3.1).

    Keeps the k largest features of each row, whatever their sign, and sets the others to 0. Only
    these have gradients. Use it like ReLU between ``Linear`` layers. In front of an aggregation use
    the ``MaxK*Conv`` layers, which do not write the zeros.

    Args:
        k: how many features to keep; with no more than k features, all of them.

    Raises:
        ValueError: unless k is a whole number of at least 1.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_k(k)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., F] for x [..., F]."""
        return dense_maxk(x, self.k)

    def extra_repr(self) -> str:
        """Return the text in the brackets of the repr."""
        return f"k={self.k}"
