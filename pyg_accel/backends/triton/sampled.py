"""Launches sampled aggregation."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.sampling import Sampling
from pyg_accel.backends.triton.kernels.sampled import choose_kernel, sum_kernel
from pyg_accel.backends.triton.launcher import launch, type_of
from pyg_accel.backends.triton.padding import padded, pays
from pyg_accel.backends.triton.plan import device_facts
from pyg_accel.graph import CSR
from pyg_accel.runtime.machine import Gpu

__all__ = ["SampledTile", "choose_sampled_tile", "run"]

WARP = 32
LINE = 128  # bytes that a load of features should have in one piece
L2_PERCENT = 75  # of the L2 that features may take
CHOOSE_TILE = (8, 64)  # rows, and entries of each, whose columns a program lists
# Below these, positions are computed in 32 bits: see `_position` in the kernel.
INT32_ENTRIES, INT32_WIDTH = 2**29, 2**20


@dataclass(frozen=True, slots=True)
class SampledTile:
    """The part of the sums of a program.

    Attributes:
        rows: of the output.
        lanes: entries of each row in parallel.
        columns: features.
        unroll: entries of a lane that are in flight.
    """

    rows: int
    lanes: int
    columns: int
    unroll: int


@lru_cache(maxsize=4096)
def choose_sampled_tile(
    device: Gpu, num_cols: int, columns: int, itemsize: int, width: int
) -> SampledTile:
    """Return the tile for a call.

    Args:
        device: the device.
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
    return SampledTile(rows // lanes, lanes, slice_, unroll)


def run(
    csr: CSR, x: Tensor, scale: Tensor | None, weight: Tensor | None, sampling: Sampling
) -> Tensor:
    """List the columns of the sampled entries, then sum their rows."""
    rows, entries = csr.num_rows, csr.col.numel()
    _, heads, features = x.shape
    if scale is None and pays(x, min(rows * sampling.width, entries), rows):
        out = run(csr, padded(x), None, weight, sampling)
        return out[..., :features].contiguous()
    out = torch.empty(rows, heads, features, device=x.device,
                      dtype=x.dtype if scale is None else scale.dtype)  # fmt: skip
    if out.numel() == 0 or entries == 0:
        return out.zero_()
    tile = choose_sampled_tile(
        device_facts(x), csr.num_cols, features, x.element_size(), sampling.width
    )
    by_row = scale is not None and scale.size(1) == 1 and scale.size(0) == csr.num_cols
    width = min(sampling.width, entries)
    small = entries < INT32_ENTRIES and width < INT32_WIDTH
    kind = accumulate(x.dtype)
    shared: dict[str, Any] = {
        "ACC": type_of(kind),
        "POS": type_of(torch.int32 if small else torch.int64),
        "PADDED": rows * width < entries,
    }
    factors = weight is not None or by_row
    sources, values, samples = csr.col, None, 0
    if sampling.strategy == "bucket" and not factors:
        shared["PADDED"] = False  # the sampled columns are contiguous
    else:
        samples = min(rows * width, entries)
        sources = csr.col.new_empty(samples)
        if factors:
            values = torch.empty(heads, samples, dtype=kind, device=x.device)
        block, lanes = CHOOSE_TILE
        launch(
            choose_kernel,
            (-(-rows // block), heads if factors else 1),
            (csr.rowptr, csr.col, csr.eid, scale if by_row else None, weight, sources, values,
             rows, heads, width, samples),
            warps=4,
            ROWS=block,
            LANES=min(lanes, 1 << (width - 1).bit_length()),
            STRATEGY=sampling.strategy,
            WEIGHTED="" if weight is None else "edge" if weight.size(1) == 1 else "head",
            NUMBERED=csr.eid is not None,
            ROW_SCALE=by_row,
            **shared,
        )  # fmt: skip

    unit = max(16 // x.element_size(), 1)
    if features % unit or x.stride(0) % unit or x.data_ptr() % 16 or out.data_ptr() % 16:
        unit = 1
    launch(
        sum_kernel,
        (-(-rows // tile.rows), -(-features // tile.columns) * heads),
        (csr.rowptr, sources, values, x, None if by_row else scale, out, rows,
         features // unit, x.stride(0) // unit, heads, width, samples),
        warps=1,
        ROWS=tile.rows,
        LANES=tile.lanes,
        COLUMNS=tile.columns,
        UNROLL=tile.unroll,
        UNIT=unit,
        RESCALE=sampling.rescale,
        FACTORS=factors,
        COLUMN_SCALE=scale is not None and not by_row,
        INT8=scale is not None,
        **shared,
    )  # fmt: skip
    return out
