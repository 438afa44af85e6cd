"""A primitive on a machine, as the numbers that a learned model reads."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.roofline import Machine
from pyg_accel.rewrite.cost.workload import DENSE, SPARSE

__all__ = ["NAMES", "vectors"]

PRIMITIVES = (*DENSE, *SPARSE)
MACHINE = ("flops", "memory", "gather", "cache", "cache_bytes", "sparse_call", "overlaps")
NAMES = (
    *PRIMITIVES, *MACHINE,
    "rows", "inner", "cols", "heads", "width", "columns", "entries", "permuted", "shared",
    "degree_mean", "degree_deviation", "degree_median", "degree_90", "degree_99", "degree_max",
    "density", "near", "far", "row_gap", "col_gap",
    "work", "source_bytes", "result", "cols_of_64", "aligned", "aligned_rows",
    "aligned_inner", "tiles",
)  # fmt: skip


def vectors(primitives: Sequence[Primitive], machine: Machine) -> NDArray[np.float32]:
    """Return [number of primitives, len(NAMES)]: sizes as logarithms, the rest as it is."""
    here = [math.log2(float(getattr(machine, name)) + 1e-6) for name in MACHINE]
    rows = [[*(float(p.name == name) for name in PRIMITIVES), *here, *_vector(p)]
            for p in primitives]  # fmt: skip
    return np.array(rows, dtype=np.float32)


def _log(value: float) -> float:
    return math.log2(value + 1)


def _aligned(size: int) -> float:
    """The largest power of 2 that divides a size, up to 64."""
    return float(min(size & -size, 64))


def _vector(p: Primitive) -> list[float]:
    g = p.graph
    width = p.cols // p.heads
    inner = p.inner if g is None or p.name in ("cbsr_spmm", "sspmm", "sampled_spmm") else 0
    if g is None:
        sparse = [0.0] * 15
        work, source = p.rows * max(p.inner, 1) * p.cols, p.inner * p.cols
    else:
        sparse = [
            _log(g.num_cols), _log(g.num_entries), float(p.permuted), float(p.shared),
            _log(g.degree_mean), g.degree_deviation, _log(g.degree_median), _log(g.degree_90),
            _log(g.degree_99), _log(g.degree_max), math.log2(max(g.density, 1e-12)),
            g.near, g.far, g.row_gap, g.col_gap,
        ]  # fmt: skip
        work, source = g.num_entries * p.cols, g.num_cols * p.cols
    return [
        _log(p.rows), _log(inner), _log(p.cols), float(p.heads), _log(width), *sparse,
        _log(work), _log(source), _log(p.rows * p.cols), p.cols / (-(-p.cols // 64) * 64),
        _aligned(width), _aligned(p.rows), _aligned(inner),
        _log(-(-p.rows // 128) * -(-p.cols // 128)),
    ]  # fmt: skip
