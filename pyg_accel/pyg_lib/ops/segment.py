"""Reductions of rows that are sorted by their group: by an index (COO), or by pointers (CSR).

Rows lie along the last dimension of ``index`` or ``indptr``; its other dimensions equal those of
``src``. See :mod:`~pyg_accel.pyg_lib.ops.scatter` for the other arguments.
"""

import torch
from torch import Tensor

from pyg_accel.pyg_lib.ops.scatter import (
    along,
    scatter,
    scatter_max,
    scatter_mean,
    scatter_min,
    scatter_sum,
)

__all__ = [
    "gather_coo", "gather_csr", "segment_add_coo", "segment_add_csr", "segment_coo", "segment_csr",
    "segment_max_coo", "segment_max_csr", "segment_mean_coo", "segment_mean_csr",
    "segment_min_coo", "segment_min_csr", "segment_sum_coo", "segment_sum_csr",
]  # fmt: skip


def segment_sum_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Sum rows."""
    return scatter_sum(src, index, index.dim() - 1, out, dim_size)


def segment_mean_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Average rows; of integers, rounded down."""
    return scatter_mean(src, index, index.dim() - 1, out, dim_size)


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the smallest rows, and their positions."""
    return scatter_min(src, index, index.dim() - 1, out, dim_size)


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest rows, and their positions."""
    return scatter_max(src, index, index.dim() - 1, out, dim_size)


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum rows."""
    return scatter_sum(*_by_index(src, indptr, out))


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Average rows; of integers, rounded down."""
    return scatter_mean(*_by_index(src, indptr, out))


def segment_min_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the smallest rows, and their positions."""
    return scatter_min(*_by_index(src, indptr, out))


def segment_max_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest rows, and their positions."""
    return scatter_max(*_by_index(src, indptr, out))


segment_add_coo, segment_add_csr = segment_sum_coo, segment_sum_csr


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Take rows: ``out[i] = src[index[i]]``, into ``out`` if it is passed."""
    dim = index.dim() - 1
    size = [*src.shape[:dim], index.size(-1), *src.shape[dim + 1 :]]
    rows = src.gather(dim, along(index, src.new_empty(()).expand(size), dim))
    return rows if out is None else out.copy_(rows)


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Repeat rows: row ``r`` from ``indptr[r]`` to ``indptr[r + 1]``, in ``out`` if passed."""
    length = int(indptr[..., -1].max()) if indptr.numel() else 0
    return gather_coo(src, _index(indptr, length), out)


def _index(indptr: Tensor, length: int) -> Tensor:
    """Return the group of every row."""
    rows = torch.arange(length, device=indptr.device, dtype=indptr.dtype)
    ends = indptr[..., 1:].contiguous()
    return torch.searchsorted(ends, rows.expand(*indptr.shape[:-1], length).contiguous(),
                              right=True)  # fmt: skip


def _by_index(
    src: Tensor, indptr: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor, int, Tensor | None, int]:
    """Return the arguments of a scatter."""
    dim = indptr.dim() - 1
    return src, _index(indptr, src.size(dim)), dim, out, indptr.size(-1) - 1


def segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:  # fmt: skip
    """Reduce rows by ``sum`` (or ``add``), ``mean``, ``min`` or ``max``.

    Raises:
        ValueError: for another name.
    """
    return scatter(src, index, index.dim() - 1, out, dim_size, _named(reduce))


def segment_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduce rows by ``sum`` (or ``add``), ``mean``, ``min`` or ``max``.

    Raises:
        ValueError: for another name.
    """
    return scatter(*_by_index(src, indptr, out), _named(reduce))


def _named(reduce: str) -> str:
    if reduce == "mul":  # scatter accepts it
        raise ValueError(f"Unknown reduce: {reduce!r}")
    return reduce
