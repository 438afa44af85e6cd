"""Properties of a CSR matrix, and values derived from it, stored with the matrix."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_accel.graph.csr import CSR
from pyg_accel.graph.derived import derived

__all__ = [
    "INT32_ENTRIES",
    "Facts",
    "Kind",
    "cache_of",
    "expect_to_stay",
    "facts_of",
    "of_matrix",
    "rounded",
]  # fmt: skip

T = TypeVar("T")

# After so many kernels on a graph, further uses are expected. A deep model runs about twenty on a
# batch that is freed after a step. Large graphs need fewer.
_LARGE, _USES, _USES_OF_LARGE = 2**20, 40, 8

INT32_ENTRIES = 2**31 - 2**16  # with room for positions past the end of a row
_expecting = 0  # blocks of expect_to_stay; global, as backward passes run in other threads


@contextmanager
def expect_to_stay() -> Iterator[None]:
    """Expect every graph that is used in the block to be used again."""
    global _expecting
    _expecting += 1
    try:
        yield
    finally:
        _expecting -= 1


def rounded(number: int) -> int:
    """Round a size up to three significant bits.

    Kernels are chosen by rounded sizes, so that batches of about one size share their choices.
    """
    shift = max(number.bit_length() - 3, 0)
    return -(-number >> shift) << shift


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """The properties of a graph that select a kernel; equal kinds are the same object.

    Attributes:
        num_rows: number of rows, rounded up like the next two.
        num_cols: number of columns.
        num_edges: number of entries.
        long: whether positions of entries may overflow 32 bits.
        index_dtype: dtype of the arrays.
        device: device of the arrays.
        sharing: columns that rows share (:mod:`.column_reuse`); empty if not measured.
    """

    num_rows: int
    num_cols: int
    num_edges: int
    index_dtype: torch.dtype
    device: torch.device
    sharing: tuple[Any, ...]
    long: bool

    @classmethod
    def of(cls, rowptr: Tensor, col: Tensor, num_cols: int, sharing: tuple[Any, ...]) -> "Kind":
        """Return the kind of a CSR matrix."""
        sizes = rounded(rowptr.numel() - 1), rounded(num_cols), rounded(col.numel())
        return _kind(*sizes, col.dtype, col.device, sharing, col.numel() >= INT32_ENTRIES)


_kind = lru_cache(maxsize=4096)(Kind)


@dataclass(eq=False, slots=True)
class Facts:
    """Properties of a CSR matrix.

    Attributes:
        kind: without ``sharing``.
        shared_kind: with ``sharing``; None until that is measured.
        uses: number of kernels that ran on it.
        longest: entries of the longest row; None until measured.
    """

    kind: Kind
    shared_kind: Kind | None = None
    uses: int = 0
    longest: int | None = None

    @property
    def stays(self) -> bool:
        """Whether the graph was used so often that further uses are expected.

        Then it pays to measure its rows, for which the host waits for the device once.
        """
        most = _USES_OF_LARGE if self.kind.num_edges >= _LARGE else _USES
        return _expecting > 0 or self.uses > most


def cache_of(csr: CSR) -> dict[Any, Any]:
    """Return the values derived from a CSR matrix, by key.

    They are stored with the graph, or with the arrays in operators that a compiler calls. Values
    must not refer to the memory of all arrays, or these would never be freed.
    """
    if csr.cache is not None:
        return csr.cache
    return derived((csr.col, csr.rowptr), ("cache", csr.num_cols), dict, lasting=True)


def of_matrix(csr: CSR, key: Hashable, make: Callable[[], T]) -> T:
    """Return the value stored for a CSR matrix, or compute and store it."""
    values = cache_of(csr)
    value: T | None = values.get(key)
    if value is None:
        value = values[key] = make()
    return value


def facts_of(csr: CSR) -> Facts:
    """Return the properties of a CSR matrix."""
    return of_matrix(csr, "facts", lambda: Facts(Kind.of(csr.rowptr, csr.col, csr.num_cols, ())))
