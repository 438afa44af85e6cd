"""Launches the products with CBSR features: which tiles, how many programs, long rows in pieces."""

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from pyg_accel.backends.triton.gspmm import device_facts
from pyg_accel.backends.triton.kernels.cbsr import (
    combine_kernel,
    dot_kernel,
    pack_kernel,
    spmm_kernel,
    sspmm_kernel,
)
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.backends.triton.schedule import schedule_of
from pyg_accel.graph import CSR

__all__ = ["dot", "spmm", "sspmm"]

OCTETS = 32  # of a tile: a warp's
UNROLL = 4  # edges that a program of `spmm` has in flight
GATHERS = 8  # features that a thread of `sspmm` and `dot` has in flight
SPLIT, PIECE = 2048, 1024
L2_PART = 0.6  # of the cache for a slice of features; the rest is for indices that stream by
SECTOR_FLOATS = 8


def spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_spmm`."""
    out = values.new_empty(csr.num_rows, width)
    if out.numel() == 0:
        return out
    pack, octets = _pack(indices, width)
    across = min(_ceil_power(octets), OCTETS)
    eid = None if weight is None else csr.eid
    mean = reduce == "mean"
    constants = {"UNROLL": UNROLL, "OCTETS": across, "ACC": _accumulator(values)}

    def go(tasks: int, begin: Tensor | None, end: Tensor | None, into: Tensor) -> None:
        arguments = (csr.rowptr, begin, end, csr.col, eid, weight, pack, values, into,
                     SPLIT, values.size(1), width, octets)  # fmt: skip
        launch(spmm_kernel, (tasks, -(-octets // across)), arguments, PIECES=begin is not None,
               MEAN=mean and begin is None, **constants)  # fmt: skip

    go(csr.num_rows, None, None, out)
    _in_pieces(csr, out, mean, lambda p, part: go(p.row.numel(), p.begin, p.end, part))
    return out


def sspmm(transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.sspmm`."""
    k, width = indices.size(1), x.size(1)
    out = x.new_empty(indices.shape)
    if out.numel() == 0:
        return out
    octets = -(-width // 8)
    slice_octets = _slice(x)
    slices = -(-octets // slice_octets) if slice_octets else 1
    pack = _pack(indices, width)[0] if slice_octets else None
    slots = min(_ceil_power(-(-3 * k // (2 * slices))), 32)  # few slices hold more
    eid = None if weight is None else transposed.eid
    constants = {"EDGES": GATHERS * 32 // slots, "SLOTS": slots, "SLICE": slice_octets,
                 "ACC": _accumulator(x)}  # fmt: skip

    def go(tasks: int, where: tuple[Any, Any, Any], into: Tensor) -> None:
        arguments = (transposed.rowptr, *where, transposed.col, eid, weight, pack, indices, x, into,
                     SPLIT, k, width, octets)  # fmt: skip
        launch(sspmm_kernel, (tasks, slices), arguments, PIECES=where[0] is not None, **constants)

    go(transposed.num_rows, (None, None, None), out)
    _in_pieces(transposed, out, False,
               lambda p, part: go(p.row.numel(), (p.row, p.begin, p.end), part))  # fmt: skip
    return out


def dot(csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.cbsr_dot`."""
    out = values.new_empty(csr.col.numel())
    if out.numel() == 0:
        return out
    k, width = values.size(1), x.size(1)
    slots = min(_ceil_power(k), 32)
    constants = {"EDGES": GATHERS * 32 // slots, "SLOTS": slots, "ACC": _accumulator(x)}
    pieces = schedule_of(csr.rowptr, SPLIT, PIECE, ordered=False).pieces
    calls: list[tuple[int, tuple[Any, Any, Any]]] = [(csr.num_rows, (None, None, None))]
    if pieces is not None:
        calls.append((pieces.row.numel(), (pieces.row, pieces.begin, pieces.end)))
    for tasks, where in calls:
        arguments = (csr.rowptr, *where, csr.col, csr.eid, values, indices, x, out, SPLIT, k, width)
        launch(dot_kernel, (tasks,), arguments, PIECES=where[0] is not None, **constants)
    return out


def _pack(indices: Tensor, width: int) -> tuple[Tensor, int]:
    """The words of all nodes [N, octets]: 16 bits hold them up to 256 columns."""
    octets = -(-width // 8)
    dtype = torch.int16 if width <= 256 else torch.int32
    pack = torch.empty(indices.size(0), octets, dtype=dtype, device=indices.device)
    if pack.numel():
        arguments = (indices, pack, pack.numel(), octets, indices.size(1))
        launch(pack_kernel, (-(-pack.numel() // 512),), arguments, warps=4, ELEMENTS=512)
    return pack, octets


def _slice(x: Tensor) -> int:
    """Octets of columns of x that are worked on at a time; 0 for all, where slices do not pay."""
    rows, width = x.shape
    fits = int(device_facts(x).l2_bytes * L2_PART) // max(rows * x.element_size(), 1)
    if fits >= width or fits < 4 * SECTOR_FLOATS:
        return 0
    return int(_ceil_power(fits + 1)) // 2 // 8


def _in_pieces(csr: CSR, out: Tensor, mean: bool, go: Callable[[Any, Tensor], None]) -> None:
    """Compute the rows that are longer than SPLIT."""
    pieces = schedule_of(csr.rowptr, SPLIT, PIECE, ordered=False).pieces
    if pieces is None:
        return
    accumulate = torch.float64 if out.dtype == torch.float64 else torch.float32
    columns = out.size(1)
    part = out.new_empty(pieces.row.numel(), columns, dtype=accumulate)
    go(pieces, part)
    block = min(_ceil_power(columns), 64)
    launch(combine_kernel, (pieces.rows.numel(), -(-columns // block)),
           (csr.rowptr, pieces.rows, pieces.first, part, out, columns), PARTS=4, COLUMNS=block,
           MEAN=mean, ACC=_accumulator(out))  # fmt: skip


def _accumulator(t: Tensor) -> Any:
    return tl.float64 if t.dtype == torch.float64 else tl.float32


def _ceil_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
