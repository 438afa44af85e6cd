"""Launches the Tensor-Core SDDMM."""

import torch
from torch import Tensor

from pyg_accel.backends.cuda.plan import plan_of
from pyg_accel.backends.cuda.spmm import aligned
from pyg_accel.graph import CSR
from pyg_accel.native import cuda_library

__all__ = ["run"]


def run(
    csr: CSR, target: Tensor, source: Tensor, *, window: int, slice: int, exact: bool
) -> Tensor:
    """Return the dot product of the features of both ends of every edge, [E] by ``csr.eid``.

    Args:
        csr: the graph.
        target: [num_rows, F].
        source: [num_cols, F].
        window: rows of a tile: 16, 32 or 64.
        slice: features of a pass over all edges; at most 1024 bytes of them.
        exact: products of float32 to about 2^-21, instead of rounding factors to tf32.
    """
    plan, library = plan_of(csr, window), cuda_library()
    order = plan.entry
    if csr.eid is not None:
        order = library.take(csr.eid.to(torch.int32), order, None)
    out: Tensor = library.sddmm(
        plan.items, plan.tile_ptr, plan.tile_col, plan.slot, order, aligned(target),
        aligned(source), source.size(1), window, slice, exact,
    )  # fmt: skip
    return out.to(source.dtype)
