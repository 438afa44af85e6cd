"""Matrices in the tables of the native libraries, and the plans that run kernels on them.

A plan is a number (csrc/plans.h): ``run1(plan, x)`` and ``run2(plan, x, weight)`` compute it in one
call, for features with any strides and any trailing shape.
"""

import weakref
from typing import Any

from pyg_accel.backends.base import Launch
from pyg_accel.graph import CSR
from pyg_accel.graph.facts import cache_of
from pyg_accel.runtime.native import Entry, direct

__all__ = ["MOST_HEADS", "PLANNED", "Matrix", "dot_launch", "spmm_launch"]

PLANNED = ("sum", "mean", "max", "min")
MOST_HEADS = 2**20 - 1  # fits the bits of a plan


class Matrix(Entry):
    """A CSR matrix in the table of a library, for as long as there are plans on it."""

    __slots__ = ()

    def __init__(self, library: Any, csr: CSR, how: tuple[Any, ...]) -> None:
        """Use :meth:`of`."""
        arrays = [t for t in csr[:3] if t is not None]
        add, remove = direct(library.add_matrix), direct(library.remove_matrix)
        super().__init__(lambda: add(*csr[:4], *how), remove, arrays)

    @classmethod
    def of(
        cls, library: Any, csr: CSR, how: tuple[Any, ...], key: tuple[Any, ...] = ()
    ) -> "Matrix":
        """Return the matrix of a graph, which all plans on the same arrays share.

        Args:
            library: with the table.
            csr: the graph.
            how: further arguments of the library.
            key: a key of ``how``.
        """
        # An address is not used again while there is the matrix, which owns the memory.
        eid = 0 if csr.eid is None else csr.eid.data_ptr()
        cache, place = cache_of(csr), ("matrix", library.name, eid, *key)
        reference = cache.get(place)
        matrix: Matrix | None = None if reference is None else reference()
        if matrix is None:
            matrix = cls(library, csr, how)
            cache[place] = weakref.ref(matrix)  # it refers to the memory of the arrays
        return matrix


def spmm_launch(
    library: Any,
    matrix: Matrix,
    csr: CSR,
    reduce: str,
    heads: int,
    *,
    weighted: bool,
    winners: bool,
    combine: int = 0,
    relu: bool = False,
    columns: bool = False,
    swapped: bool = False,
) -> Launch:
    """Return the launch of a reduction of source features.

    Args:
        library: with the kernels.
        matrix: in its table.
        csr: the graph.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        heads: of the weights.
        weighted: there are weights, or features of edges.
        winners: also return the winners of maxima and minima.
        combine: how features of edges and sources are combined; see csrc/cpu/kernels.h.
        relu: of the message.
        columns: winners are numbered by their source.
        swapped: weights come first.
    """
    how = PLANNED.index(reduce) | combine << 2 | relu << 4 | columns << 5 | swapped << 6
    name = f"run{1 + weighted}" + "_winners" * winners
    return _launch(library, matrix, csr, name, how, heads)


def dot_launch(library: Any, matrix: Matrix, csr: CSR, heads: int, *, swapped: bool) -> Launch:
    """Return the launch of dot products [E, heads] of targets and sources, in this order."""
    return _launch(library, matrix, csr, "run2", swapped << 6 | 1 << 7, heads)


def _launch(library: Any, matrix: Matrix, csr: CSR, name: str, how: int, heads: int) -> Launch:
    plan = matrix.number << 32 | max(heads, 1) << 12 | how
    return Launch(
        direct(getattr(library, name)), (plan,), accepts_any_layout=True, owner=(csr, matrix)
    )
