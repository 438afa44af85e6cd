"""Elementwise functions and reductions that generated kernels call.

Written with Triton's own operations alone, so that the interpreter runs them too.
"""

import triton
import triton.language as tl

__all__ = ["from_ordered", "log1p", "most_of", "multiply", "ordered", "power", "softplus", "tanh"]


@triton.jit  # type: ignore[untyped-decorator]
def log1p(x: tl.tensor) -> tl.tensor:
    """log(1 + x) for 0 <= x <= 1 to the last bits: the rounding of 1 + x is divided out."""
    near = 1.0 + x
    return tl.where(near == 1.0, x, tl.log(near) * (x / (near - 1.0)))


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)) without overflow."""
    above = tl.where(x > 0.0, x, tl.where(x == x, 0.0, x))
    return above + log1p(tl.exp(-tl.abs(x)))


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent; near 0, where the quotient cancels, the first terms of its series."""
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0.0, -far, far)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0))))
    if x.dtype == tl.float64:
        return tl.where(tl.abs(x) < 1e-2, near, far)
    return tl.where(tl.abs(x) < 0.125, near, far)


@triton.jit  # type: ignore[untyped-decorator]
def power(x: tl.tensor, exponent: tl.tensor, odd: tl.constexpr, whole: tl.constexpr) -> tl.tensor:
    """abs(x) ** exponent with the sign, or the NaN, that a negative x asks for."""
    size = tl.exp(exponent * tl.log(tl.abs(x)))
    if odd:
        return tl.where(x < 0.0, -size, size)
    if whole:
        return size
    return tl.where((x < 0.0) & (x != float("-inf")), float("nan"), size)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """For products as a reduction."""
    return a * b


@triton.jit  # type: ignore[untyped-decorator]
def most_of(values: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Maximum along an axis, which stays; one NaN makes it NaN."""
    spoiled = tl.sum((values != values).to(tl.int32), axis=axis, keep_dims=True) > 0
    clean = tl.where(values != values, float("-inf"), values)
    return tl.where(spoiled, float("nan"), tl.max(clean, axis=axis, keep_dims=True))


@triton.jit  # type: ignore[untyped-decorator]
def ordered(x: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Unsigned integers in the order of floats: equal zeros, NaN above all, and 0 below all."""
    x = tl.where(x == 0.0, 0.0, tl.where(x == x, x, float("nan")))
    if bits == tl.uint64:
        i = x.to(tl.int64, bitcast=True)
        i = tl.where(i < 0, ~i, i ^ (-(2**63)))
    else:
        i = x.to(tl.int32, bitcast=True)
        i = tl.where(i < 0, ~i, i ^ (-(2**31)))
    return i.to(bits, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def from_ordered(bits: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The floats of :func:`ordered` integers."""
    if dtype == tl.float64:
        i = bits.to(tl.int64, bitcast=True)
        i = tl.where(i < 0, i ^ (-(2**63)), ~i)
    else:
        i = bits.to(tl.int32, bitcast=True)
        i = tl.where(i < 0, i ^ (-(2**31)), ~i)
    return i.to(dtype, bitcast=True)
