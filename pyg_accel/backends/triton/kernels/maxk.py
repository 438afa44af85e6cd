"""The k largest of each row, by bisection on the bits of its floats.

A float's bits, as an integer with the negative ones turned round, are ordered like the float: an
exact search for the k-th largest needs counts of comparisons only. Nothing is sorted.
"""

import triton
import triton.language as tl

__all__ = ["maxk_kernel"]


@triton.jit  # type: ignore[untyped-decorator]
def order_of(bits: tl.tensor, MOST: tl.constexpr, INFINITY: tl.constexpr) -> tl.tensor:
    """Integers in the order of torch.topk: NaN largest and all alike, -0.0 equal to 0.0."""
    size = bits & MOST
    key = tl.where(bits < 0, bits ^ MOST, bits)
    key = tl.where(size > INFINITY, MOST, key)
    return tl.where(size == 0, 0, key)


@triton.jit(do_not_specialize=["k"])  # type: ignore[untyped-decorator]
def maxk_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    KEY: tl.constexpr,
    MOST: tl.constexpr,
    INFINITY: tl.constexpr,
) -> None:
    """A program has a row.

    The bits of a float are of dtype BITS, with all but the sign set they are MOST; keys are of
    dtype KEY, at least as wide.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    ok = c < width
    x = tl.load(x_ptr + row * width + c, mask=ok, other=0.0)
    key = order_of(x.to(BITS, bitcast=True).to(KEY), MOST, INFINITY)
    # Between the ends there is the largest threshold that at least k keys reach.
    low = tl.min(tl.where(ok, key, MOST), axis=0)
    key = tl.where(ok, key, -MOST - 1)  # below every number
    high = tl.max(key, axis=0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count == k, middle, tl.where(count > k, high, middle - 1))
    above = (key > low).to(tl.int32)
    equal = (key == low).to(tl.int32)
    need = k - tl.sum(above, axis=0)  # of the equal ones, those of the lowest columns
    counts = above | (equal << 16)  # both in one scan; fewer than 2**16 precede any column
    before = tl.cumsum(counts, axis=0) - counts
    tied = (before >> 16) & 0xFFFF
    place = (before & 0xFFFF) + tl.minimum(tied, need)
    take = (above > 0) | ((equal > 0) & (tied < need))
    tl.store(values_ptr + row * k + place, x, mask=take)
    tl.store(indices_ptr + row * k + place, c.to(indices_ptr.dtype.element_ty), mask=take)
