"""Precomputes values per target and head for the backward pass of attention."""

import triton
import triton.language as tl

__all__ = ["delta_kernel"]


@triton.jit(do_not_specialize=["rows", "heads", "width", "a_stride", "b_stride"])  # type: ignore[untyped-decorator]
def delta_kernel(
    a_ptr: tl.tensor,
    a_stride: tl.tensor,
    b_ptr: tl.tensor,
    b_stride: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """The dot products [rows * heads] of two tensors [rows, heads, width], head by head."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    live = r < rows * heads
    ok = live[:, None] & (c < width)[None, :]
    node, inside = r // heads, (r % heads)[:, None] * width + c[None, :]
    a = tl.load(a_ptr + node[:, None] * a_stride + inside, mask=ok, other=0.0).to(ACC)
    b = tl.load(b_ptr + node[:, None] * b_stride + inside, mask=ok, other=0.0).to(ACC)
    tl.store(out_ptr + r, tl.sum(a * b, axis=1), mask=live)
