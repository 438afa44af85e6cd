"""Launches sampled aggregation."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.sampling import Sampling, primes
from pyg_accel.backends.triton.gspmm import device_facts
from pyg_accel.backends.triton.kernels.sampled import sampled_kernel
from pyg_accel.backends.triton.launch import Device
from pyg_accel.backends.triton.launcher import launch
from pyg_accel.graph import CSR

__all__ = ["SampledTile", "choose_sampled_tile", "run"]

THREADS = 128
LINE = 128  # bytes that a load of features should have in one piece
L2_PERCENT = 75  # of the L2 that features may take
# Below these, positions are computed in 32 bits: see `_position` in the kernel.
INT32_ENTRIES, INT32_WIDTH = 2**29, 2**20


@dataclass(frozen=True, slots=True)
class SampledTile:
    """A program's share of the work.

    Attributes:
        rows: of the output.
        lanes: entries of each side by side.
        columns: features.
        unroll: entries of a lane that are in flight.
        warps: of a program.
        keep: write down what the first slice of columns has chosen, for the others.
    """

    rows: int
    lanes: int
    columns: int
    unroll: int
    warps: int
    keep: bool


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
    vector = min(16 // itemsize, slice_)
    rows = max(THREADS * vector // slice_, 1)
    lanes = 4 if width > 256 and rows >= 4 else 1
    unroll = max(1, min(8, 1 << max(width // lanes - 1, 0).bit_length()))
    return SampledTile(rows // lanes, lanes, slice_, unroll, THREADS // 32, False)


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

    _, heads, features = x.shape
    out = torch.empty(csr.num_rows, heads, features, device=x.device,
                      dtype=x.dtype if scale is None else scale.dtype)  # fmt: skip
    if out.numel() == 0:
        return out
    if csr.col.numel() == 0:
        return out.zero_()
    device = device_facts(x)
    if tile is None:
        tile = choose_sampled_tile(device, csr.num_cols, features, x.element_size(), sampling.width)
    kind = ""
    if scale is not None:
        kind = "int8"
        if x.dtype == torch.float8_e4m3fn:
            native = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
            x, kind = x.view(torch.uint8), "fp8 native" if native else "fp8"
    unit = max(16 // x.element_size(), 1)
    stride = x.stride(0)
    if features % unit or stride % unit or x.data_ptr() % 16 or out.data_ptr() % 16:
        unit = 1
    by_row = scale is not None and scale.size(1) == 1 and scale.size(0) == csr.num_cols
    double = x.dtype == torch.float64
    width = min(sampling.width, csr.col.numel())
    small = csr.col.numel() < INT32_ENTRIES and width < INT32_WIDTH
    constants: dict[str, Any] = {
        "ROWS": tile.rows,
        "LANES": tile.lanes,
        "COLUMNS": tile.columns,
        "UNROLL": tile.unroll,
        "UNIT": unit,
        "STRATEGY": sampling.strategy,
        "RESCALE": sampling.rescale,
        "WEIGHTED": "" if weight is None else "edge" if weight.size(1) == 1 else "head",
        "NUMBERED": csr.eid is not None,
        "ROW_SCALE": by_row,
        "COLUMN_SCALE": scale is not None and not by_row,
        "BYTES": kind,
        "ACC": tl.float64 if double else tl.float32,
        "POS": tl.int32 if small else tl.int64,
    }
    slices = -(-features // tile.columns) * heads
    blocks = -(-csr.num_rows // tile.rows)
    keep = tile.keep and slices > 1 and heads == 1
    kept: list[Tensor | None] = [None, None]
    if keep:
        size = (csr.num_rows, width)
        kept = [csr.col.new_empty(size)]
        kept.append(torch.empty(size, dtype=torch.float64 if double else torch.float32,
                                device=x.device))  # fmt: skip
    scales = (scale, None) if by_row else (None, scale)
    random = sampling.strategy == "random"
    pointers = (csr.rowptr, csr.col, csr.eid, x, *scales, weight, seed,
                primes(x.device) if random else None, *kept, out)  # fmt: skip
    sizes = (csr.num_rows, features // unit, stride // unit, heads, width)
    stages = [("", 0, slices)] if not keep else [("write", 0, 1), ("read", 1, slices - 1)]
    for name, first, parts in stages:
        launch(sampled_kernel, (blocks, parts), (*pointers, *sizes, first), warps=tile.warps,
               KEEP=name, **constants)  # fmt: skip
    return out
