"""Launches the Tensor-Core SDDMM."""

import torch
from torch import Tensor

from pyg_accel.backends.cuda import remainder
from pyg_accel.backends.cuda.choice import MOST_SLICE
from pyg_accel.backends.cuda.plan import in_32_bits, plan_of
from pyg_accel.backends.cuda.spmm import aligned
from pyg_accel.graph import CSR
from pyg_accel.runtime.machine import gpu_of
from pyg_accel.runtime.native import cuda_library

__all__ = ["most_features", "run"]

# As in csrc/cuda/sddmm_kernel.cuh: bytes of a row that are copied together, and bytes of the rings
# and results of warps.
CHUNK, RING_BYTES = 128, 4 * (3 * 32 * 128 + 16 * 40 * 4)


def run(
    csr: CSR,
    target: Tensor,
    source: Tensor,
    *,
    window: int,
    slice: int,
    exact: bool,
    least: int = 1,
) -> Tensor:
    """Return the dot product of the features of both ends of every edge, [E] by ``csr.eid``.

    Args:
        csr: the graph.
        target: [num_rows, F].
        source: [num_cols, F].
        window: rows of a tile: 16, 32 or 64.
        slice: features of a pass over all edges; at most 1024 bytes of them, and fewer where the
            shared memory of a block has no room for the rows of a window.
        exact: multiply float32 to about 2^-21, instead of rounding factors to tf32.
        least: entries of a column in a window for which they go to Tensor Cores.
    """
    csr = in_32_bits(csr)
    plan, library = plan_of(csr, window, least), cuda_library()
    order, others = (_edges(entry, csr.eid) for entry in (plan.entry, plan.remainder_entry))
    to, gathered = aligned(target), aligned(source)
    slice = min(slice, most_features(window, source.dtype.itemsize, source.device))
    passes = gathered.size(1) > slice
    out = source.new_empty(csr.col.numel(), dtype=torch.float32 if passes else source.dtype)
    library.sddmm(
        plan.items, plan.tile_ptr, plan.tile_col, plan.slot, order, to, gathered, source.size(1),
        window, slice, exact, out,
    )  # fmt: skip
    if plan.remainder is not None:
        library.put(
            remainder.sddmm_remainder(plan.remainder, target, source).to(out.dtype), others, out
        )
    return out.to(source.dtype)


def most_features(window: int, itemsize: int, device: torch.device) -> int:
    """Return how many features of the rows of a window fit the shared memory of a block."""
    if device.type != "cuda":
        return MOST_SLICE // itemsize
    room = (gpu_of(device.index).shared_bytes - RING_BYTES) // window
    return min(room // CHUNK * CHUNK, MOST_SLICE) // itemsize


def _edges(entry: Tensor | None, eid: Tensor | None) -> Tensor | None:
    """The edges of entries."""
    if entry is None or eid is None:
        return entry
    edges: Tensor = cuda_library().take(eid, entry, None)
    return edges
