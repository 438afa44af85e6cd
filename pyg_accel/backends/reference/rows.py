"""The row of every entry of a CSR matrix."""

import torch
from torch import Tensor

from pyg_accel.graph import CSR

__all__ = ["rows_of"]


def rows_of(csr: CSR) -> Tensor:
    """[E], the row of every entry."""
    rows = torch.arange(csr.num_rows, device=csr.col.device)
    return rows.repeat_interleave((csr.rowptr[1:] - csr.rowptr[:-1]).long())
