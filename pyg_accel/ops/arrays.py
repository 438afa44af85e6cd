"""A graph as arguments of operators: its arrays, since torch's schemas have no type for graphs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pyg_accel.graph import CSR, Graph

__all__ = [
    "ARRAYS",
    "CSR_ARRAYS",
    "ROW_ARRAYS",
    "Arrays",
    "csr_and_arguments",
]

# Schemas of Arrays, of a CSR, and of a CSR without the flag of ascending columns.
_CSR, _SIZE = "Tensor rowptr, Tensor col, Tensor? eid", "SymInt num_cols"
ARRAYS = f"{_CSR}, Tensor? rowptr_t, Tensor? col_t, Tensor? eid_t, {_SIZE}, bool sorted"
CSR_ARRAYS = f"{_CSR}, {_SIZE}, bool sorted"
ROW_ARRAYS = f"{_CSR}, {_SIZE}"


class Arrays(NamedTuple):
    """The arrays of a graph and of its transpose; None for an unneeded transpose."""

    rowptr: Tensor
    col: Tensor
    eid: Tensor | None
    rowptr_t: Tensor | None
    col_t: Tensor | None
    eid_t: Tensor | None
    num_cols: int
    sorted: bool

    @classmethod
    def of(cls, graph: "Graph | Arrays", *, edge_order: bool, transposed: bool) -> "Arrays":
        """Return the arrays of a graph, and of its transpose if requested."""
        if isinstance(graph, Arrays):
            return graph
        turned = graph.transposed(edge_order=edge_order) if transposed else None
        return cls.join(graph.csr(edge_order=edge_order), turned)

    @classmethod
    def join(cls, csr: CSR, transposed: CSR | None = None) -> "Arrays":
        """Return the arrays of a graph and of its transpose."""
        rowptr, col, eid, num_cols, in_order = csr[:5]
        if transposed is None:
            return cls(rowptr, col, eid, None, None, None, num_cols, in_order)
        return cls(rowptr, col, eid, *transposed[:3], num_cols, in_order)

    @classmethod
    def split(cls, args: tuple[Any, ...]) -> tuple["Arrays", tuple[Any, ...]]:
        """Return the first arguments of an operator, and those after them."""
        return cls(*args[:8]), args[8:]

    @property
    def csr(self) -> CSR:
        """The graph."""
        return CSR(self.rowptr, self.col, self.eid, self.num_cols, self.sorted)

    @property
    def transposed(self) -> CSR:
        """Its transpose; RuntimeError if there is none."""
        if self.rowptr_t is None or self.col_t is None:
            raise RuntimeError("the gradient of a source operand needs the transposed graph")
        return CSR(self.rowptr_t, self.col_t, self.eid_t, self.rowptr.size(0) - 1, True)

    def turned(self) -> "Arrays":
        """Swap the graph with its transpose."""
        return Arrays.join(self.transposed, self.csr)


def csr_and_arguments(args: Sequence[Any]) -> tuple[CSR, list[Any]]:
    """Return the graph and the arguments after the arrays, without building an :class:`Arrays`."""
    rowptr, col, eid, _, _, _, num_cols, in_order, *arguments = args
    return CSR(rowptr, col, eid, num_cols, in_order), arguments
