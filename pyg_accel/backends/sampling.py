"""Sampling of at most ``width`` entries per row: the definition, in torch.

All entries of a row of d <= width entries are taken. Entry i of the sample of a longer row
(0 <= i < width) is the entry at

    position(i) = (start + i * step) mod d

in stored order, with a ``start`` and a ``step`` of the row that depend on the strategy. Steps have
no common factor with d, so positions do not repeat. A kernel needs one addition and one comparison
per edge, and no list; kernels have to use the same positions as this file.

| strategy | start | step |
|---|---|---|
| ``bucket`` | 0 | 1 |
| ``fastrand`` | 0 | 577 |
| ``random`` | uniform in [0, d) | one of 256 primes |

``bucket`` and ``fastrand`` are those of the ES-SpMM paper (section IV-D, equation 2). If the prime
divides d, positions would repeat: the first of 577, 587, 593 that does not divide d is used instead
(if all three do, 338,699 positions are still distinct).

``random`` draws start and prime by Philox 4x32-10 with the seed as key and the row as counter. With
a uniform start every entry of a row has the same probability, width / d, for any step, so that
estimates of sums and means are unbiased; with many steps, pairs of entries occur about as often as
in a sample without replacement.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.checks import whole
from pyg_accel.graph import CSR

__all__ = [
    "RESCALES",
    "STRATEGIES",
    "Sample",
    "Sampling",
    "edge_factors",
    "philox",
    "primes",
    "starts_and_steps",
    "take",
]

STRATEGIES = ("bucket", "fastrand", "random")
RESCALES = ("none", "mean", "row", "gcn")
FALLBACKS = (577, 587, 593)  # steps if that of the strategy divides the length of the row
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row is sampled, and the factor of its sum.

    With d entries in row i, s = min(d, width) of them taken, and d', s' for the row of the source
    of an edge:

    Attributes:
        width: the largest number of entries per row.
        strategy: of :data:`STRATEGIES`.
        rescale: the factor of every edge. ``none``: 1. ``mean``: 1 / s. ``row``: d / s, so that a
            sum keeps its size. ``gcn``: sqrt(d / s) * sqrt(d' / s'), which turns the weights
            1 / sqrt(d d') of a GCN into those of the sampled degrees.
    """

    width: int
    strategy: str
    rescale: str

    def __post_init__(self) -> None:
        whole("width", self.width)
        if self.strategy not in STRATEGIES:
            names = ", ".join(STRATEGIES)
            raise ValueError(f"expected a strategy of {names} (got '{self.strategy}')")
        if self.rescale not in RESCALES:
            names = ", ".join(RESCALES)
            raise ValueError(f"expected a rescaling of {names} (got '{self.rescale}')")


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

    def beyond(self) -> Tensor:
        """Return which edges are padding, [S]."""
        return torch.arange(self.col.numel(), device=self.col.device) >= self.rowptr[-1]


@lru_cache(maxsize=8)
def primes(device: torch.device) -> Tensor:
    """Return the steps of ``random``, [256] int32: primes spread over 2**16 to 2**20."""
    prime = torch.ones(1 << 20, dtype=torch.bool)
    for number in range(2, 1 << 10):
        if prime[number]:
            prime[number * number :: number] = False
    steps = prime[1 << 16 :].nonzero().flatten() + (1 << 16)
    return steps[:: steps.numel() // 256][:256].to(torch.int32).to(device)


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two words of Philox 4x32-10 (Salmon et al. 2011), int64 in [0, 2**32).

    Args:
        seed: [1] int64, the key.
        counter: [N] int64, the first word of the counter; the others are 0.
    """

    def multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
        """Return the high and low word of a product, by halves, as it exceeds int64."""
        low, high = word & 0xFFFF, word >> 16
        below = low * constant
        above = high * constant + (below >> 16)
        return above >> 16, ((above & 0xFFFF) << 16) | (below & 0xFFFF)

    words = [counter & _WORD, *(torch.zeros_like(counter) for _ in range(3))]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = (
            multiply(0xD2511F53, words[0]),
            multiply(0xCD9E8D57, words[2]),
        )
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return words[0], words[1]


def starts_and_steps(
    degree: Tensor, sampling: Sampling, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``start`` and ``step`` of every row: [num_rows] int64 each.

    Args:
        degree: [num_rows] int64.
        sampling: how to sample.
        seed: [1] int64, for ``random``.
    """
    start, step = torch.zeros_like(degree), torch.ones_like(degree)
    if sampling.strategy == "bucket" or degree.numel() == 0:
        return start, step
    long = degree > sampling.width
    modulus = degree.clamp(min=1)
    choice = torch.full_like(degree, FALLBACKS[0])
    if sampling.strategy == "random":
        assert seed is not None, "a random sample has a seed"
        which, where = philox(seed, torch.arange(degree.numel(), device=degree.device))
        choice = primes(degree.device).long()[which & 255]
        start = torch.where(long, (where * modulus) >> 32, 0)
    for fallback in FALLBACKS:
        choice = torch.where(modulus % choice == 0, fallback, choice)
    return start, torch.where(long, choice % modulus, 1)


def take(csr: CSR, sampling: Sampling, seed: Tensor | None, *, padded: bool = False) -> Sample:
    """Return the edges of a sample.

    Args:
        csr: the graph.
        sampling: how to sample.
        seed: [1] int64, for ``random``.
        padded: return min(num_rows * width, E) edges, the largest possible number; those from
            ``rowptr[-1]`` on are padding. Otherwise there is none, and the call waits for the
            device to get the number of edges.
    """
    degree = csr.rowptr.diff().long()
    start, step = starts_and_steps(degree, sampling, seed)
    counts = degree.clamp(max=sampling.width)
    rowptr = torch.zeros_like(csr.rowptr, dtype=torch.int64)
    rowptr[1:] = counts.cumsum(0)
    entries, last = csr.col.numel(), max(degree.numel() - 1, 0)
    total = min(degree.numel() * sampling.width, entries) if padded else int(rowptr[-1])
    rows = torch.arange(degree.numel() + 1, device=degree.device)
    counts = torch.cat([counts, total - rowptr[-1:]])
    row = rows.repeat_interleave(counts, output_size=total).clamp(max=last)
    number = torch.arange(total, device=degree.device) - rowptr[row]
    position = (start[row] + number * step[row]) % degree.clamp(min=1)[row]
    entry = (csr.rowptr[row].long() + position).clamp(max=max(entries - 1, 0))
    return Sample(rowptr.to(csr.rowptr.dtype), csr.col[entry], entry, row)


def edge_factors(csr: CSR, sample: Sample, sampling: Sampling) -> Tensor | None:
    """Return the factor of every edge of a sample, [S] float64; None for 1."""
    if sampling.rescale == "none":
        return None
    degree = csr.rowptr.diff().double()
    taken = degree.clamp(max=sampling.width)
    if sampling.rescale == "mean":
        return (1.0 / taken)[sample.row]
    ratio = degree / taken
    if sampling.rescale == "row":
        return ratio[sample.row]
    # A source without incoming edges has d' = s' = 0: its factor is 1.
    root = ratio.nan_to_num(nan=1.0).sqrt()
    return root[sample.row] * root[sample.col.long()]
