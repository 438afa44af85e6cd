"""MaxK and the products with CBSR matrices in plain torch, with E x k terms in memory.

``values`` and ``indices`` are CBSR rows (see :class:`pyg_accel.graph.CBSR`), in products over a
graph the rows of source nodes: [num_cols, k], contiguous. ``weight`` is [E] as ``csr.eid`` numbers
edges, or None for 1. Dense matrices are contiguous, and of the dtype of the values.
"""

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import widened
from pyg_accel.graph import CSR, ptr2index
from pyg_accel.graph.cbsr import index_dtype

__all__ = ["cbsr_dot", "cbsr_spmm", "maxk", "sspmm"]


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k < F largest elements of each row of x [N, F], contiguous.

    NaN is larger than everything, -0.0 equals 0.0, and of equal elements the lowest columns win.

    Returns:
        values [N, k] and indices [N, k] (uint8 if F <= 256, else uint16), columns ascending.
    """
    order = x.sort(dim=1, descending=True, stable=True).indices
    columns = order[:, :k].sort(dim=1).values
    return x.gather(1, columns), columns.to(index_dtype(x.size(1)))


def cbsr_spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """Aggregate CBSR features into dense rows [num_rows, width]; ``reduce`` sum or mean."""
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    terms = widened(values)[col] * _weights(csr, weight)
    target = row.unsqueeze(1) * width + indices.long()[col]
    out = terms.new_zeros(csr.num_rows * width).scatter_add_(0, target.flatten(), terms.flatten())
    out = out.view(csr.num_rows, width)
    if reduce == "mean":
        out = out / csr.rowptr.diff().clamp(min=1).unsqueeze(1)
    return out.to(values.dtype)


def sspmm(csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Compute ``out[j, s] = sum_i weight_ij * x[i, indices[j, s]]``, [num_cols, k].

    The sum is over the edges (i, j) of the graph: row i of ``csr`` has an entry in column j, row j
    of ``transposed`` one in column i. x is [num_rows, F], contiguous.
    """
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    terms = widened(x)[row.unsqueeze(1), indices.long()[col]] * _weights(csr, weight)
    return terms.new_zeros(indices.shape).index_add_(0, col, terms).to(x.dtype)


def cbsr_dot(csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Compute ``sum_s values[j, s] * x[i, indices[j, s]]`` of every edge, [E] by ``csr.eid``.

    x is [num_rows, F], contiguous.
    """
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    dots = (widened(values)[col] * widened(x)[row.unsqueeze(1), indices.long()[col]]).sum(1)
    if csr.eid is not None:
        dots = torch.empty_like(dots).index_copy_(0, csr.eid.long(), dots)
    return dots.to(values.dtype)


def _weights(csr: CSR, weight: Tensor | None) -> Tensor:
    """[E, 1] in the order of the entries, or 1."""
    if weight is None:
        return torch.ones((), device=csr.col.device)
    weight = weight if csr.eid is None else weight.index_select(0, csr.eid.long())
    return widened(weight).unsqueeze(1)
