"""Functions of groups of rows that are made of reductions, for floating-point rows alone."""

import torch
from torch import Tensor

from pyg_accel.pyg_lib.ops.scatter import along, scatter_max, scatter_sum

__all__ = ["scatter_log_softmax", "scatter_logsumexp", "scatter_softmax", "scatter_std"]


def _floating(name: str, src: Tensor) -> None:
    if not src.is_floating_point():
        raise ValueError(f"{name} requires a floating-point src tensor (got {src.dtype})")


def _centred(src: Tensor, index: Tensor, dim: int, dim_size: int | None) -> tuple[Tensor, Tensor]:
    """Return rows minus the maximum of their group, and the group's sum of exponentials."""
    index = along(index, src, dim)
    rows = src - scatter_max(src, index, dim, dim_size=dim_size)[0].gather(dim, index)
    return rows, scatter_sum(rows.exp(), index, dim, dim_size=dim_size).gather(dim, index)


def scatter_softmax(
    src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None
) -> Tensor:
    """Normalise the exponentials of each group.

    Raises:
        ValueError: for integers.
    """
    _floating("scatter_softmax", src)
    rows, total = _centred(src, index, dim, dim_size)
    return rows.exp() / total


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None, eps: float = 1e-12
) -> Tensor:
    """Return the logarithm of :func:`scatter_softmax`, whose sums get ``eps``.

    Raises:
        ValueError: for integers.
    """
    _floating("scatter_log_softmax", src)
    rows, total = _centred(src, index, dim, dim_size)
    return rows - (total + eps).log()


def scatter_std(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None, unbiased: bool = True,
) -> Tensor:  # fmt: skip
    """Return the standard deviation of each group.

    Args:
        src: as for :mod:`~pyg_accel.pyg_lib.ops.scatter`, like the next four.
        index: the group of every row.
        dim: along which rows lie.
        out: gets the sums of squares added.
        dim_size: number of groups.
        unbiased: divide by one less than the number of rows.

    Raises:
        ValueError: for integers.
    """
    _floating("scatter_std", src)
    index = along(index, src, dim)
    dim_size = dim_size if out is None else out.size(dim)
    count = scatter_sum(torch.ones_like(src), index, dim, dim_size=dim_size)
    mean = scatter_sum(src, index, dim, dim_size=dim_size) / count.clamp(min=1)
    total = scatter_sum((src - mean.gather(dim, index)).square(), index, dim, out, dim_size)
    return (total / (count - int(unbiased)).clamp(min=1)).sqrt()


def scatter_logsumexp(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None, eps: float = 1e-12,
) -> Tensor:  # fmt: skip
    """Return the logarithm of the sum of exponentials of each group; 0 for one without rows.

    Args:
        src: as for :mod:`~pyg_accel.pyg_lib.ops.scatter`, like the next four.
        index: the group of every row.
        dim: along which rows lie.
        out: is overwritten where the result is finite.
        dim_size: number of groups.
        eps: is added to the sums.

    Raises:
        ValueError: for integers.
    """
    _floating("scatter_logsumexp", src)
    index = along(index, src, dim)
    dim_size = dim_size if out is None else out.size(dim)
    most, arg = scatter_max(src, index, dim, dim_size=dim_size)
    rows = (src - most.gather(dim, index)).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    total = scatter_sum(rows.exp(), index, dim, dim_size=dim_size)
    result = (most + (total + eps).log()).masked_fill(arg == src.size(dim), -torch.inf)
    if out is None:
        return result.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return out.copy_(torch.where(result.isfinite(), result, out.clone()))
