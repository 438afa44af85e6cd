"""The CSR form of an edge_index as an operator, so that compiled graphs do not sort.

It shares the store of eager calls, so a compiled model sorts an edge_index once as well. It returns
copies, since the compiler reuses the memory of results.
"""

import torch
from torch import Tensor

from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.derived import derived
from pyg_accel.ops.operator import define
from pyg_accel.runtime.machine import is_captured

__all__ = ["CompiledGraph", "IdleRows", "graph_of", "idle_rows_of"]

_ARGS = "Tensor edge_index, SymInt num_rows, SymInt num_cols, int target"


def graph_of(
    edge_index: Tensor, num_rows: int, num_cols: int, target: int, loops: int | None = None
) -> Graph:
    """Return the graph of an edge_index, whose CSR form is built at most once.

    Args:
        edge_index: [2, E].
        num_rows: number of target nodes.
        num_cols: number of source nodes.
        target: row of edge_index that holds the target nodes.
        loops: number of nodes that get one self-loop each, in place of all in edge_index.
    """

    def make() -> Graph:
        graph = Graph.of_edges(edge_index, target, num_rows, num_cols, loops=loops)
        if not graph.is_cuda:
            return graph.build()
        graph.release_edges()
        return graph

    return derived((edge_index,), ("graph", target, num_rows, num_cols, loops), make)


class IdleRows:
    """The nodes without outgoing edges, or without incoming ones.

    Attributes:
        mask: [N]; None if there are none.
    """

    def __init__(self, edge_index: Tensor, row: int, nodes: int) -> None:
        """Find the nodes missing from a row of an edge_index."""
        idle = torch.ones(nodes, dtype=torch.bool, device=edge_index.device)
        idle.index_fill_(0, edge_index[row].long(), False)
        waits = idle.is_cuda or is_captured(idle)  # for a GPU
        self.mask = None if type(idle) is Tensor and not waits and not idle.any() else idle


def idle_rows_of(edge_index: Tensor, row: int, nodes: int) -> IdleRows:
    """Return the nodes missing from a row of an edge_index, stored with it."""
    if type(edge_index) is not Tensor:  # a compiler's
        return IdleRows(edge_index, row, nodes)
    key = "idle rows", row, nodes
    return derived((edge_index,), key, lambda: IdleRows(edge_index, row, nodes))


class CompiledGraph(Graph):
    """The graph of an edge_index without data, while a compiler traces."""

    def __init__(self, edge_index: Tensor, num_rows: int, num_cols: int, target: int) -> None:
        """Put the operator into the compiled graph.

        Args:
            edge_index: [2, E].
            num_rows: number of target nodes.
            num_cols: number of source nodes.
            target: row of edge_index that holds the target nodes.
        """
        self._args = (edge_index, num_rows, num_cols, target)
        rowptr, col, perm = torch.ops.pyg_accel.coo_to_csr(*self._args)
        self._hold(rowptr, col, perm, num_cols, sorted=True)

    @property
    def in_edge_order(self) -> bool:
        """Whether edge operands must be in the order of the edge list."""
        return True

    def transposed(self, *, edge_order: bool = False) -> CSR:
        """Return the arrays of the transposed graph."""
        rowptr, col, eid = torch.ops.pyg_accel.coo_to_csc(*self._args, edge_order)
        return CSR(rowptr, col, eid, self.num_rows, True)


def _narrow(csr: CSR) -> tuple[Tensor, Tensor, Tensor]:
    eid = torch.arange(csr.col.numel(), device=csr.col.device) if csr.eid is None else csr.eid
    if csr.col.dtype != torch.int32:  # as _fake says
        raise ValueError("compiled graphs have fewer than 2**31 - 1 nodes and edges")
    return csr.rowptr.clone(), csr.col.clone(), eid.to(torch.int32, copy=True)


def _empty(like: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    entries = like.size(1)
    sizes = (rows + 1, entries, entries)
    rowptr, col, eid = (like.new_empty(n, dtype=torch.int32) for n in sizes)
    return rowptr, col, eid


define(
    f"coo_to_csr({_ARGS}) -> (Tensor, Tensor, Tensor)",
    lambda *args: _narrow(graph_of(*args).csr(edge_order=True)),
    lambda edges, rows, cols, target: _empty(edges, rows),
)
define(
    f"coo_to_csc({_ARGS}, bool edge_order=True) -> (Tensor, Tensor, Tensor)",
    lambda edges, rows, cols, target, edge_order=True: _narrow(
        graph_of(edges, rows, cols, target).transposed(edge_order=edge_order)
    ),
    lambda edges, rows, cols, target, edge_order=True: _empty(edges, cols),
)
