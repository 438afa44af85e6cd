"""Elementwise functions and reductions that generated kernels call.

Written with Triton's own operations alone, so that the interpreter runs them too.
"""

from typing import Any

import triton
import triton.language as tl

__all__ = ["log1p", "most_of", "multiply", "power", "softplus", "tanh"]


@triton.jit  # type: ignore[untyped-decorator]
def log1p(x: Any) -> Any:
    """log(1 + x) for 0 <= x <= 1 to the last bits: the rounding of 1 + x is divided out."""
    near = 1.0 + x
    return tl.where(near == 1.0, x, tl.log(near) * (x / (near - 1.0)))


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: Any) -> Any:
    """log(1 + exp(x)) without overflow."""
    return tl.where(x > 0.0, x, 0.0 * x) + log1p(tl.exp(-tl.abs(x)))


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
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
def power(x: Any, exponent: Any, odd: tl.constexpr, whole: tl.constexpr) -> Any:
    """abs(x) ** exponent with the sign, or the NaN, that a negative x asks for."""
    size = tl.exp(exponent * tl.log(tl.abs(x)))
    if odd:
        return tl.where(x < 0.0, -size, size)
    if whole:
        return size
    return tl.where(x < 0.0, float("nan"), size)


@triton.jit  # type: ignore[untyped-decorator]
def multiply(a: Any, b: Any) -> Any:
    """For products as a reduction."""
    return a * b


@triton.jit  # type: ignore[untyped-decorator]
def most_of(values: Any, axis: tl.constexpr) -> Any:
    """Maximum along an axis, which stays; one NaN makes it NaN."""
    spoiled = tl.sum((values != values).to(tl.int32), axis=axis, keep_dims=True) > 0
    clean = tl.where(values != values, float("-inf"), values)
    return tl.where(spoiled, float("nan"), tl.max(clean, axis=axis, keep_dims=True))
