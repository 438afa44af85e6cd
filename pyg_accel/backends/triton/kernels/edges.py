"""Converts the sums and maxima of edge kernels to results."""

import triton
import triton.language as tl

from pyg_accel.backends.triton.kernels.functions import from_ordered

__all__ = ["finish_kernel"]


@triton.jit(do_not_specialize=["rows", "columns"])  # type: ignore[untyped-decorator]
def finish_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """KIND "sum": other dtype; "max" and "min": ordered integers; "winner": numbers of edges."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < rows.to(tl.int64) * columns
    x = tl.load(x_ptr + at, mask=ok, other=0)
    if KIND == "sum":
        tl.store(out_ptr + at, x, mask=ok)
    elif KIND == "winner":
        edge = ((2**63 - 1) - x) & 0x7FFFFFFF
        tl.store(out_ptr + at, tl.where(x == 0, -1, edge).to(tl.int32), mask=ok)
    else:
        value = from_ordered(x, ACC)
        if KIND == "min":
            value = -value
        tl.store(out_ptr + at, tl.where(x == 0, 0.0, value), mask=ok)
