"""Products of segments of rows with a matrix each, and the gradient of the matrices.

A program has a tile of rows, and goes through the segments that it overlaps; a product needs no
table of tiles, however uneven the segments are.
"""

import triton
import triton.language as tl

__all__ = ["segment_matmul_kernel", "segment_outer_kernel"]


@triton.jit(do_not_specialize=["rows", "segments"])  # type: ignore[untyped-decorator]
def segment_matmul_kernel(
    x_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    segments: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    weight_segment: tl.tensor,
    weight_row: tl.tensor,
    weight_column: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> None:
    """Multiply a tile of rows of x [rows, depth] by the matrices [depth, width] of its segments."""
    precision: tl.constexpr = "tf32" if ROUNDED else "ieee"
    begin = tl.program_id(0).to(tl.int64) * ROWS
    end = tl.minimum(begin + ROWS, rows)
    row = begin + tl.arange(0, ROWS)
    m = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    low, high = segments * 0, segments  # the last segment that begins at or before the tile
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(bounds_ptr + middle) <= begin
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    first = tl.load(bounds_ptr + low)
    while (low < segments) & (first < end):
        last = tl.load(bounds_ptr + low + 1)
        ours = (row >= first) & (row < last)
        if last > first:
            matrix = weight_ptr + low.to(tl.int64) * weight_segment
            product = tl.zeros([ROWS, WIDTH], tl.float32)
            step = 0
            while step < depth:
                k = (step + tl.arange(0, DEPTH)).to(tl.int64)
                x = tl.load(x_ptr + row[:, None] * x_row + k[None, :] * x_column,
                            mask=ours[:, None] & (k < depth)[None, :], other=0.0)  # fmt: skip
                w = tl.load(matrix + k[:, None] * weight_row + m[None, :] * weight_column,
                            mask=(k < depth)[:, None] & (m < width)[None, :],
                            other=0.0)  # fmt: skip
                product = tl.dot(x, w, product, input_precision=precision)
                step += DEPTH
            out = tl.where(ours[:, None], product, out)
        low += 1
        first = last
    place = out_ptr + row[:, None] * width + m[None, :]
    tl.store(place, out, mask=(row < rows)[:, None] & (m < width)[None, :])


@triton.jit(do_not_specialize=["depth", "width"])  # type: ignore[untyped-decorator]
def segment_outer_kernel(
    x_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    y_row: tl.tensor,
    y_column: tl.tensor,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> None:
    """Compute a tile of ``x[segment].T @ y[segment]`` [depth, width], in the order of the rows."""
    precision: tl.constexpr = "tf32" if ROUNDED else "ieee"
    segment = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * DEPTH + tl.arange(0, DEPTH)
    m = tl.program_id(2).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row, last = tl.load(bounds_ptr + segment), tl.load(bounds_ptr + segment + 1)
    out = tl.zeros([DEPTH, WIDTH], tl.float32)
    while row < last:
        r = row + tl.arange(0, ROWS)
        x = tl.load(x_ptr + r[None, :] * x_row + k[:, None] * x_column,
                    mask=(r < last)[None, :] & (k < depth)[:, None], other=0.0)  # fmt: skip
        y = tl.load(y_ptr + r[:, None] * y_row + m[None, :] * y_column,
                    mask=(r < last)[:, None] & (m < width)[None, :], other=0.0)  # fmt: skip
        out = tl.dot(x, y, out, input_precision=precision)
        row += ROWS
    place = out_ptr + (segment * depth + k[:, None]) * width + m[None, :]
    tl.store(place, out, mask=(k < depth)[:, None] & (m < width)[None, :])
