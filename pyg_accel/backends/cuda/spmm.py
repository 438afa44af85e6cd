"""Launches the Tensor-Core SpMM."""

import torch
from torch import Tensor

from pyg_accel.backends.cuda.plan import plan_of
from pyg_accel.graph import CSR
from pyg_accel.kept import Kept
from pyg_accel.native import cuda_library

__all__ = ["aligned", "reordered", "run"]

_values = Kept()


def run(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None,
    *,
    window: int,
    warps: int,
    exact: bool,
    mean: bool,
) -> Tensor:
    """Sum ``weight_ij * x[j]`` over the entries of each row.

    Args:
        csr: the graph.
        x: [num_cols, F].
        weight: [E] as ``csr.eid`` numbers entries, of the dtype of x, or None for 1.
        window: rows of a tile: 16, 32 or 64.
        warps: of a block, each with 128 bytes of a row.
        exact: products of float32 to about 2^-21, instead of rounding factors to tf32.
        mean: divide by the number of entries.
    """
    plan, library = plan_of(csr, window), cuda_library()
    value = eid = None
    if weight is not None:
        weight = weight.contiguous()
        eid = None if csr.eid is None else csr.eid.to(torch.int32)  # itself, mostly
        value = reordered(weight, plan.entry, eid)
    out: Tensor = library.spmm(
        plan.items, plan.splits, plan.tile_ptr, plan.tile_col, plan.slot, value, plan.rowptr,
        plan.col, eid, weight, aligned(x), x.size(1), window, warps, plan.num_partials, exact, mean,
    )  # fmt: skip
    return out


def reordered(weight: Tensor, order: Tensor, eid: Tensor | None) -> Tensor:
    """Return weights in an order, such as that of tiles, remembered for those used again.

    The normalisation of a graph is the same in every step, and bringing it in order would cost a
    tenth of a sum. A learned weight is a new tensor every time, and not kept.
    """
    key = (id(order), id(eid))
    found = _values.find(weight, key)
    if isinstance(found, tuple) and found[1] is order and found[2] is eid:
        kept: Tensor = found[0]
        return kept
    value: Tensor = cuda_library().take(weight, order, eid)
    _values.put(weight, key, "once" if found is None else (value, order, eid))
    return value


def aligned(x: Tensor) -> Tensor:
    """Return features [N, F] as rows of whole, aligned 16-byte vectors: themselves, or a copy."""
    vector = 16 // x.element_size()
    padded = -(-x.size(1) // vector) * vector
    whole = padded == x.size(1) and x.stride(1) == 1 and x.stride(0) % vector == 0
    if whole and x.data_ptr() % 16 == 0:
        return x
    copy = x.new_zeros(x.size(0), padded)
    copy[:, : x.size(1)] = x
    return copy
