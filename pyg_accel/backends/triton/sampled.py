"""Launches sampled aggregation."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.sampling import Sampling, primes
from pyg_accel.backends.triton.gspmm import device_facts
from pyg_accel.backends.triton.kernels.sampled import choose_kernel, scale_kernel, sum_kernel
from pyg_accel.backends.triton.launch import Device
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.backends.triton.schedule import schedule_of
from pyg_accel.graph import CSR

__all__ = ["SampledTile", "choose_sampled_tile", "run"]

WARP = 32
LINE = 128  # bytes that a load of features should have in one piece
L2_PERCENT = 75  # of the L2 that features may take
CHOOSE_TILE = (8, 64)  # rows, and entries of each, whose columns a program lays side by side
SCALE_ROWS = 256  # of a program that computes scales
WHOLE = 2**62  # entries: no row is cut
# Below these, positions are computed in 32 bits: see `_position` in the kernel; four steps of less
# than a row's length also fit.
INT32_ENTRIES, INT32_WIDTH = 2**28, 2**20


@dataclass(frozen=True, slots=True)
class SampledTile:
    """A program's share of the sums.

    Attributes:
        rows: of the output.
        lanes: entries of each side by side.
        columns: features.
        unroll: entries of a lane that are in flight.
        warps: of a program.
    """

    rows: int
    lanes: int
    columns: int
    unroll: int
    warps: int


@lru_cache(maxsize=4096)
def choose_sampled_tile(
    device: Device, num_cols: int, columns: int, itemsize: int, width: int
) -> SampledTile:
    """Return the tile for a call.

    Args:
        device: what it runs on.
        num_cols: rows of the features.
        columns: features of a head.
        itemsize: bytes of one.
        width: entries of a row at most.
    """
    whole = 1 << max(columns - 1, 0).bit_length()
    line = LINE // itemsize
    fits = device.l2_bytes * L2_PERCENT // 100 // max(num_cols * itemsize, 1)
    wide = min(whole, 512 // itemsize)
    slice_ = min(wide, max(line, 1 << (fits.bit_length() - 1))) if fits >= line else wide
    rows = max(WARP * min(16 // itemsize, slice_) // slice_, 1)
    lanes = min(rows, 4) if width > 256 else 1
    unroll = max(1, min(8, 1 << max(width // lanes - 1, 0).bit_length()))
    return SampledTile(rows // lanes, lanes, slice_, unroll, 1)


def run(
    csr: CSR,
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    sampling: Sampling,
    seed: Tensor | None,
    tile: SampledTile | None = None,
) -> Tensor:
    """See :meth:`pyg_accel.backends.Backend.sampled_spmm`."""
    import triton.language as tl

    rows, entries = csr.num_rows, csr.col.numel()
    _, heads, features = x.shape
    out = torch.empty(rows, heads, features, device=x.device,
                      dtype=x.dtype if scale is None else scale.dtype)  # fmt: skip
    if out.numel() == 0 or entries == 0:
        return out.zero_()
    if tile is None:
        itemsize = x.element_size()
        tile = choose_sampled_tile(
            device_facts(x), csr.num_cols, features, itemsize, sampling.width
        )
    by_row = scale is not None and scale.size(1) == 1 and scale.size(0) == csr.num_cols
    width = min(sampling.width, entries)
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    shared: dict[str, Any] = {
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "POS": tl.int32 if entries < INT32_ENTRIES and width < INT32_WIDTH else tl.int64,
    }
    scales = scale.flatten() if by_row and scale is not None else None
    if sampling.rescale == "gcn":
        scales = _scales(csr, scales, width, accumulate)
    draws = (seed, primes(x.device)) if sampling.strategy == "random" else (None, None)
    sources = (csr.col, csr.eid, weight, scales)
    how: dict[str, Any] = {
        "STRATEGY": sampling.strategy,
        "WEIGHTED": "" if weight is None else "edge" if weight.size(1) == 1 else "head",
        "NUMBERED": csr.eid is not None,
        "SCALED": scales is not None,
    }
    # Where rows are long for their samples, choose once for all slices of columns; entries that lie
    # side by side are as good as chosen.
    if rows * width < entries and (sampling.strategy != "bucket" or scales is not None):
        sources = _chosen(csr, sources, draws, (rows, heads, width), accumulate, {**how, **shared})
        how = {"STRATEGY": "chosen", "WEIGHTED": "" if sources[2] is None else "edge",
               "NUMBERED": False, "SCALED": False}  # fmt: skip
    order = None
    if rows * width >= entries and tile.rows > 1:
        order = schedule_of(csr.rowptr, entries, WHOLE, WHOLE, ordered=True).order

    stored, kind_of_bytes = x, ""
    if scale is not None:
        kind_of_bytes = "int8"
        if x.dtype == torch.float8_e4m3fn:
            native = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
            stored, kind_of_bytes = x.view(torch.uint8), "fp8 native" if native else "fp8"
    unit = max(16 // x.element_size(), 1)
    if features % unit or x.stride(0) % unit or x.data_ptr() % 16 or out.data_ptr() % 16:
        unit = 1
    launch(
        sum_kernel,
        (-(-rows // tile.rows), -(-features // tile.columns) * heads),
        (csr.rowptr, order, *sources, *draws, stored, None if by_row else scale, out, rows,
         features // unit, x.stride(0) // unit, heads, width),
        warps=tile.warps,
        ROWS=tile.rows,
        LANES=tile.lanes,
        COLUMNS=tile.columns,
        UNROLL=tile.unroll,
        UNIT=unit,
        ORDERED=order is not None,
        RESCALE=sampling.rescale,
        COLUMN_SCALE=scale is not None and not by_row,
        BYTES=kind_of_bytes,
        **how,
        **shared,
    )  # fmt: skip
    return out


def _scales(csr: CSR, given: Tensor | None, width: int, dtype: torch.dtype) -> Tensor:
    """[num_cols], the factor of a source for the sampled degrees of a GCN, times what is given."""
    scales = torch.empty(csr.num_cols, dtype=dtype, device=csr.col.device)
    launch(
        scale_kernel,
        (-(-csr.num_cols // SCALE_ROWS),),
        (csr.rowptr, given, scales, csr.num_cols, width),
        ROWS=SCALE_ROWS,
        GIVEN=given is not None,
    )
    return scales


def _chosen(
    csr: CSR,
    sources: tuple[Tensor | None, ...],
    draws: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int],
    accumulate: torch.dtype,
    how: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Lay samples side by side: columns, nothing, factors of every head or None, nothing."""
    rows, heads, width = sizes
    factors = None
    if how["WEIGHTED"] or how["SCALED"]:
        factors = torch.empty(heads, rows * width, dtype=accumulate, device=csr.col.device)
    columns = csr.col.new_empty(rows * width)
    block, lanes = CHOOSE_TILE
    launch(
        choose_kernel,
        (-(-rows // block), 1 if factors is None else heads),
        (csr.rowptr, *sources, *draws, columns, factors, *sizes),
        warps=4,
        ROWS=block,
        LANES=min(lanes, 1 << (width - 1).bit_length()),
        **how,
    )
    return columns, None, factors, None
