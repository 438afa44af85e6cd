"""Reductions of rows by an index, with gradients by torch's own operators.

All take ``src`` of any shape, and ``index``, int64, that broadcasts to it: one of one dimension
lies along ``dim``. ``out``, if it is passed, is reduced into and returned; else there is a new
result with ``dim_size`` entries along ``dim``, by default one more than the largest index. Entries
without rows are 0 (of a product, 1).
"""

import torch
from torch import Tensor

__all__ = [
    "along", "scatter", "scatter_add", "scatter_max", "scatter_mean", "scatter_min", "scatter_mul",
    "scatter_sum",
]  # fmt: skip


def along(index: Tensor, src: Tensor, dim: int) -> Tensor:
    """Expand an index to the shape of ``src``."""
    if index.dim() == 1:
        index = index.view(*[1] * (dim % max(src.dim(), 1)), -1)
    return index.view(*index.shape, *[1] * (src.dim() - index.dim())).expand_as(src)


def _result(src: Tensor, index: Tensor, dim: int, dim_size: int | None, fill: float) -> Tensor:
    if dim_size is None:
        dim_size = int(index.max()) + 1 if index.numel() else 0
    size = list(src.shape)
    size[dim] = dim_size
    return src.new_full(size, fill)


def scatter_sum(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Sum rows."""
    index = along(index, src, dim)
    if out is None:
        return _result(src, index, dim, dim_size, 0).scatter_add(dim, index, src)
    return out.scatter_add_(dim, index, src)


scatter_add = scatter_sum


def scatter_mul(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Multiply rows. The gradient of a zero is zero, as in pyg-lib."""
    index = along(index, src, dim)
    src = torch.where(src == 0, torch.zeros_like(src), src)
    if out is None:
        out = _result(src, index, dim, dim_size, 1)
        return out.scatter_reduce(dim, index, src, "prod") if src.numel() else out
    return out.scatter_reduce_(dim, index, src, "prod")


def scatter_mean(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Average rows; of integers, rounded down."""
    index = along(index, src, dim)
    total = scatter_sum(src, index, dim, out, dim_size)
    ones = torch.ones_like(src, dtype=torch.float32 if src.dtype.itemsize < 4 else src.dtype)
    count = torch.zeros_like(total, dtype=ones.dtype, requires_grad=False)
    count = count.scatter_add_(dim, index, ones.detach()).clamp_(min=1)
    rounding = None if src.is_floating_point() else "floor"
    if out is None:
        return torch.div(total, count.to(src.dtype), rounding_mode=rounding)
    return out.div_(count.to(src.dtype), rounding_mode=rounding)


def scatter_min(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the smallest rows, and the position of the first; ``src.size(dim)`` without one."""
    return _extreme(src, index, dim, out, dim_size, "amin")


def scatter_max(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the largest rows, and the position of the first; ``src.size(dim)`` without one."""
    return _extreme(src, index, dim, out, dim_size, "amax")


def _extreme(
    src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None, reduce: str
) -> tuple[Tensor, Tensor]:
    """The gradient goes to the row at the position that is returned."""
    index, none = along(index, src, dim), src.size(dim)
    with torch.no_grad():
        start = _result(src, index, dim, dim_size, 0) if out is None else out
        arg = torch.full_like(start, none, dtype=torch.int64)
    if src.numel() == 0:
        return start if src.size(dim) or out is not None else start + src.sum(), arg
    with torch.no_grad():
        value = start.scatter_reduce(dim, index, src, reduce, include_self=out is not None)
        place = along(torch.arange(none, device=src.device), src, dim)
        place = place.where(src == value.gather(dim, index), none)
        arg.scatter_reduce_(dim, index, place, "amin")
    value = src.gather(dim, arg.clamp(max=none - 1)).where(arg < none, value)
    return value if out is None else out.copy_(value), arg


def scatter(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None,
    dim_size: int | None = None, reduce: str = "sum",
) -> Tensor:  # fmt: skip
    """Reduce rows by ``sum`` (or ``add``), ``mul``, ``mean``, ``min`` or ``max``.

    Raises:
        ValueError: for another name.
    """
    if reduce in ("min", "max"):
        return _extreme(src, index, dim, out, dim_size, f"a{reduce}")[0]
    one = {"sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean}
    if reduce not in one:
        raise ValueError(f"Unknown reduce: {reduce!r}")
    return one[reduce](src, index, dim, out, dim_size)
