"""The graph as kernels read it: CSR by target node, its transpose, the way back to edges."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from pyg_accel.checks import require, shown, whole
from pyg_accel.native import library_of

__all__ = ["CSR", "Graph", "check_graph", "for_autograd", "ptr2index"]

_INDEX_DTYPES = (torch.int32, torch.int64)


class CSR(NamedTuple):
    """What a backend sees of a graph: arrays of one index dtype.

    Attributes:
        rowptr: [num_rows + 1], where the entries of each row begin.
        col: [E], the column of every entry.
        eid: [E], the row of edge operands that belongs to every entry; None if they are in order.
        num_cols: number of columns.
        sorted: columns ascend within each row.
        known: what was derived of the matrix (:func:`pyg_accel.facts.known_of`); None where only
            its arrays tell matrices apart.
    """

    rowptr: Tensor
    col: Tensor
    eid: Tensor | None
    num_cols: int
    sorted: bool
    known: dict[Any, Any] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1


_P = ParamSpec("_P")
_T = TypeVar("_T")


def for_autograd(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make arrays that autograd may save, in inference mode too: training may use what is kept."""

    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # Dynamo cannot trace the question; compiled code runs in the mode that it was traced in.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return made


def ptr2index(ptr: Tensor, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the row of every entry, as PyG's function of that name does.

    Args:
        ptr: [N + 1], where the entries of each row begin.
        size: number of entries, known without waiting for the device.
        dtype: of the result, [size].
    """
    ids = torch.arange(ptr.numel() - 1, dtype=dtype, device=ptr.device)
    return torch.repeat_interleave(ids, ptr.diff(), output_size=size)


class Graph:
    """A directed, possibly bipartite graph in CSR form: row = target node, column = source node.

    Entry k of the CSR is edge ``perm[k]`` of the edge list that the graph was built from (``perm``
    is None if the orders agree). The transpose is built when something first asks for it.

    Attributes:
        rowptr: [num_rows + 1].
        col: [E], ascending within each row when built from an edge list.
        perm: [E] or None.
        num_rows: number of target nodes.
        num_cols: number of source nodes.
        sorted: columns ascend within each row.
        is_cuda: the arrays are on a GPU.
        plans: how operators run on the graph, by the kind of the call (:mod:`pyg_accel.ops.plan`).
    """

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        perm: Tensor | None,
        num_cols: int,
        *,
        sorted: bool,
    ) -> None:
        """Check arrays and hold them.

        Args:
            rowptr: [num_rows + 1] int32 or int64, ascending from 0 to E.
            col: [E] of the same dtype and device.
            perm: [E] of the same dtype and device, or None.
            num_cols: number of source nodes.
            sorted: columns ascend within each row.

        Raises:
            ValueError: if that is not so.
        """
        _check_csr(rowptr, col)
        inside = (col >= 0) & (col < whole("num_cols", num_cols, 0))
        require(inside.all(), f"expected 'col' within [0, {num_cols})")
        if sorted:
            require(_ascends(rowptr, col), "expected 'col' to ascend within each row, as 'sorted' "
                    "says")  # fmt: skip
        if perm is not None:
            _check_perm(perm, col)
            perm = perm.contiguous()
        self._hold(rowptr.contiguous(), col.contiguous(), perm, num_cols, sorted=sorted)

    def _hold(
        self, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, *, sorted: bool
    ) -> None:
        self.rowptr = rowptr
        self.col = col
        self.perm = perm
        self.num_rows = rowptr.numel() - 1
        self.num_cols = num_cols
        self.sorted = sorted
        self._transposed: tuple[Tensor, Tensor, Tensor] | None = None
        self._transposed_edges: Tensor | None = None
        self._degree: Tensor | None = None
        self.is_cuda = rowptr.is_cuda
        self.plans: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}
        self._known_of_transpose: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Copies run with plans of their own.
        return self.__dict__ | {"plans": {}, "_known": {}, "_known_of_transpose": {}}

    @classmethod
    def trusted(
        cls, rowptr: Tensor, col: Tensor, perm: Tensor | None, num_cols: int, *, sorted: bool
    ) -> "Graph":
        """Hold arrays that are known to be valid, without looking at them."""
        graph = cls.__new__(cls)
        graph._hold(rowptr, col, perm, num_cols, sorted=sorted)
        return graph

    @classmethod
    def from_csr(cls, rowptr: Tensor, col: Tensor, *, num_cols: int | None = None) -> "Graph":
        """Take over a CSR matrix; edge operands are then in its order.

        Args:
            rowptr: [num_rows + 1] int32 or int64, ascending from 0 to E.
            col: [E] of the same dtype and device.
            num_cols: number of source nodes; by default the larger of num_rows and max(col) + 1.

        Returns:
            A graph that holds these arrays.

        Raises:
            ValueError: if the arrays are not a CSR matrix.
        """
        _check_csr(rowptr, col)
        low, high = (int(col.min()), int(col.max())) if col.numel() else (0, -1)
        if num_cols is None:
            num_cols = max(rowptr.numel() - 1, high + 1)
        if low < 0 or high >= whole("num_cols", num_cols, 0):
            raise ValueError(f"expected 'col' within [0, {num_cols}) (got {low} to {high})")
        rowptr, col = rowptr.contiguous(), col.contiguous()
        ordered = bool(_ascends(rowptr, col))
        return cls.trusted(rowptr, col, None, num_cols, sorted=ordered)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        size: tuple[int | None, int | None] | None = None,
        flow: str = "source_to_target",
    ) -> "Graph":
        """Build the CSR form of an edge list by counting sort: linear in edges and nodes.

        Args:
            edge_index: [2, E] int32 or int64 of source (row 0) and target ids (row 1), in any
                order, duplicates and self-loops included.
            size: number of nodes that rows 0 and 1 refer to; by default max(edge_index) + 1 for
                both.
            flow: ``"source_to_target"`` as above, or ``"target_to_source"``: messages go from the
                nodes of row 1 to those of row 0.

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
        if edge_index.dtype not in _INDEX_DTYPES:
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
        rows, cols = edge_index[target], edge_index[1 - target]
        return cls._from_coo(rows, cols, int(sizes[target] or 0), int(sizes[1 - target] or 0))

    @classmethod
    @for_autograd
    def _from_coo(cls, row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> "Graph":
        # 32-bit indices halve what the kernels read beside the features.
        narrow = _are_narrow(num_rows, num_cols, row)
        library = library_of(row.device)
        if library is not None and row.is_cuda and narrow:
            rowptr, col, perm = library.csr_from_coo(row, col, num_rows, num_cols)
            return cls.trusted(rowptr, col, perm, num_cols, sorted=True)
        row, col = row.contiguous(), col.contiguous()
        if library is not None and not row.is_cuda:
            try:
                arrays = library.csr_from_coo(row, col, num_rows, num_cols, not narrow)
            except RuntimeError as error:
                if "outside of" not in str(error):
                    raise
                line = str(error).splitlines()[0]
                raise IndexError(line[line.index("found") :]) from None  # without the place in C++
            rowptr, col, perm = arrays
            return cls.trusted(rowptr, col, perm, num_cols, sorted=True)
        for name, ids, most in (("target", row, num_rows), ("source", col, num_cols)):
            inside = ((ids >= 0) & (ids < most)).all()
            if ids.device.type == "cpu":
                if not bool(inside):
                    raise IndexError(f"found {name} ids outside of [0, {most})")
            else:  # as PyG's own kernels do there: without waiting for the device
                torch._assert_async(inside, f"found {name} ids outside of [0, {most})")
        dtype = torch.int32 if narrow else torch.int64
        stride = max(num_cols, 1)
        keys, perm = torch.sort(row.long() * stride + col, stable=True)
        starts = torch.arange(0, (num_rows + 1) * stride, stride, device=row.device)
        rowptr = torch.searchsorted(keys, starts, out_int32=narrow)
        col, perm = (keys % stride).to(dtype), perm.to(dtype)
        return cls.trusted(rowptr, col, perm, num_cols, sorted=True)

    def arrays(self) -> list[Tensor | None]:
        """Return all arrays, those of the transpose too, in the order of :meth:`of_arrays`."""
        turned = self._transposed or (None, None, None)
        return [self.rowptr, self.col, self.perm, *turned, self._transposed_edges]

    @classmethod
    def of_arrays(cls, arrays: Sequence[Tensor | None], num_cols: int) -> "Graph":
        """Hold what :meth:`arrays` of a graph that was built from an edge list returned."""
        rowptr, col, perm, colptr, row, turned, edges = arrays
        assert rowptr is not None and col is not None
        graph = cls.trusted(rowptr, col, perm, num_cols, sorted=True)
        if colptr is not None and row is not None and turned is not None:
            graph._transposed = colptr, row, turned
        graph._transposed_edges = edges
        return graph

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.col.numel()

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return self.rowptr.device

    @property
    @for_autograd
    def degree(self) -> Tensor:
        """[num_rows], entries of each row."""
        if self._degree is None:
            self._degree = self.rowptr[1:] - self.rowptr[:-1]
        return self._degree

    @property
    def in_edge_order(self) -> bool:
        """Whether edge operands can only come in the order of the edge list."""
        return False

    def csr(self, *, edge_order: bool = False) -> CSR:
        """Return the arrays for a forward pass.

        Args:
            edge_order: edge operands are in the order of the edge list, not in that of the CSR.
        """
        eid = self.perm if edge_order else None
        return CSR(self.rowptr, self.col, eid, self.num_cols, self.sorted, self._known)

    @for_autograd
    def transposed(self, *, edge_order: bool = False) -> CSR:
        """Return the arrays of the transposed graph, for edge operands in the order of this one."""
        if self._transposed is None:
            self._transposed = _transpose(self.rowptr, self.col, self.num_cols)
        rowptr, col, perm = self._transposed
        if edge_order and self.perm is not None:
            if self._transposed_edges is None:
                self._transposed_edges = self.perm.index_select(0, perm)
            perm = self._transposed_edges
        return CSR(rowptr, col, perm, self.num_rows, True, self._known_of_transpose)

    def __repr__(self) -> str:
        return (
            f"Graph(num_rows={self.num_rows}, num_cols={self.num_cols}, "
            f"num_edges={self.num_edges}, {self.rowptr.dtype}, device={self.device})"
        )


def check_graph(graph: object) -> None:
    """Raise ValueError for what is no graph, with the way to make one."""
    if not isinstance(graph, Graph):
        got = f"a tensor {shown(graph)}" if isinstance(graph, Tensor) else shown(graph)
        raise ValueError(
            f"expected 'graph' to be a Graph (got {got}); of an edge_index, "
            "Graph.from_edge_index(edge_index) makes one"
        )


def _check_csr(rowptr: Tensor, col: Tensor) -> None:
    """Raise ValueError for arrays that are no CSR matrix, whatever its columns."""
    for name, array in (("rowptr", rowptr), ("col", col)):
        if not isinstance(array, Tensor) or array.dim() != 1:
            raise ValueError(f"expected '{name}' to be a one-dimensional tensor")
        if array.dtype not in _INDEX_DTYPES:
            raise ValueError(f"expected '{name}' to be int32 or int64 (got {array.dtype})")
    if rowptr.dtype != col.dtype or rowptr.device != col.device:
        raise ValueError("expected 'rowptr' and 'col' to share their dtype and device")
    ends = "expected 'rowptr' to run from 0 to the number of entries of 'col'"
    if rowptr.numel() == 0:
        raise ValueError(ends)
    require((rowptr[0] == 0) & (rowptr[-1] == col.numel()), ends)
    require((rowptr[1:] >= rowptr[:-1]).all(), "expected 'rowptr' to ascend")


def _ascends(rowptr: Tensor, col: Tensor) -> Tensor:
    """Whether columns ascend within each row, as a tensor of one element."""
    row = ptr2index(rowptr, col.numel())
    return ((col[1:] >= col[:-1]) | (row[1:] != row[:-1])).all()


def _check_perm(perm: Tensor, col: Tensor) -> None:
    if not isinstance(perm, Tensor) or perm.shape != col.shape:
        raise ValueError(f"expected 'perm' to be a tensor {list(col.shape)} (got {shown(perm)})")
    if perm.dtype != col.dtype or perm.device != col.device:
        raise ValueError("expected 'perm' to share dtype and device with 'col'")
    message = f"expected 'perm' to have every number of [0, {col.numel()}) once"
    require(((perm >= 0) & (perm < col.numel())).all(), message)
    seen = torch.zeros(col.numel(), dtype=torch.bool, device=col.device)
    require(seen.index_fill_(0, perm.long(), True).all(), message)


def _are_narrow(num_rows: int, num_cols: int, entries: Tensor) -> bool:
    """Whether indices of 32 bits can count everything."""
    return max(num_rows, num_cols, entries.numel()) < 2**31 - 1


def _transpose(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    library = library_of(col.device)
    if library is not None and (not col.is_cuda or _are_narrow(rowptr.numel() - 1, num_cols, col)):
        colptr, row, perm = library.csr_transpose(rowptr, col, num_cols)
        return colptr, row, perm
    row = ptr2index(rowptr, col.numel(), col.dtype)
    columns, perm = torch.sort(col, stable=True)
    starts = torch.arange(num_cols + 1, dtype=col.dtype, device=col.device)
    colptr = torch.searchsorted(columns, starts, out_int32=col.dtype == torch.int32)
    return colptr, row[perm], perm.to(col.dtype)
