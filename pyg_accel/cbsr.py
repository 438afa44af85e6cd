"""The CBSR format: a matrix with the same number of stored entries in every row."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CBSR", "MAX_WIDTH", "index_dtype"]

MAX_WIDTH = 65_536


def index_dtype(width: int) -> torch.dtype:
    """Return the dtype of column indices: uint8 up to 256 columns, uint16 up to 65,536.

    Raises:
        ValueError: for a wider matrix.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"CBSR holds at most {MAX_WIDTH} columns (got {width})")
    return torch.uint8 if width <= 256 else torch.uint16


class CBSR(NamedTuple):
    """Compressed balanced sparse rows (MaxK-GNN paper, section 3.2): k entries in each row.

    The columns of a row ascend and are distinct; kernels rely on it and nothing checks it. Entries
    may be zero. uint16 has few operators in torch: take ``indices.long()`` to compute with it.

    Attributes:
        values: [N, k], floating point.
        indices: [N, k], the columns: uint8 if ``width <= 256``, else uint16.
        width: F, the columns of the dense matrix.
    """

    values: Tensor
    indices: Tensor
    width: int

    @property
    def k(self) -> int:
        """Entries of each row."""
        return self.values.size(1)

    def dense(self) -> Tensor:
        """Return the matrix [N, F], zero where nothing is stored; differentiable."""
        zeros = self.values.new_zeros(self.values.size(0), self.width)
        return zeros.scatter(1, self.indices.long(), self.values)

    @classmethod
    def from_dense(cls, dense: Tensor, k: int | None = None) -> "CBSR":
        """Store the nonzero entries of a matrix; rows with fewer than k also store some zeros.

        Args:
            dense: [N, F], floating point. Gradients flow to the entries that are stored.
            k: entries of each row; by default as many as the fullest row has (at least 1).

        Raises:
            ValueError: for a malformed matrix, or a row with more than k nonzero entries (to keep
                the largest ones is what ``ops.maxk`` does).
        """
        if not isinstance(dense, Tensor) or dense.dim() != 2 or not dense.is_floating_point():
            raise ValueError("expected 'dense' to be a floating-point tensor [N, F]")
        rows, width = dense.shape
        dtype = index_dtype(width)
        if width == 0:
            raise ValueError("expected 'dense' to have at least one column")
        most = int((dense != 0).sum(1).max()) if rows else 0
        k = max(most, 1) if k is None else k
        if not max(most, 1) <= k <= width:
            raise ValueError(
                f"expected 'k' between {max(most, 1)}, the entries of the fullest row, and {width} "
                f"(got {k}); ops.maxk keeps the largest ones"
            )
        nonzero_first = (dense == 0).to(torch.uint8).argsort(dim=1, stable=True)
        columns = nonzero_first[:, :k].sort(dim=1).values
        return cls(dense.gather(1, columns), columns.to(dtype), width)
