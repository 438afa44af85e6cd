"""Attention on the CPU: one pass over the rows, and one over the transposed graph for gradients."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.cpu.stages import Stages, compile_stages, stages_reasons
from pyg_accel.backends.dtypes import widened
from pyg_accel.backends.spec import OpSpec, shapes_of
from pyg_accel.formula import Formula, operands_of, parse, shape_of
from pyg_accel.graph import CSR
from pyg_accel.runtime.native import cpu_library, direct

__all__ = ["bind", "bind_several", "reasons", "run_backward", "run_several"]


def reasons(spec: OpSpec) -> list[str]:
    """Return why a call cannot be run in one pass over the rows."""
    if spec.op == "attention":
        return stages_reasons((parse(spec.formula),), ("sum",), spec.shapes, parse(spec.score))
    texts = spec.formulas or (spec.formula,) * len(spec.reduces)
    formulas = tuple(map(parse, texts))
    indices = [o.index for formula in formulas for o in operands_of(formula)]
    shapes = spec.shapes or ((spec.heads, spec.width),) * (1 + max(indices))
    grad = ((spec.heads, spec.width),) * (spec.op == "attention_backward")
    return stages_reasons(formulas, tuple(spec.reduces), (*shapes, *grad))


def bind_several(
    formulas: Sequence[Formula],
    reduces: Sequence[str],
    operands: list[Tensor],
    *,
    want_arg: bool = False,
    arg_is_col: bool = False,
) -> Callable[[CSR], Launch]:
    """Return a launcher of several formulas, in one pass over each row, for operands like these.

    The results are those of all formulas, then, if ``want_arg``, the winners of each maximum and
    minimum.
    """
    shapes = shapes_of(operands)
    if not any(0 in shape for shape in shapes):
        stages = compile_stages(tuple(formulas), tuple(reduces), shapes)
        return _launcher(stages, want_arg=want_arg, arg_is_col=arg_is_col)
    heads = 0 if any(h == 0 for h, _ in shapes) else max(h for h, _ in shapes)
    widths = [shape_of(f, dict(enumerate(shapes)))[1] for f in formulas]

    def empty(csr: CSR, operands: list[Tensor]) -> list[Tensor]:
        like = next(t for t in operands if t.is_floating_point())
        rows = [csr.col.numel() if r == "none" else csr.num_rows for r in reduces]
        extremes = [i for i, r in enumerate(reduces) if want_arg and r in ("max", "min")]
        return [
            *(like.new_zeros(n, heads, width) for n, width in zip(rows, widths, strict=True)),
            *(csr.rowptr.new_zeros(csr.num_rows, heads, widths[i]) for i in extremes),
        ]

    return lambda csr: Launch(empty, (csr,), listed=True)


def run_several(
    csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
) -> list[Tensor]:
    """Run several formulas in one pass over each row."""
    return bind_several(formulas, reduces, operands)(csr)(operands)


def bind(
    csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
) -> Callable[[CSR], Launch]:
    """Return a launcher of calls like this one."""
    shapes = shapes_of(operands)
    heads, width = max(h for h, _ in shapes), shape_of(value, dict(enumerate(shapes)))[1]
    if heads * width == 0 or any(0 in shape for shape in shapes):
        heads = 0 if (0, 1) in shapes else heads
        return lambda csr: Launch(lambda t: _nothing(csr, t[0], heads, width), listed=True)
    return _launcher(compile_stages((value,), ("sum",), shapes, score))


def _nothing(csr: CSR, like: Tensor, heads: int, width: int) -> list[Tensor]:
    out, *numbers = (like.new_zeros(csr.num_rows, heads, *more) for more in ((width,), (), ()))
    return [out, *map(widened, numbers)]


def run_backward(csr: CSR, call: AttentionGradient) -> list[Tensor]:
    """Compute weights again, and sum gradients, in one pass over each row."""
    grad, operands = call.grad, [*call.operands, call.grad]
    sums, stores = call.sums, call.stores
    shapes, heads = shapes_of(operands), grad.size(1)
    if 0 in grad.shape[1:]:
        sizes = dict(enumerate((*shapes, *[(heads, 1)] * 3)))
        outs = [grad.new_zeros(csr.num_rows, heads, shape_of(f, sizes)[1]) for f in sums]
        return outs + [grad.new_zeros(csr.col.numel(), heads, 1) for _ in stores]
    numbers = call.largest[:, :, 0], call.inverse[:, :, 0], cpu_library().row_dots(grad, call.out)
    reduces = ("sum",) * len(sums) + ("none",) * len(stores)
    return _launcher(compile_stages((*sums, *stores), reduces, shapes), numbers)(csr)(operands)


def _launcher(
    stages: Stages,
    numbers: Sequence[Tensor] = (),
    *,
    want_arg: bool = False,
    arg_is_col: bool = False,
) -> Callable[[CSR], Launch]:
    """Return what launches stages, with further numbers of sources, on a graph."""
    launch = direct(cpu_library().stages)
    how: tuple[Any, ...] = (
        list(stages.sides), [*numbers], list(stages.code), stages.heads, stages.scores,
        want_arg, arg_is_col,
    )  # fmt: skip
    return lambda csr: Launch(launch, (*csr[:4], *how), listed=True)
