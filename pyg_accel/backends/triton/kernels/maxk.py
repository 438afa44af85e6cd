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


@triton.jit  # type: ignore[untyped-decorator]
def float_of(
    key: tl.tensor, dtype: tl.constexpr, BITS: tl.constexpr, MOST: tl.constexpr
) -> tl.tensor:
    """The float of a key, wide enough to compute with."""
    x = tl.where(key < 0, key ^ MOST, key).to(BITS).to(dtype, bitcast=True)
    return x if dtype == tl.float64 else x.to(tl.float32)


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
    GUESSES: tl.constexpr,
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
    low_count = width.to(tl.float32)
    high_count = 1.0
    guesses = GUESSES
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        if guesses > 0:  # where it would be if the numbers between were spread evenly
            below = float_of(low, x_ptr.dtype.element_ty, BITS, MOST)
            above = float_of(high, x_ptr.dtype.element_ty, BITS, MOST)
            share = (low_count - k) / tl.maximum(low_count - high_count, 1.0)
            guess = below + (above - below) * tl.minimum(tl.maximum(share, 0.1), 0.9)
            bits = guess.to(x_ptr.dtype.element_ty).to(BITS, bitcast=True)
            near = order_of(bits.to(KEY), MOST, INFINITY)
            middle = tl.where((near > low) & (near <= high), near, middle)
            guesses -= 1
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        if count >= k:
            low = middle
            low_count = count.to(tl.float32)
        else:
            high = middle - 1
            high_count = count.to(tl.float32)
        if count == k:
            high = low
    above = (key > low).to(tl.int32)
    equal = (key == low).to(tl.int32)
    need = k - tl.sum(above, axis=0)  # number of equal ones, from the lowest columns
    counts = above | (equal << 16)  # both in one scan; fewer than 2**16 precede any column
    before = tl.cumsum(counts, axis=0) - counts
    tied = (before >> 16) & 0xFFFF
    place = (before & 0xFFFF) + tl.minimum(tied, need)
    take = (above > 0) | ((equal > 0) & (tied < need))
    tl.store(values_ptr + row * k + place, x, mask=take)
    tl.store(indices_ptr + row * k + place, c.to(indices_ptr.dtype.element_ty), mask=take)
