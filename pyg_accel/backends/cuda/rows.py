"""Reductions of CSR rows on CUDA cores, precompiled: weighted sums, means, maxima and minima.

The kernels divide rows and columns as those of Triton do, by the same table
(:mod:`pyg_accel.backends.triton.launch`), and a call is one call of C++, where Triton's launches
are Python. Calls that the table has no entry for run on Triton.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.base import (
    Backend,
    Kernel,
    Launch,
    placement_reasons,
    winners_are_columns,
)
from pyg_accel.backends.plans import MOST_HEADS, PLANNED, Matrix, spmm_launch
from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.spec import OpSpec, Shapes, shapes_of, widest
from pyg_accel.backends.triton.launch import choose_tile, degree_class
from pyg_accel.facts import rounded
from pyg_accel.formula import Binary, Formula, Operand, parse
from pyg_accel.graph import CSR
from pyg_accel.machine import INTERPRETED, gpu_of
from pyg_accel.native import cuda_library, cuda_unavailable_reasons

__all__ = ["CUDA_ROWS"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Weighted(NamedTuple):
    """Features by their index, their weights, and whether these are of sources."""

    source: int
    weight: int | None = None
    by_source: bool = False


def _weighted(formula: Formula, shapes: Shapes) -> _Weighted | None:
    """What the kernels need: ``u``, or ``u`` times one number per edge or source (and head)."""
    match formula:
        case Operand(side="u", index=index):
            return _Weighted(index)
        case Binary(op="mul", left=Operand() as a, right=Operand() as b):
            wide, narrow = (b, a) if shapes[a.index][1] == 1 and a.side != "u" else (a, b)
            if wide.side != "u" or shapes[wide.index] != widest(shapes):
                wide, narrow = narrow, wide
            fits = wide.side == "u" and shapes[wide.index] == widest(shapes)
            if fits and narrow.side in ("u", "e") and shapes[narrow.index][1] == 1:
                return _Weighted(wide.index, narrow.index, narrow.side == "u")
    return None


def _reasons(spec: OpSpec) -> list[str]:
    reasons = placement_reasons(spec, "cuda", _DTYPES)
    shapes = spec.shapes or ((spec.heads, spec.width),) * 2
    if len(spec.reduces) != 1 or spec.reduces[0] not in PLANNED:
        reasons.append("not one sum, mean, maximum or minimum")
    elif _weighted(parse(spec.formula), shapes) is None:
        reasons.append("not features of sources with at most a weight per edge and head")
    if spec.heads > MOST_HEADS:
        reasons.append(f"{spec.heads} heads")
    return reasons


def _cost(spec: OpSpec) -> float:
    """Bytes gathered, 1.5 times as long as Triton takes, and what a call costs the host.

    On an H100 a call costs 34 us where Triton's costs 85; ``python -m benchmarks.kernels.rows``.
    """
    return 1e-5 + 3.75e-13 * spec.num_edges * spec.heads * spec.width * spec.dtype.itemsize


def _unavailable_reasons() -> list[str]:
    """It needs a GPU that the native library was compiled for."""
    reasons = cuda_unavailable_reasons()
    if not reasons and torch.cuda.get_device_capability() < (8, 0):
        return [f"{torch.cuda.get_device_name()} is older than compute capability 8.0"]
    return reasons


def _run(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    """Run a call by itself."""
    return _bind(csr, formula, operands, reduces, want_arg=want_arg)(csr)(operands)


def _bind(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> Callable[[CSR], Launch]:
    """Return what launches calls like this one."""
    library, shapes = cuda_library(), shapes_of(operands)
    product = _weighted(formula, shapes)
    assert product is not None  # `_reasons` has asked
    heads, width = widest(shapes)
    rows, entries = rounded(csr.num_rows), rounded(csr.col.numel())
    gpu = gpu_of(csr.col.device.index) if csr.col.is_cuda else INTERPRETED
    size = operands[product.source].element_size()
    tile = choose_tile(gpu, rows, rounded(csr.num_cols), entries, heads * width, size, 1, 1,
                       1 + want_arg)  # fmt: skip
    few = degree_class(entries / max(rows, 1)) == "tiny"
    lanes = 0 if tile.rows == 1 else tile.lanes

    def launch(csr: CSR) -> Launch:
        schedule = schedule_of(csr, tile.split, tile.piece, ordered=tile.rows > 1)
        cut = schedule.pieces
        pieces = [] if cut is None else [cut.rows, cut.first, cut.begin, cut.end]
        how = (schedule.order, pieces, tile.split, tile.columns, lanes, few)
        key = (id(schedule), tile.columns, lanes, few)
        matrix = Matrix.of(library, csr, how, key, schedule)
        return spmm_launch(
            library, matrix, csr, reduces[0], shapes[product.weight or 0][0],
            weighted=product.weight is not None, winners=want_arg,
            columns=winners_are_columns(formula, reduces), swapped=product.source == 1,
            by_source=product.by_source,
        )  # fmt: skip

    return launch


CUDA_ROWS = Backend(
    "cuda_rows", {"gspmm": Kernel(_run, _cost, _reasons, bind=_bind)}, _unavailable_reasons
)
