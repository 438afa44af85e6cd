"""Launches dot-product attention over tiles, and its gradient."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.cuda.plan import in_32_bits, plan_of
from pyg_accel.backends.spec import OpSpec, Shapes, shapes_of
from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    Unary,
    dot_ends,
    parse,
    swap_sides,
)
from pyg_accel.graph import CSR
from pyg_accel.native import cuda_library

__all__ = [
    "WINDOW", "DotAttention", "dot_attention", "reasons", "run", "run_backward", "run_targets",
]  # fmt: skip

WINDOW = 64  # rows of a tile: kAttentionWindow in csrc/cuda/attention.h
_MOST = 128  # features of a head


@dataclass(frozen=True, slots=True)
class DotAttention:
    """Operands by index: ``softmax_j(scale * coefficient_i * sum(query_i * key_j)) * value_j``."""

    query: int
    key: int
    value: int
    coefficient: int | None = None
    scale: float = 1.0


@lru_cache(maxsize=1024)
def dot_attention(score: Formula, value: Formula, shapes: Shapes) -> DotAttention | None:
    """Return how attention is one of dot products, or None.

    Args:
        score: one number per edge and head.
        value: what is added up.
        shapes: (heads, width) of the operands.
    """
    if not isinstance(value, Operand) or value.side != "u":
        return None
    scale, coefficient, dot = _factors(score)
    if dot is None or len(coefficient) > 1:
        return None
    query, key = dot
    heads, width = shapes[query]
    same = {shapes[i] for i in (query, key, value.index)} == {(heads, width)}
    narrow = all(shapes[o.index][1] == 1 for o in coefficient)
    if not same or not narrow or width == 1:
        return None
    index = coefficient[0].index if coefficient else None
    return DotAttention(query, key, value.index, index, scale)


def _factors(
    score: Formula,
) -> tuple[float, tuple[Operand, ...], tuple[int, int] | None]:
    """A constant, operands of the target and the two of a dot product: a score is their product."""
    match score:
        case Const(value=number):
            return number, (), None
        case Operand(side="v"):
            return 1.0, (score,), None
        case Sum():
            if (ends := dot_ends(score)) is not None:
                return 1.0, (), ends
        case Unary(op="neg", arg=arg):
            scale, operands, dot = _factors(arg)
            return -scale, operands, dot
        case Binary(op="mul", left=left, right=right):
            (scale, some, x), (other, more, y) = _factors(left), _factors(right)
            if x is None or y is None:
                return scale * other, (*some, *more), x if y is None else y
        case Binary(op="div", left=left, right=Const(value=number)):
            scale, operands, dot = _factors(left)
            return scale / number, operands, dot
    return 1.0, (Operand("v", -1), Operand("v", -1)), None  # something else


def reasons(spec: OpSpec) -> list[str]:
    """Return why a call is not for the kernel."""
    found = []
    score, value = parse(spec.score), parse(spec.formula)
    if spec.op == "attention_backward":
        score, value = swap_sides(score), swap_sides(value)
        if "none" in spec.reduces:
            found.append("results per edge are not supported")
    if dot_attention(score, value, spec.shapes) is None:
        found.append("not attention by dot products of targets and sources")
    if spec.dtype.itemsize != 2:
        found.append(f"features are {spec.dtype}, not of 16 bits")
    if spec.width > _MOST:
        found.append(f"a head of {spec.width} features (at most {_MOST})")
    return found


def run(csr: CSR, score: Formula, value: Formula, operands: list[Tensor]) -> list[Tensor]:
    """Multiply queries and keys tile by tile, and weights and values."""
    how = _how(score, value, operands)
    query, key, value_rows = (_aligned(operands[i]) for i in (how.query, how.key, how.value))
    heads, width = operands[how.query].shape[1:]
    if csr.num_rows == 0 or csr.col.numel() == 0 or heads == 0:
        out = query.new_zeros(csr.num_rows, heads, width)
        return [out, out.new_zeros(csr.num_rows, heads, dtype=torch.float32)]
    csr = in_32_bits(csr)
    plan = plan_of(csr, WINDOW)
    results: list[Tensor] = cuda_library().attention(
        plan.items, plan.splits, plan.tile_col, plan.masks, csr.rowptr, csr.col, query, key,
        value_rows, _coefficient(how, operands), how.scale, width, plan.num_partials,
    )  # fmt: skip
    return results


def run_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Add up gradients of sources."""
    how = _how(swap_sides(call.score), swap_sides(call.value), call.operands)
    first, second = _gradients(csr, how, call, sources=True)
    both = first + second if how.key == how.value else second
    found = {how.key: first, how.value: both}
    return [found[index] for index in call.of]


def run_targets(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Add up gradients of targets."""
    how = _how(call.score, call.value, call.operands)
    first, second = _gradients(csr, how, call, sources=False)
    found = {how.query: first}
    if how.coefficient is not None:
        found[how.coefficient] = second.mul_(how.scale).unsqueeze(-1).to(first.dtype)
    return [found[index] for index in call.of]


def _how(score: Formula, value: Formula, operands: list[Tensor]) -> DotAttention:
    how = dot_attention(score, value, shapes_of(operands))
    assert how is not None  # `reasons` has asked
    return how


def _gradients(
    csr: CSR, how: DotAttention, call: AttentionGradient, *, sources: bool
) -> tuple[Tensor, Tensor]:
    """What a pass adds up: for keys and values, or for queries and their coefficients."""
    rows, (heads, width) = csr.num_rows, call.grad.shape[1:]
    if rows == 0 or csr.col.numel() == 0 or heads == 0:
        zeros = call.grad.new_zeros(rows, heads, width)
        return zeros, zeros if sources else call.grad.new_zeros(rows, heads)
    query, key, value = (_aligned(call.operands[i]) for i in (how.query, how.key, how.value))
    csr = in_32_bits(csr)
    plan = plan_of(csr, WINDOW)
    first, second = cuda_library().attention_backward(
        plan.items, plan.splits, plan.tile_col, plan.masks, csr.rowptr, csr.col, query, key,
        value, _coefficient(how, call.operands), _aligned(call.grad), call.out, call.total,
        how.scale, width, plan.num_partials, sources,
    )  # fmt: skip
    return first, second


def _coefficient(how: DotAttention, operands: list[Tensor]) -> Tensor | None:
    """The coefficients of targets [rows, 1 | H], in float32."""
    return None if how.coefficient is None else operands[how.coefficient].squeeze(-1).float()


def _aligned(t: Tensor) -> Tensor:
    """Return [N, H, F] with whole, aligned 16-byte vectors in a head: itself, or a copy."""
    short = -t.size(2) % 8
    whole = t.stride(0) % 8 == 0 and (t.size(1) == 1 or t.stride(1) % 8 == 0) and t.stride(2) == 1
    if not short and whole and t.data_ptr() % 16 == 0:
        return t if t.size(1) > 1 else t.as_strided(t.shape, (t.stride(0), 0, 1))
    return torch.nn.functional.pad(t, (0, short)).contiguous()
