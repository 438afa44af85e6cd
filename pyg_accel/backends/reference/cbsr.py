"""MaxK and the products with CBSR matrices in plain torch, E x k terms written out."""

import torch
from torch import Tensor

from pyg_accel.cbsr import CBSR, index_dtype, scattered
from pyg_accel.graph import CSR, ptr2index

__all__ = ["dot", "maxk", "mm", "mm_t", "sddmm", "spmm", "sspmm"]


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :meth:`pyg_accel.backends.Backend.maxk`."""
    order = x.sort(dim=1, descending=True, stable=True).indices
    columns = order[:, :k].sort(dim=1).values
    return x.gather(1, columns), columns.to(index_dtype(x.size(1)))


def spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_spmm`."""
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    terms = _wide(values)[col] * _weights(csr, weight)
    place = row.unsqueeze(1) * width + indices.long()[col]
    out = terms.new_zeros(csr.num_rows * width).scatter_add_(0, place.flatten(), terms.flatten())
    out = out.view(csr.num_rows, width)
    if reduce == "mean":
        out = out / csr.rowptr.diff().clamp(min=1).unsqueeze(1)
    return out.to(values.dtype)


def sspmm(csr: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.sspmm`."""
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    terms = _wide(x)[row.unsqueeze(1), indices.long()[col]] * _weights(csr, weight)
    return terms.new_zeros(indices.shape).index_add_(0, col, terms).to(x.dtype)


def dot(csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_dot`."""
    row, col = ptr2index(csr.rowptr, csr.col.numel()), csr.col.long()
    found = (_wide(values)[col] * _wide(x)[row.unsqueeze(1), indices.long()[col]]).sum(1)
    if csr.eid is not None:
        found = torch.empty_like(found).index_copy_(0, csr.eid.long(), found)
    return found.to(values.dtype)


def mm(values: Tensor, indices: Tensor, width: int, dense: Tensor) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_mm`."""
    return scattered(CBSR(values, indices, width)) @ dense


def sddmm(x: Tensor, indices: Tensor, dense: Tensor) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_sddmm`."""
    return (x @ dense.t()).gather(1, indices.long())


def mm_t(values: Tensor, indices: Tensor, width: int, x: Tensor) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_mm_t`."""
    return scattered(CBSR(values, indices, width)).t() @ x


def _wide(features: Tensor) -> Tensor:
    """16-bit features are computed in fp32 and rounded once."""
    return features.float() if features.dtype.itemsize == 2 else features


def _weights(csr: CSR, weight: Tensor | None) -> Tensor:
    """[E, 1] in the order of the entries, or 1."""
    if weight is None:
        return torch.ones((), device=csr.col.device)
    weight = weight if csr.eid is None else weight.index_select(0, csr.eid.long())
    return _wide(weight).unsqueeze(1)
