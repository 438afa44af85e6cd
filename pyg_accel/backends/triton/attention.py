"""Launches attention, and several formulas in one pass."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.edges import Output
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.backends.triton.expression import stays_finite
from pyg_accel.backends.triton.kernels.attention import delta_kernel
from pyg_accel.backends.triton.launcher import type_of
from pyg_accel.backends.triton.padding import LONG_ROW, cut, fill, rows_to_pad
from pyg_accel.backends.triton.rows import RowPass
from pyg_accel.backends.triton.sequence import Kernel, Sequence
from pyg_accel.formula import Formula, has_sum, shape_of, without_narrow_sums
from pyg_accel.graph import CSR
from pyg_accel.graph.facts import facts_of
from pyg_accel.runtime.cache import Bounded

__all__ = ["bind", "bind_backward", "bind_several", "run_backward"]

# Measured on an H200. With 25 edges per copied row GATConv gains a third with rows of 160 bytes and
# loses 8% with 1312 bytes; GATv2Conv and TransformerConv, with two or three copies, lose up to 20%.
# With 250 edges all gain or lose nothing.
_SPARSE, _DENSE = 20, 200


def bind(
    csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return a function that launches similar calls: one pass with online softmax."""
    heads, width = _extent(score, value, shapes_of(operands))
    entries, a_row = csr.col.numel(), _entries_a_copy(score, operands)
    if wide := rows_to_pad([score, value], operands, entries, csr.num_rows, a_row):
        filled = bind(csr, score, value, fill(operands, wide))

        def padded(csr: CSR) -> Launch:
            go = filled(csr).bound()

            def attend(operands: list[Tensor]) -> list[Tensor]:
                out, *numbers = go(fill(operands, wide))
                return [cut(out, width), *numbers]

            return Launch(attend, listed=True)

        return padded
    dtype, count = operands[0].dtype, len(operands)
    go = _pass_over(csr, (Output(value, "v", (heads, width)),), operands, score=score)

    def on(csr: CSR) -> Launch:
        sequence, rows = Sequence(count, csr.rowptr.device), csr.num_rows
        out = sequence.result((rows, heads, width), dtype)
        numbers = [sequence.result((rows, heads), accumulate(dtype)) for _ in range(2)]
        if rows and heads * width:
            go.append_to(sequence, csr, sequence.operands, [out], numbers)
        return Launch(sequence, listed=True)

    return on


def bind_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return a function that runs several formulas in one pass."""
    bound = _bind_several(csr, formulas, reduces, operands, a_row=_DENSE)
    return lambda csr: Launch(bound(csr), listed=True)


def _bind_several(
    csr: CSR,
    formulas: SequenceOf[Formula],
    reduces: SequenceOf[str],
    operands: list[Tensor],
    infinite: int = -1,
    *,
    a_row: int,
) -> Callable[[CSR], Callable[[list[Tensor]], list[Tensor]]]:
    shapes = shapes_of(operands)
    heads, width = (max(each) for each in zip(*shapes, strict=True))
    if wide := rows_to_pad(formulas, operands, csr.col.numel(), csr.num_rows, a_row):
        filled = fill(operands, wide)
        bound = _bind_several(csr, formulas, reduces, filled, infinite, a_row=a_row)

        def padded(csr: CSR) -> Callable[[list[Tensor]], list[Tensor]]:
            go = bound(csr)
            return lambda operands: [
                cut(out, width) if out.size(2) > width else out for out in go(fill(operands, wide))
            ]

        return padded
    dtype, count = operands[0].dtype, len(operands)
    outputs = tuple(
        Output(formula, "v" if reduce == "sum" else "e", (heads, _extent_of(formula, shapes)[1]))
        for formula, reduce in zip(formulas, reduces, strict=True)
    )
    go = _pass_over(csr, outputs, operands, infinite=infinite)

    def on(csr: CSR) -> Callable[[list[Tensor]], list[Tensor]]:
        rows, entries, device = csr.num_rows, csr.col.numel(), csr.col.device
        sizes = [(rows if o.side == "v" else entries, *o.shape) for o in outputs]
        if not rows or not heads * width or not entries:
            return lambda operands: [torch.zeros(s, dtype=dtype, device=device) for s in sizes]
        sequence = Sequence(count, device)
        outs = [sequence.result(size, dtype) for size in sizes]
        go.append_to(sequence, csr, sequence.operands, outs)
        return sequence

    return on


def run_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Run a single call."""
    results: list[Tensor] = bind_backward(csr, call)(csr).bound()(call.tensors)
    return results


def bind_backward(csr: CSR, call: AttentionGradient) -> Callable[[CSR], Launch]:
    """Return a function that recomputes weights and sums gradients in one pass."""
    reduces = ["sum"] * len(call.sums) + ["none"] * len(call.stores)
    finite = stays_finite(call.score) and stays_finite(call.value)
    infinite = len(call.operands) + 1 if finite else -1
    bound = _bind_several(
        csr, [*call.sums, *call.stores], reduces,
        [*call.operands, call.grad, *[call.largest] * 3], infinite,
        a_row=_entries_a_copy(call.score, call.operands),
    )  # fmt: skip
    bound_delta = _delta(call)

    def on(csr: CSR) -> Launch:
        pass_over, delta_of = bound(csr), bound_delta(csr)

        def differentiate(tensors: list[Tensor]) -> list[Tensor]:
            *operands, out, largest, inverse, grad = tensors
            (delta,) = delta_of([grad, out])
            return pass_over([*operands, grad, largest, inverse, delta])

        return Launch(differentiate, listed=True)

    return on


def _entries_a_copy(score: Formula, operands: list[Tensor]) -> int:
    """Return the least edges per copied row for which padding gains more than the copies take."""
    row = max(t.size(1) * t.size(2) * t.element_size() for t in operands)
    return _DENSE if has_sum(score) or row > LONG_ROW else _SPARSE


def _delta(call: AttentionGradient) -> Callable[[CSR], Sequence]:
    """Return the launch of the dot products [N, H, 1] of the result and its gradient [N, H, F]."""
    heads, width = call.out.shape[1:]
    strides, dtype = (call.grad.stride(0), call.out.stride(0)), accumulate(call.out.dtype)
    block = 1 << max(width - 1, 0).bit_length()
    kernel = Kernel(delta_kernel, 4, ROWS=max(2048 // block, 1), COLUMNS=block, ACC=type_of(dtype))

    def on(csr: CSR) -> Sequence:
        sequence, nodes = Sequence(2, csr.col.device), csr.num_cols
        grad, out = sequence.operands
        delta = sequence.result((nodes, heads, 1), dtype)
        if nodes and heads:
            grid = (-(-nodes * heads // kernel.constants["ROWS"]),)
            arguments = (grad, strides[0], out, strides[1], delta, nodes, heads, width)
            sequence.launch(kernel, grid, arguments)
        return sequence

    return on


def _extent(score: Formula, value: Formula, shapes: Shapes) -> tuple[int, int]:
    a, b = _extent_of(score, shapes), _extent_of(value, shapes)
    return (b[0] if a[0] == 1 else a[0]), b[1]


@lru_cache(maxsize=4096)
def _extent_of(formula: Formula, shapes: Shapes) -> tuple[int, int]:
    return shape_of(formula, dict(enumerate(shapes)))


_passes: "Bounded[tuple[Any, ...], RowPass]" = Bounded(4096)


def _pass_over(
    csr: CSR,
    outputs: tuple[Output, ...],
    operands: list[Tensor],
    *,
    score: Formula | None = None,
    infinite: int = -1,
) -> RowPass:
    """Return the pass for graphs of a kind, and operands that differ only in rows."""
    kind = facts_of(csr).kind
    key = (
        outputs, score, infinite, kind, csr.eid is None,
        *[(t.dtype, t.stride(0), t.size(1), t.size(2)) for t in operands],
    )  # fmt: skip
    row_pass = _passes.get(key)
    if row_pass is None:
        sizes = dict(enumerate(shapes_of(operands)))
        plain = [replace(o, formula=without_narrow_sums(o.formula, sizes)) for o in outputs]
        score = None if score is None else without_narrow_sums(score, sizes)
        row_pass = _passes[key] = RowPass(
            csr, plain, operands, score=score, infinite=infinite, whole=True
        )
    return row_pass
