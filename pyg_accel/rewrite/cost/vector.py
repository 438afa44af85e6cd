"""A primitive as the numbers that a learned model reads."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyg_accel.rewrite.cost.base import Primitive

__all__ = ["NAMES", "vectors"]

NAMES = (
    "rows", "inner", "cols", "heads", "width", "columns", "entries", "permuted",
    "degree_mean", "degree_deviation", "degree_median", "degree_90", "degree_99", "degree_max",
    "density", "near", "far", "row_gap", "col_gap",
    "work", "source_bytes", "result", "cols_of_64", "aligned",
)  # fmt: skip


def vectors(primitives: Sequence[Primitive]) -> NDArray[np.float32]:
    """Return [number of primitives, len(NAMES)]: sizes as logarithms, the rest as it is."""
    return np.array([_vector(primitive) for primitive in primitives], dtype=np.float32)


def _log(value: float) -> float:
    return math.log2(value + 1)


def _vector(p: Primitive) -> list[float]:
    g = p.graph
    width = p.cols // p.heads
    if g is None:
        sparse = [0.0] * 14
        work, source = p.rows * max(p.inner, 1) * p.cols, p.inner * p.cols
    else:
        sparse = [
            _log(g.num_cols), _log(g.num_entries), float(p.permuted),
            _log(g.degree_mean), g.degree_deviation, _log(g.degree_median), _log(g.degree_90),
            _log(g.degree_99), _log(g.degree_max), math.log2(max(g.density, 1e-12)),
            g.near, g.far, g.row_gap, g.col_gap,
        ]  # fmt: skip
        work, source = g.num_entries * p.cols, g.num_cols * p.cols
    return [
        _log(p.rows), _log(p.inner), _log(p.cols), float(p.heads), _log(width), *sparse,
        _log(work), _log(source), _log(p.rows * p.cols), p.cols / (-(-p.cols // 64) * 64),
        float(min(width & -width, 64)),
    ]  # fmt: skip
