"""Facts of a CSR matrix beside its arrays."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_accel.derived import derived
from pyg_accel.graph import CSR

__all__ = [
    "INT32_ENTRIES", "Facts", "Kind", "expect_to_stay", "facts_of", "known_of", "of_matrix",
    "rounded",
]  # fmt: skip

T = TypeVar("T")

# Kernels that ran on a graph before it counts as one that stays, by the number of its entries:
# a deep model runs some twenty on a batch that is gone after a step.
_LARGE, _USES, _USES_OF_LARGE = 2**20, 40, 8

INT32_ENTRIES = 2**31 - 2**16  # positions past the end of a row must not overflow either
_expecting = 0  # blocks of expect_to_stay; backward passes run in threads of their own


@contextmanager
def expect_to_stay() -> Iterator[None]:
    """Take every graph that is used meanwhile for one that stays."""
    global _expecting
    _expecting += 1
    try:
        yield
    finally:
        _expecting -= 1


def rounded(number: int) -> int:
    """Round a size up to three significant bits.

    Kernels are chosen by sizes like these, so that batches of about one size share their choices.
    """
    shift = max(number.bit_length() - 3, 0)
    return -(-number >> shift) << shift


class Kind:
    """The facts of a graph by which kernels are chosen; equal ones are the same object.

    Attributes:
        num_rows: rounded up, like the next two.
        num_cols: columns.
        num_edges: entries.
        long: 32 bits count them with no room to spare.
        index_dtype: of the arrays.
        device: where they are.
        sharing: what rows share (:mod:`pyg_accel.column_reuse`); empty if not known.
    """

    __slots__ = ("device", "index_dtype", "long", "num_cols", "num_edges", "num_rows", "sharing")

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        num_edges: int,
        index_dtype: torch.dtype,
        device: torch.device,
        sharing: tuple[Any, ...],
        long: bool,
    ) -> None:
        """Use :meth:`of`."""
        self.num_rows, self.num_cols, self.num_edges = num_rows, num_cols, num_edges
        self.index_dtype, self.device, self.sharing = index_dtype, device, sharing
        self.long = long

    @classmethod
    def of(cls, rowptr: Tensor, col: Tensor, num_cols: int, sharing: tuple[Any, ...]) -> "Kind":
        """Return the kind of a CSR matrix."""
        sizes = rounded(rowptr.numel() - 1), rounded(num_cols), rounded(col.numel())
        return _kind(*sizes, col.dtype, col.device, sharing, col.numel() >= INT32_ENTRIES)


_kind = lru_cache(maxsize=4096)(Kind)


class Facts:
    """What was found out about a CSR matrix.

    Attributes:
        kind: for choices, without what rows share.
        shared_kind: with it; None until it is known.
        uses: how many kernels were launched on it.
        longest: entries of the longest row; None until it is known.
    """

    __slots__ = ("kind", "longest", "shared_kind", "uses")

    def __init__(self, kind: Kind) -> None:
        """Start with what the arrays tell without being read."""
        self.kind = kind
        self.shared_kind: Kind | None = None
        self.uses = 0
        self.longest: int | None = None

    @property
    def stays(self) -> bool:
        """Whether the graph was used so often that it will be used again.

        Then it pays to wait for the device once, for what is known of its rows.
        """
        most = _USES_OF_LARGE if self.kind.num_edges >= _LARGE else _USES
        return _expecting > 0 or self.uses > most


def known_of(csr: CSR) -> dict[Any, Any]:
    """Return what was derived of a CSR matrix, by what it is.

    It belongs to the graph, or to the arrays of operators that a compiler calls. Values must not
    refer to the memory of all arrays, or those would never be freed.
    """
    if csr.known is not None:
        return csr.known
    return derived((csr.col, csr.rowptr), ("known", csr.num_cols), dict, lasting=True)


def of_matrix(csr: CSR, key: Hashable, make: Callable[[], T]) -> T:
    """Return what was derived of a CSR matrix before; compute and store it otherwise."""
    known = known_of(csr)
    found: T | None = known.get(key)
    if found is None:
        found = known[key] = make()
    return found


def facts_of(csr: CSR) -> Facts:
    """Return what is known of a CSR matrix."""
    return of_matrix(csr, "facts", lambda: Facts(Kind.of(csr.rowptr, csr.col, csr.num_cols, ())))
