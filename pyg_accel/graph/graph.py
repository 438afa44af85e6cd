"""The graph for kernels: CSR by target node, its transpose, the permutation to edges."""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.csr import (
    CSR,
    INDEX_DTYPES,
    EdgeList,
    Edges,
    ascends,
    check_csr,
    check_perm,
    csr_of_edges,
    for_autograd,
    transpose,
)
from pyg_accel.graph.derived import hold
from pyg_accel.runtime.checks import require, shown, whole
from pyg_accel.runtime.machine import is_captured

__all__ = ["Graph", "check_graph"]


class Graph:
    """A directed, possibly bipartite graph in CSR form: row = target node, column = source node.

    Entry k of the CSR is edge ``perm[k]`` of the edge list that the graph was built from (``perm``
    is None if the orders agree). On a GPU the CSR form is built at the first access to one of its
    arrays; the transpose is built so on every device.

    Attributes:
        rowptr: [num_rows + 1].
        col: [E], ascending within each row when built from an edge list.
        perm: [E] or None.
        num_rows: number of target nodes.
        num_cols: number of source nodes.
        num_edges: number of edges.
        sorted: columns ascend within each row.
        device: device of the arrays.
        is_cuda: the arrays are on a GPU.
        built: the CSR form exists.
        extra_seconds: estimated extra time of calls because it does not exist.
        counts: [num_rows, 1, 1] float32, entries of each row, for passes over the edge list.
        plans: how operators run on the graph, by the kind of the call (:mod:`pyg_accel.ops.plan`).
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    sorted: bool
    plans: dict[Any, Any]
    _cache: dict[Any, Any]
    _transposed_cache: dict[Any, Any]

    # Defaults of a new graph; a step may make one for each of its layers.
    built = False
    extra_seconds = 0.0
    counts: Tensor | None = None
    _edges: EdgeList | None = None
    _target = 1
    _loops: int | None = None
    _captured = False
    _transposed: tuple[Tensor, Tensor, Tensor] | None = None
    _transposed_edges: Tensor | None = None
    _degree: Tensor | None = None

    def __init__(
        self, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, *, sorted: bool
    ) -> None:
        """Check and take over arrays.

        Args:
            rowptr: [num_rows + 1] int32 or int64, ascending from 0 to E.
            col: [E] of the same dtype and device.
            perm: [E] of the same dtype and device, or None.
            num_cols: number of source nodes.
            sorted: columns ascend within each row.

        Raises:
            ValueError: for other arrays.
        """
        check_csr(rowptr, col)
        inside = (col >= 0) & (col < whole("num_cols", num_cols, 0))
        require(inside.all(), f"expected 'col' within [0, {num_cols})")
        if sorted:
            require(ascends(rowptr, col), "expected 'col' to ascend within each row, as 'sorted' "
                    "says")  # fmt: skip
        if perm is not None:
            check_perm(perm, col)
            perm = perm.contiguous()
        self._hold(rowptr.contiguous(), col.contiguous(), perm, num_cols, sorted=sorted)

    def _hold(
        self, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, *, sorted: bool
    ) -> None:
        self._describe(rowptr.numel() - 1, num_cols, col.numel(), rowptr)
        self._hold_arrays(rowptr, col, perm, sorted)

    def _describe(self, num_rows: int, num_cols: int, num_edges: int, like: Tensor) -> None:
        """Set attributes that do not need the CSR form; ``like`` is on the device of the graph."""
        self.num_rows, self.num_cols, self.num_edges = num_rows, num_cols, num_edges
        self.device, self.is_cuda = like.device, like.is_cuda

    def _hold_arrays(self, rowptr: Tensor, col: Tensor, perm: Tensor | None, sorted: bool) -> None:
        self.rowptr, self.col, self.perm, self.sorted = rowptr, col, perm, sorted
        self.plans, self._cache, self._transposed_cache = {}, {}, {}
        self.built = True

    def __getattr__(self, name: str) -> Any:
        # Only for missing attributes: a built graph has all of them.
        if name not in ("rowptr", "col", "perm", "sorted"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.build(), name)

    def __getstate__(self) -> dict[str, Any]:
        self.build()
        # Copies have separate plans.
        return self.__dict__ | {
            "plans": {}, "_cache": {}, "_transposed_cache": {}, "_edges": None
        }  # fmt: skip

    _from_coo = staticmethod(csr_of_edges)

    def edge_list(self) -> Edges | None:
        """Return the edge list of a graph that is not built.

        None for a graph that is built, or whose list was freed.
        """
        edge_index = None if self._edges is None else self._edges.tensor()
        if edge_index is None:
            return None
        hold(edge_index)
        return Edges(edge_index, self._target, self.num_rows, self.num_cols, self._loops)

    def release_edges(self) -> None:
        """Do not keep the edge list alive; the caller does."""
        if self._edges is not None:
            self._edges.release()

    def build(self, edge_index: Tensor | None = None) -> "Graph":
        """Build the CSR form of the edge list.

        Args:
            edge_index: the edge list; by default the list of the graph.

        Returns:
            The graph; another one while a CUDA graph is captured, as its arrays have no values yet.

        Raises:
            RuntimeError: if the edge list has been freed.
        """
        if self.built:
            return self
        if edge_index is None:
            assert self._edges is not None, "a graph has arrays or an edge list"
            edge_index = self._edges.restored()
        edges = edge_index
        if self._loops is not None:
            nodes = torch.arange(self._loops, dtype=edges.dtype, device=edges.device)
            edges = torch.cat([edges[:, edges[0] != edges[1]], nodes.expand(2, -1)], dim=1)
            self.num_edges = edges.size(1)
        arrays = Graph._from_coo(edges, self._target, self.num_rows, self.num_cols)
        if is_captured(edge_index) and not self._captured:
            return Graph.trusted(*arrays, self.num_cols, sorted=True)
        self._hold_arrays(*arrays, sorted=True)
        self._edges = None
        return self

    @classmethod
    def trusted(
        cls, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, *, sorted: bool
    ) -> "Graph":
        """Take over valid arrays without checks."""
        graph = cls.__new__(cls)
        graph._hold(rowptr, col, perm, num_cols, sorted=sorted)
        return graph

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, *, num_cols: int | None = None) -> "Graph":
        """Take over a CSR matrix; edge operands are in its order.

        Args:
            rowptr: [num_rows + 1] int32 or int64, ascending from 0 to E.
            col: [E] of the same dtype and device.
            num_cols: number of source nodes; by default the larger of num_rows and max(col) + 1.

        Returns:
            A graph that holds these arrays.

        Raises:
            ValueError: if the arrays are not a CSR matrix.
        """
        check_csr(rowptr, col)
        low, high = (int(col.min()), int(col.max())) if col.numel() else (0, -1)
        if num_cols is None:
            num_cols = max(rowptr.numel() - 1, high + 1)
        if low < 0 or high >= whole("num_cols", num_cols, 0):
            raise ValueError(f"expected 'col' within [0, {num_cols}) (got {low} to {high})")
        rowptr, col = rowptr.contiguous(), col.contiguous()
        ordered = bool(ascends(rowptr, col))
        return cls.trusted(rowptr, col, None, num_cols, sorted=ordered)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        size: tuple[int | None, int | None] | None = None,
        flow: str = "source_to_target",
    ) -> "Graph":
        """Return the graph of an edge list, whose CSR form takes a counting sort.

        On a CPU it is built at once. On a GPU it is built at the first use, and until then the edge
        list must not be changed in place; ``torch.compile(fullgraph=True)`` needs a :meth:`build`
        before.

        Args:
            edge_index: [2, E] int32 or int64 of source (row 0) and target ids (row 1), in any
                order, duplicates and self-loops included.
            size: number of nodes that rows 0 and 1 refer to; by default max(edge_index) + 1 for
                both.
            flow: ``"source_to_target"`` as above, or ``"target_to_source"``: messages go from row 1
                to row 0.

        Returns:
            The graph, with ``perm`` from its entries to the edges of the list.

        Raises:
            ValueError: for a malformed edge_index, size or flow.
            IndexError: for ids outside of ``size``.
        """
        if not isinstance(edge_index, Tensor):
            raise ValueError(
                f"expected 'edge_index' to be a tensor (got {type(edge_index).__name__})"
            )
        if edge_index.dim() != 2 or edge_index.size(0) != 2:
            raise ValueError(
                f"expected 'edge_index' of shape [2, E] (got {list(edge_index.shape)})"
            )
        if edge_index.dtype not in INDEX_DTYPES:
            raise ValueError(f"expected 'edge_index' to be int32 or int64 (got {edge_index.dtype})")
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(f"unknown flow '{flow}'")
        if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
            raise ValueError(
                f"expected 'size' to be two numbers, of source and target nodes (got {size!r})"
            )
        sizes = [None if n is None else whole("size", n, 0) for n in size or (None, None)]
        if None in sizes:
            most = int(edge_index.max()) + 1 if edge_index.numel() else 0
            sizes = [most if n is None else n for n in sizes]
        target = 1 if flow == "source_to_target" else 0
        graph = cls.of_edges(
            edge_index, target, int(sizes[target] or 0), int(sizes[1 - target] or 0)
        )
        return graph if graph.is_cuda else graph.build()

    @classmethod
    def of_edges(
        cls,
        edge_index: Tensor,
        target: int,
        num_rows: int,
        num_cols: int,
        *,
        loops: int | None = None,
    ) -> "Graph":
        """Refer to an edge list without reading it.

        Args:
            edge_index: [2, E] int32 or int64.
            target: its row of target nodes.
            num_rows: number of target nodes.
            num_cols: number of source nodes.
            loops: number of nodes that get one self-loop each, which replace all in the list. Until
                the graph is built, ``num_edges`` counts both.
        """
        graph = cls.__new__(cls)
        edges = edge_index.size(1) + (loops or 0)
        graph._describe(num_rows, num_cols, edges, edge_index)
        graph._target, graph._loops = target, loops
        graph._edges = EdgeList(edge_index)
        graph._captured = is_captured(edge_index)
        return graph

    @property
    @for_autograd
    def degree(self) -> Tensor:
        """[num_rows], entries of each row; it needs no CSR form."""
        if self._degree is None:
            edges = self.edge_list()
            if edges is None:
                self._degree = self.rowptr[1:] - self.rowptr[:-1]
            else:
                rows = edges.edge_index[edges.target]
                zeros = torch.zeros(self.num_rows, dtype=torch.int32, device=self.device)
                self._degree = zeros.index_add_(0, rows, zeros.new_ones(1).expand_as(rows))
        return self._degree

    @property
    def in_edge_order(self) -> bool:
        """Whether edge operands must be in the order of the edge list."""
        return False

    def csr(self, *, edge_order: bool = False) -> CSR:
        """Return the arrays for a forward pass.

        Args:
            edge_order: edge operands are in the order of the edge list, not in CSR order.
        """
        if not self.built and (other := self.build()) is not self:
            return other.csr(edge_order=edge_order)
        eid = self.perm if edge_order else None
        return CSR(self.rowptr, self.col, eid, self.num_cols, self.sorted, self._cache)

    @for_autograd
    def transposed(self, *, edge_order: bool = False) -> CSR:
        """Return the arrays of the transposed graph, for edge operands in the order of this one."""
        if not self.built and (other := self.build()) is not self:
            return other.transposed(edge_order=edge_order)
        if self._transposed is None:
            self._transposed = transpose(self.rowptr, self.col, self.num_cols)
        rowptr, col, perm = self._transposed
        if edge_order and self.perm is not None:
            if self._transposed_edges is None:
                self._transposed_edges = self.perm.index_select(0, perm)
            perm = self._transposed_edges
        return CSR(rowptr, col, perm, self.num_rows, True, self._transposed_cache)

    def __repr__(self) -> str:
        dtype = f"{self.rowptr.dtype}, " if self.built else ""
        return (
            f"Graph(num_rows={self.num_rows}, num_cols={self.num_cols}, "
            f"num_edges={self.num_edges}, {dtype}device={self.device})"
        )


def check_graph(graph: object) -> None:
    """Raise ValueError unless this is a Graph; the message says how to make one."""
    if not isinstance(graph, Graph):
        got = f"a tensor {shown(graph)}" if isinstance(graph, Tensor) else shown(graph)
        raise ValueError(
            f"expected 'graph' to be a Graph (got {got}); of an edge_index, "
            "Graph.from_edge_index(edge_index) makes one"
        )
