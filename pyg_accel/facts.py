"""What is known of a CSR matrix beside its arrays; it is stored on the ``col`` array itself.

A dictionary by identity and version costs ten times as long as a read of an attribute, and every
launch of a kernel asks. Facts die with the array, and are made anew if an array was changed.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import version_of

__all__ = ["INT32_ENTRIES", "Facts", "Kind", "expect_to_stay", "facts_of", "rounded"]

_ATTRIBUTE = "_pyg_accel_facts"
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
        num_cols: number of columns.
        kind: for choices, without what rows share.
        shared_kind: with it; None until it is known.
        uses: how many kernels were launched on it.
        longest: entries of the longest row; None until it is known.
        derived: what backends made of the arrays, by their keys.
    """

    __slots__ = (
        "_part", "_storage", "_versions", "derived", "kind", "longest", "num_cols", "shared_kind",
        "uses",
    )  # fmt: skip

    def __init__(self, rowptr: Tensor, col: Tensor, num_cols: int) -> None:
        """Start with what the arrays tell without being read."""
        # By its storage: torch.utils.swap_tensors refuses tensors with weak references. Of `col`
        # nothing is needed: its attributes are swapped with its data.
        self._storage, self._part = rowptr.untyped_storage(), _part_of(rowptr)
        self._versions = version_of(rowptr), version_of(col)
        self.num_cols = num_cols
        self.kind = Kind.of(rowptr, col, num_cols, ())
        self.shared_kind: Kind | None = None
        self.uses = 0
        self.longest: int | None = None
        self.derived: dict[Hashable, Any] = {}

    @property
    def stays(self) -> bool:
        """Whether the graph was used so often that it will be used again.

        Then it pays to wait for the device once, for what is known of its rows.
        """
        most = _USES_OF_LARGE if self.kind.num_edges >= _LARGE else _USES
        return _expecting > 0 or self.uses > most

    def fit(self, rowptr: Tensor, col: Tensor, num_cols: int) -> bool:
        """Return whether these are the arrays that were looked at, unchanged."""
        return (
            self._storage is rowptr.untyped_storage()
            and self._part == _part_of(rowptr)
            and self.num_cols == num_cols
            and self._versions == (version_of(rowptr), version_of(col))
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the array, or one that was sent to another process, has facts of its own.
        return type(None), ()


def _part_of(rowptr: Tensor) -> Hashable:
    return rowptr.storage_offset(), rowptr.numel()


def facts_of(rowptr: Tensor, col: Tensor, num_cols: int) -> Facts:
    """Return what is known of a CSR matrix."""
    facts: Facts | None = getattr(col, _ATTRIBUTE, None)
    if facts is None or not facts.fit(rowptr, col, num_cols):
        facts = Facts(rowptr, col, num_cols)
        setattr(col, _ATTRIBUTE, facts)
    return facts
