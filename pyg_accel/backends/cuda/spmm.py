"""Launches the Tensor-Core SpMM."""

from torch import Tensor

from pyg_accel.backends.cuda import remainder
from pyg_accel.backends.cuda.plan import in_32_bits, plan_of
from pyg_accel.graph import CSR
from pyg_accel.graph.derived import find, keep
from pyg_accel.runtime.cache import changes_unseen
from pyg_accel.runtime.machine import is_captured
from pyg_accel.runtime.native import cuda_library

__all__ = ["aligned", "reordered", "run"]


def run(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None,
    *,
    window: int,
    warps: int,
    exact: bool,
    mean: bool,
    least: int = 1,
) -> Tensor:
    """Sum ``weight_ij * x[j]`` over the entries of each row.

    Args:
        csr: the graph.
        x: [num_cols, F].
        weight: [E] as ``csr.eid`` numbers entries, of the dtype of x, or None for 1.
        window: rows of a tile: 16, 32 or 64.
        warps: of a block, each with 128 bytes of a row.
        exact: multiply float32 to about 2^-21, instead of rounding factors to tf32.
        mean: divide by the number of entries.
        least: entries of a column in a window for which they go to Tensor Cores; the sums of the
            others are computed first, and theirs added to them.
    """
    csr = in_32_bits(csr)
    plan, library = plan_of(csr, window, least), cuda_library()
    value = eid = None
    if weight is not None:
        weight, eid = weight.contiguous(), csr.eid
        value = reordered(weight, plan.entry, eid)
    if plan.remainder is None or plan.remainder_entry is None:
        out = x.new_empty(csr.num_rows, x.size(1))
    else:
        others = None if weight is None else reordered(weight, plan.remainder_entry, eid)
        out = remainder.spmm_remainder(plan.remainder, x, others)
    library.spmm(
        plan.items, plan.splits, plan.tile_ptr, plan.tile_col, plan.slot, value, csr.rowptr,
        csr.col, eid, weight, aligned(x), x.size(1), window, warps, plan.num_partials, exact, mean,
        plan.remainder is not None, out,
    )  # fmt: skip
    return out


def reordered(weight: Tensor, order: Tensor, eid: Tensor | None) -> Tensor:
    """Return weights in another order of entries, stored for weights that are used again.

    The normalisation of a graph is the same in every step, and bringing it in order would cost a
    tenth of a sum. A learned weight is a new tensor every time, and not kept. A CUDA graph reads
    the weights anew in every replay, whatever they are by then.
    """
    if is_captured(weight) or changes_unseen(weight):
        return _taken(weight, order, eid)
    owners = (weight, order) if eid is None else (weight, order, eid)
    stored: Tensor | bool | None = find(owners, "reordered", lasting=True)
    if isinstance(stored, Tensor):
        return stored
    value = _taken(weight, order, eid)
    keep(owners, "reordered", value if stored else True, lasting=True)  # True: it was used once
    return value


def _taken(weight: Tensor, order: Tensor, eid: Tensor | None) -> Tensor:
    value: Tensor = cuda_library().take(weight, order, eid)
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
