"""CSR matrices: their arrays, how they are checked, and built from lists of edges."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from pyg_accel.runtime.checks import require, shown
from pyg_accel.runtime.native import direct, library_of

__all__ = [
    "CSR", "INDEX_DTYPES", "EdgeList", "Edges", "ascends", "check_csr", "check_perm",
    "csr_of_edges", "entries_of_rows", "for_autograd", "ptr2index", "transpose",
]  # fmt: skip

INDEX_DTYPES = (torch.int32, torch.int64)


class CSR(NamedTuple):
    """A CSR matrix for backends: arrays of one index dtype.

    Attributes:
        rowptr: [num_rows + 1], where the entries of each row begin.
        col: [E], the column of every entry.
        eid: [E], the row of edge operands for every entry; None if they are in CSR order.
        num_cols: number of columns.
        sorted: columns ascend within each row.
        cache: values derived from the matrix (:func:`.facts.cache_of`); None where only its
            arrays tell matrices apart.
    """

    rowptr: Tensor
    col: Tensor
    eid: Tensor | None
    num_cols: int
    sorted: bool
    cache: dict[Any, Any] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1


class Edges(NamedTuple):
    """An edge list for backends, of a graph without a CSR form.

    Attributes:
        edge_index: [2, E] int32 or int64.
        target: row of ``edge_index`` with the target nodes; the other one has the sources.
        num_rows: number of target nodes.
        num_cols: number of source nodes.
        loops: number of nodes with one self-loop each, appended to the edges; they replace all
            self-loops in ``edge_index``. None leaves the list unchanged.
    """

    edge_index: Tensor
    target: int
    num_rows: int
    num_cols: int
    loops: int | None = None

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return the sources and targets of all edges, including replaced self-loops."""
        edge_index = self.edge_index
        if self.loops is not None:
            nodes = torch.arange(self.loops, dtype=edge_index.dtype, device=edge_index.device)
            edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        return edge_index[1 - self.target], edge_index[self.target]

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes that kernels take.

        Numbers of edges, sources and targets; offsets of the ids of sources and of targets in the
        memory of the edge list, the stride between edges, and the number of edges in the list.
        """
        rows, step = self.edge_index.stride()
        at = (0, rows) if self.target == 1 else (rows, 0)
        listed = self.edge_index.size(1)
        return listed + (self.loops or 0), self.num_cols, self.num_rows, *at, step, listed


_P = ParamSpec("_P")
_T = TypeVar("_T")


def for_autograd(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function make normal tensors in inference mode, as training may use stored results."""

    @functools.wraps(make)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # Dynamo cannot trace is_inference_mode_enabled(); compiled code runs in the traced mode.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    return wrapper


def ptr2index(ptr: Tensor, size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the row of every entry, like PyG's function of the same name.

    Args:
        ptr: [N + 1], where the entries of each row begin.
        size: number of entries, so that the host need not wait for the device.
        dtype: of the result, [size].
    """
    ids = torch.arange(ptr.numel() - 1, dtype=dtype, device=ptr.device)
    return torch.repeat_interleave(ids, ptr.diff(), output_size=size)


def entries_of_rows(rowptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of some rows of a CSR matrix, and for each its position in ``rows``.

    Args:
        rowptr: [N + 1].
        rows: [R], in any order.

    Returns:
        Positions [S] and entries [S], row by row.
    """
    begin = rowptr[rows]
    counts = rowptr[rows + 1] - begin
    position = torch.repeat_interleave(counts)
    shift = begin - counts.cumsum(0) + counts
    return position, torch.arange(position.numel(), device=position.device) + shift[position]


@for_autograd
def csr_of_edges(
    edge_index: Tensor, target: int, num_rows: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rowptr, col and perm of an edge list, by counting sort.

    Args:
        edge_index: [2, E].
        target: row of ``edge_index`` with the rows of the matrix.
        num_rows: number of rows of the matrix.
        num_cols: number of its columns.

    Raises:
        IndexError: for ids outside of the sizes, on a CPU.
    """
    library = library_of(edge_index.device)
    narrow = _are_narrow(num_rows, num_cols, edge_index.size(1))
    if library is not None and not edge_index.is_cuda:
        try:
            rowptr, col, perm = direct(library.csr_from_coo)(
                edge_index, target, num_rows, num_cols, not narrow
            )
        except RuntimeError as error:
            if "outside of" not in str(error):
                raise
            line = str(error).splitlines()[0]
            raise IndexError(line[line.index("found") :]) from None  # drop the C++ location
        return rowptr, col, perm
    row, col = edge_index[target], edge_index[1 - target]
    if library is not None and narrow:
        rowptr, col, perm = library.csr_from_coo(row, col, num_rows, num_cols)
        return rowptr, col, perm
    row, col = row.contiguous(), col.contiguous()
    for name, ids, most in (("target", row, num_rows), ("source", col, num_cols)):
        inside = ((ids >= 0) & (ids < most)).all()
        if ids.device.type == "cpu":
            if not bool(inside):
                raise IndexError(f"found {name} ids outside of [0, {most})")
        else:  # like PyG's kernels: without waiting for the device
            torch._assert_async(inside, f"found {name} ids outside of [0, {most})")
    dtype = torch.int32 if narrow else torch.int64
    stride = max(num_cols, 1)
    keys, perm = torch.sort(row.long() * stride + col, stable=True)
    starts = torch.arange(0, (num_rows + 1) * stride, stride, device=row.device)
    rowptr = torch.searchsorted(keys, starts, out_int32=narrow)
    return rowptr, (keys % stride).to(dtype), perm.to(dtype)


def check_csr(rowptr: Tensor, col: Tensor) -> None:
    """Raise ValueError for arrays that are not a CSR matrix; values of columns are not checked."""
    for name, array in (("rowptr", rowptr), ("col", col)):
        if not isinstance(array, Tensor) or array.dim() != 1:
            raise ValueError(f"expected '{name}' to be a one-dimensional tensor")
        if array.dtype not in INDEX_DTYPES:
            raise ValueError(f"expected '{name}' to be int32 or int64 (got {array.dtype})")
    if rowptr.dtype != col.dtype or rowptr.device != col.device:
        raise ValueError("expected 'rowptr' and 'col' to share their dtype and device")
    ends = "expected 'rowptr' to run from 0 to the number of entries of 'col'"
    if rowptr.numel() == 0:
        raise ValueError(ends)
    require((rowptr[0] == 0) & (rowptr[-1] == col.numel()), ends)
    require((rowptr[1:] >= rowptr[:-1]).all(), "expected 'rowptr' to ascend")


def ascends(rowptr: Tensor, col: Tensor) -> Tensor:
    """Whether columns ascend within each row, as a tensor of one element."""
    row = ptr2index(rowptr, col.numel())
    return ((col[1:] >= col[:-1]) | (row[1:] != row[:-1])).all()


def check_perm(perm: Tensor, col: Tensor) -> None:
    """Raise ValueError unless ``perm`` is a permutation of the entries of ``col``."""
    if not isinstance(perm, Tensor) or perm.shape != col.shape:
        raise ValueError(f"expected 'perm' to be a tensor {list(col.shape)} (got {shown(perm)})")
    if perm.dtype != col.dtype or perm.device != col.device:
        raise ValueError("expected 'perm' to share dtype and device with 'col'")
    message = f"expected 'perm' to have every number of [0, {col.numel()}) once"
    require(((perm >= 0) & (perm < col.numel())).all(), message)
    seen = torch.zeros(col.numel(), dtype=torch.bool, device=col.device)
    require(seen.index_fill_(0, perm.long(), True).all(), message)


def _are_narrow(num_rows: int, num_cols: int, entries: int) -> bool:
    """Whether 32-bit indices suffice, which halve the bytes of indices that kernels read."""
    return max(num_rows, num_cols, entries) < 2**31 - 1


def transpose(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return colptr, row and the entries of the matrix in the order of its transpose."""
    library = library_of(col.device)
    if library is not None and (
        not col.is_cuda or _are_narrow(rowptr.numel() - 1, num_cols, col.numel())
    ):
        colptr, row, perm = direct(library.csr_transpose)(rowptr, col, num_cols)
        return colptr, row, perm
    row = ptr2index(rowptr, col.numel(), col.dtype)
    columns, perm = torch.sort(col, stable=True)
    starts = torch.arange(num_cols + 1, dtype=col.dtype, device=col.device)
    colptr = torch.searchsorted(columns, starts, out_int32=col.dtype == torch.int32)
    return colptr, row[perm], perm.to(col.dtype)


class EdgeList:
    """A reference to an edge list [2, E], which must not change before it is read.

    Attributes:
        strong: the list, where the graph keeps it alive.
    """

    __slots__ = ("_part", "_version", "_weak", "strong")

    def __init__(self, edge_index: Tensor) -> None:
        self.strong: Tensor | None = edge_index
        self._version = None if edge_index.is_inference() else edge_index._version
        self._weak: weakref.ref[Tensor] | None = None
        self._part: tuple[Any, ...] = ()

    def release(self) -> None:
        """Do not keep it alive."""
        edge_index = self.strong
        if edge_index is not None:
            self._weak, self.strong = weakref.ref(edge_index), None
            self._part = (
                weakref.ref(edge_index.untyped_storage()), edge_index.dtype,
                (edge_index.storage_offset(), edge_index.shape, edge_index.stride()),
            )  # fmt: skip

    def tensor(self) -> Tensor | None:
        """Return it; None if that tensor has been freed, though its memory may not be."""
        edge_index = self.strong if self._weak is None else self._weak()
        # A compiler cannot trace the other questions.
        if edge_index is None or torch.compiler.is_compiling() or edge_index.is_inference():
            return edge_index
        if self._version in (None, edge_index._version):
            return edge_index
        raise RuntimeError("the edge list of a graph was changed in place before it was read")

    def restored(self) -> Tensor:
        """Return it, or another tensor of the same memory."""
        edge_index = self.tensor()
        if edge_index is not None:
            return edge_index
        owner, dtype, part = self._part
        storage = owner()
        if storage is None:
            raise RuntimeError("the edge list of a graph was freed before it was read")
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        restored: Tensor = empty.set_(storage, *part)
        return restored
