"""Scatters the gradient of a maximum to its winners, as integers instead of floats.

Sums of integers do not depend on the order of their terms, so atomic additions are deterministic.
"""

import triton
import triton.language as tl

__all__ = ["column_max_kernel", "scatter_finish_kernel", "scatter_kernel"]


@triton.jit(do_not_specialize=["rows", "columns", "share"])  # type: ignore[untyped-decorator]
def column_max_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    share: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
) -> None:
    """The largest finite magnitude of each column among `share` rows."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.full([ROWS, COLUMNS], 0.0, ACC)
    first = tl.program_id(0).to(tl.int64) * share
    step = 0
    while step < share:
        r = first + step + tl.arange(0, ROWS)
        ok = (r < rows)[:, None] & (c < columns)[None, :]
        x = tl.load(x_ptr + r[:, None] * columns + c[None, :], mask=ok, other=0.0).to(ACC)
        most = tl.maximum(most, tl.where(x - x == 0.0, tl.abs(x), 0.0))
        step += ROWS
    out = out_ptr + tl.program_id(0).to(tl.int64) * columns + c
    tl.store(out, tl.max(most, axis=0), mask=c < columns)


@triton.jit(do_not_specialize=["rows", "columns"])  # type: ignore[untyped-decorator]
def scatter_kernel(
    grad_ptr: tl.tensor,
    arg_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    strange_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add round(grad * scale); note infinities (1 and 2 by sign) and NaN (4) apart."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = (r < rows)[:, None] & (c < columns)[None, :]
    place = r[:, None] * columns + c[None, :]
    arg = tl.load(arg_ptr + place, mask=ok, other=-1).to(tl.int64)
    grad = tl.load(grad_ptr + place, mask=ok, other=0.0).to(tl.float64)
    scale = tl.load(scale_ptr + c, mask=c < columns, other=0.0)[None, :]
    finite = grad - grad == 0.0
    ok = ok & (arg >= 0)
    target = arg * columns + c[None, :]
    whole = tl.floor(tl.where(finite, grad, 0.0) * scale + 0.5).to(tl.int64)
    tl.atomic_add(sum_ptr + target, whole, mask=ok & finite & (whole != 0), sem="relaxed")
    kind = tl.where(grad > 0.0, 1, tl.where(grad < 0.0, 2, 4))
    tl.atomic_or(strange_ptr + target, kind, mask=ok & (finite == 0), sem="relaxed")


@triton.jit(do_not_specialize=["count", "columns"])  # type: ignore[untyped-decorator]
def scatter_finish_kernel(
    sum_ptr: tl.tensor,
    strange_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    ELEMENTS: tl.constexpr,
) -> None:
    """From whole numbers back to floats."""
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    ok = i < count
    scale = tl.load(scale_ptr + i % columns, mask=ok, other=1.0)
    result = tl.load(sum_ptr + i, mask=ok, other=0).to(tl.float64) / scale
    strange = tl.load(strange_ptr + i, mask=ok, other=0)
    result = tl.where(strange == 1, float("inf"), result)
    result = tl.where(strange == 2, float("-inf"), result)
    result = tl.where(strange > 2, float("nan"), result)
    if out_ptr.dtype.element_ty != tl.float64:  # the interpreter cannot convert 64 to 16 bits
        result = result.to(tl.float32)
    tl.store(out_ptr + i, result, mask=ok)
