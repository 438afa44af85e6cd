"""Sampling of at most ``width`` entries per row: the definition, in torch.

All entries of a row of d <= width entries are taken. Entry i of the sample of a longer row
(0 <= i < width) is the entry at

    position(i) = i * step mod d

in stored order. Steps have no common factor with d, so positions do not repeat. A kernel needs one
addition and one comparison per edge, and no list; kernels have to use the same positions as this
file.

| strategy | step |
|---|---|
| ``bucket`` | 1 |
| ``fastrand`` | 577 |

Both are from the ES-SpMM paper (section IV-D, equation 2). If the prime divides d, positions
would repeat: the first of 577, 587, 593 that does not divide d is used instead (if all three do,
338,699 positions are still distinct).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph import CSR
from pyg_accel.runtime.checks import whole

__all__ = ["RESCALES", "STRATEGIES", "Sample", "Sampling", "edge_factors", "steps_of", "take"]

STRATEGIES = ("bucket", "fastrand")
RESCALES = ("none", "mean", "row")
STEPS = (577, 587, 593)  # of fastrand: the first that does not divide the length of the row


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row is sampled, and the factor of its sum.

    With d entries in a row, and s = min(d, width) of them taken:

    Attributes:
        width: the largest number of entries per row.
        strategy: of :data:`STRATEGIES`.
        rescale: the factor of the row. ``none``: 1. ``mean``: 1 / s. ``row``: d / s, so that a sum
            keeps its size.
    """

    width: int
    strategy: str
    rescale: str

    def __post_init__(self) -> None:
        whole("width", self.width)
        for what, value, names in (
            ("strategy", self.strategy, STRATEGIES), ("rescaling", self.rescale, RESCALES)
        ):  # fmt: skip
            if value not in names:
                raise ValueError(f"expected a {what} of {', '.join(names)} (got '{value}')")


class Sample(NamedTuple):
    """The sampled edges as a graph.

    Attributes:
        rowptr: [num_rows + 1].
        col: [S].
        entry: [S], the index of each edge in the whole graph.
        row: [S].
    """

    rowptr: Tensor
    col: Tensor
    entry: Tensor
    row: Tensor


def steps_of(degree: Tensor, sampling: Sampling) -> Tensor:
    """Return ``step`` of every row, for degrees [num_rows] int64."""
    if sampling.strategy == "bucket":
        return torch.ones_like(degree)
    modulus = degree.clamp(min=1)
    step = torch.full_like(degree, STEPS[0])
    for prime in STEPS[1:]:
        step = torch.where(modulus % step == 0, prime, step)
    return torch.where(degree > sampling.width, step % modulus, 1)


def take(csr: CSR, sampling: Sampling) -> Sample:
    """Return the edges of a sample; waits for the device to get their number."""
    degree = csr.rowptr.diff().long()
    counts = degree.clamp(max=sampling.width)
    rowptr = torch.zeros_like(csr.rowptr, dtype=torch.int64)
    rowptr[1:] = counts.cumsum(0)
    row = torch.arange(degree.numel(), device=degree.device).repeat_interleave(counts)
    number = torch.arange(row.numel(), device=degree.device) - rowptr[row]
    entry = csr.rowptr[row].long() + number * steps_of(degree, sampling)[row] % degree[row]
    return Sample(rowptr.to(csr.rowptr.dtype), csr.col[entry], entry, row)


def edge_factors(csr: CSR, sample: Sample, sampling: Sampling) -> Tensor | None:
    """Return the factor of every edge of a sample, [S] float64; None for 1."""
    if sampling.rescale == "none":
        return None
    degree = csr.rowptr.diff().double()
    whole_row = 1.0 if sampling.rescale == "mean" else degree
    return (whole_row / degree.clamp(max=sampling.width))[sample.row]
