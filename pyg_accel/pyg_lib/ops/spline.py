"""B-splines over graphs (SplineCNN, https://arxiv.org/abs/1711.08920)."""

import torch
from torch import Tensor

from pyg_accel.ops import segment_matmul

__all__ = ["spline_basis", "spline_weighting"]


def _basis(v: Tensor, degree: int) -> list[Tensor]:
    """Return the pieces of a B-spline at a fraction of the way between two knots."""
    if degree == 1:
        return [1 - v, v]
    if degree == 2:
        return [0.5 * v * v - v + 0.5, -v * v + v + 0.5, 0.5 * v * v]
    if degree == 3:
        return [(1 - v) ** 3 / 6, (3 * v**3 - 6 * v**2 + 4) / 6,
                (-3 * v**3 + 3 * v**2 + 3 * v + 1) / 6, v**3 / 6]  # fmt: skip
    raise ValueError(f"expected 'degree' to be 1, 2 or 3 (got {degree})")


def spline_basis(
    pseudo: Tensor, kernel_size: Tensor, is_open_spline: Tensor, degree: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute the products of B-splines at points, and which weights they belong to.

    Args:
        pseudo: [E, D], coordinates from 0 to 1.
        kernel_size: [D] int64, weights in each dimension.
        is_open_spline: [D] uint8, whether the spline ends at both sides.
        degree: of the splines, 1 to 3.

    Returns:
        Values, [E, S], and int64 indices of weights, [E, S], with ``S = (degree + 1) ** D``.

    Raises:
        ValueError: for another degree.
    """
    scaled = pseudo * (kernel_size - degree * is_open_spline.long()).to(pseudo.dtype)
    whole = scaled.detach().floor()
    pieces = torch.stack(_basis(scaled - whole, degree), -1)  # [E, D, degree + 1]
    steps = torch.arange(degree + 1, device=pseudo.device)
    places = (whole.long().unsqueeze(-1) + steps) % kernel_size.view(-1, 1)
    strides = kernel_size.cumprod(0) // kernel_size
    basis = pseudo.new_ones(pseudo.size(0), 1)
    index = torch.zeros_like(basis, dtype=torch.int64)
    for d in range(pseudo.size(1)):  # the first dimension varies fastest
        basis = (pieces[:, d, :, None] * basis[:, None, :]).flatten(1)
        index = ((places[:, d] * strides[d])[:, :, None] + index[:, None, :]).flatten(1)
    return basis, index


def spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, weight_index: Tensor) -> Tensor:
    """Multiply rows by sums of weights: ``out[e] = x[e] @ sum_s basis[e, s] weight[index[e, s]]``.

    Args:
        x: [E, M_in].
        weight: [K, M_in, M_out].
        basis: [E, S].
        weight_index: [E, S] int64.

    Returns:
        [E, M_out].
    """
    key = weight_index.reshape(-1)
    order = key.argsort(stable=True)  # rows of one weight follow each other: K products
    ptr = torch.searchsorted(key[order], torch.arange(weight.size(0) + 1, device=key.device))
    rows = (x.unsqueeze(1) * basis.unsqueeze(-1)).flatten(0, 1)
    products = segment_matmul(rows[order].contiguous(), ptr, weight.contiguous())
    out = torch.zeros_like(products).index_copy(0, order, products)
    return out.view(x.size(0), basis.size(1), weight.size(2)).sum(1)
