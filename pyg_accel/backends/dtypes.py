"""Properties of the dtypes of features."""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["DTYPES", "Tolerance", "accumulate", "widened"]

Tolerance = tuple[float, float]  # relative, absolute
T = TypeVar("T", Tensor, Tensor | None)


class Dtype(NamedTuple):
    """Properties of a floating-point dtype.

    Attributes:
        accumulate: the dtype of sums.
        tolerance: how much results may differ from the truth.
    """

    accumulate: torch.dtype
    tolerance: Tolerance


DTYPES = {
    torch.float32: Dtype(torch.float32, (2e-5, 1e-6)),
    torch.float64: Dtype(torch.float64, (1e-12, 1e-12)),
    torch.bfloat16: Dtype(torch.float32, (2e-2, 1e-2)),
    torch.float16: Dtype(torch.float32, (4e-3, 2e-3)),
}


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that features are summed in."""
    return DTYPES[dtype].accumulate if dtype in DTYPES else torch.float32


def widened(features: T) -> T:
    """Return 16-bit features in float32, others as they are; None stays None."""
    return features.float() if features is not None and features.dtype.itemsize == 2 else features
