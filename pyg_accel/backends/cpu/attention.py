"""Attention on the CPU: one pass over the rows, and one over the transposed graph for gradients."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.cpu.stages import Stages, compile_stages, stages_reasons
from pyg_accel.backends.spec import OpSpec, shapes_of
from pyg_accel.formula import Formula, parse, shape_of
from pyg_accel.graph import CSR
from pyg_accel.runtime.native import cpu_library, direct

__all__ = ["bind", "bind_several", "reasons", "run", "run_backward", "run_several"]


def reasons(spec: OpSpec) -> list[str]:
    """Return why a call cannot be run in one pass over the rows."""
    if spec.op == "attention":
        return stages_reasons((parse(spec.formula),), (), spec.shapes, parse(spec.score))
    if not set(spec.reduces) <= {"sum", "none"}:
        return ["a sum over the width inside of what is not summed up"]
    formulas = [parse(text) for text in spec.formulas or [spec.formula] * len(spec.reduces)]
    grad = ((spec.heads, spec.width),) * (spec.op == "attention_backward")
    return stages_reasons(*split(formulas, spec.reduces), (*spec.shapes, *grad))


def bind_several(
    formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return a launcher of :func:`run_several` for operands like these."""
    shapes, (sums, stores) = shapes_of(operands), split(formulas, reduces)
    if any(0 in shape for shape in shapes) or (sums and stores):
        return lambda csr: Launch(run_several, (csr, formulas, reduces), listed=True)
    return _launcher(compile_stages(sums, stores, shapes))


def run_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> list[Tensor]:
    """Run several formulas in one pass over each row."""
    sums, stores = split(formulas, reduces)
    shapes = shapes_of(operands)
    if any(0 in shape for shape in shapes):
        heads = 0 if any(h == 0 for h, _ in shapes) else max(h for h, _ in shapes)
        sizes, like = dict(enumerate(shapes)), operands[0]
        rows = {"sum": csr.num_rows, "none": csr.col.numel()}
        return [like.new_zeros(rows[r], heads, shape_of(f, sizes)[1])
                for f, r in zip(formulas, reduces, strict=True)]  # fmt: skip
    results = _launcher(compile_stages(sums, stores, shapes))(csr)(operands)
    by_reduce = {"sum": iter(results), "none": iter(results[len(sums) :])}
    return [next(by_reduce[reduce]) for reduce in reduces]


def split(
    formulas: Sequence[Formula], reduces: Sequence[str]
) -> tuple[tuple[Formula, ...], tuple[Formula, ...]]:
    """Return the formulas to sum over each row, and those to return for every edge."""
    pairs = list(zip(formulas, reduces, strict=True))
    return tuple(f for f, r in pairs if r == "sum"), tuple(f for f, r in pairs if r == "none")


def run(csr: CSR, score: Formula, value: Formula, operands: list[Tensor]) -> list[Tensor]:
    """Compute scores, their softmax and the weighted sum in one pass over each row."""
    results: list[Tensor] = bind(csr, score, value, operands)(csr).bound()(operands)
    return results


def bind(
    csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return a launcher of calls like this one."""
    shapes = shapes_of(operands)
    heads, width = max(h for h, _ in shapes), shape_of(value, dict(enumerate(shapes)))[1]
    if heads * width == 0 or any(0 in shape for shape in shapes):
        heads = 0 if (0, 1) in shapes else heads
        return lambda csr: Launch(lambda t: _nothing(csr, t[0], heads, width), listed=True)
    return _launcher(compile_stages((value,), (), shapes, score))


def _nothing(csr: CSR, like: Tensor, heads: int, width: int) -> list[Tensor]:
    out, total = like.new_zeros(csr.num_rows, heads, width), like.new_zeros(csr.num_rows, heads)
    return [out, total.float() if out.dtype.itemsize == 2 else total]


def run_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Compute weights again, and sum gradients, in one pass over each row."""
    grad, operands = call.grad, [*call.operands, call.grad]
    sums, stores = call.sums, call.stores
    shapes, heads = shapes_of(operands), grad.size(1)
    if 0 in grad.shape[1:]:
        sizes = dict(enumerate((*shapes, (heads, 1), (heads, 1))))
        outs = [grad.new_zeros(csr.num_rows, heads, shape_of(f, sizes)[1]) for f in sums]
        return outs + [grad.new_zeros(csr.col.numel(), heads, 1) for _ in stores]
    numbers = call.total[:, :, 0], cpu_library().row_dots(grad, call.out)
    return _launcher(compile_stages(sums, stores, shapes), numbers)(csr)(operands)


def _launcher(stages: Stages, numbers: Sequence[Tensor] = ()) -> Callable[[CSR], Launch]:
    """Return what launches stages, with further numbers of sources, on a graph."""
    launch = direct(cpu_library().stages)
    how: tuple[Any, ...] = (
        list(stages.sides), [*numbers], list(stages.code), stages.heads, stages.scores,
    )  # fmt: skip
    return lambda csr: Launch(launch, (*csr[:4], *how), listed=True)
