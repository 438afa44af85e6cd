"""Products over the entries that are in no tile: by Triton's kernels, on CUDA cores."""

from functools import lru_cache

import torch
from torch import Tensor

from pyg_accel.backends.base import weighted_sum
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import OpSpec
from pyg_accel.backends.triton import TRITON
from pyg_accel.formula import parse
from pyg_accel.graph import CSR
from pyg_accel.settings import settings

__all__ = ["can_share", "sddmm_remainder", "spmm_remainder"]

_GSPMM = TRITON.kernels["gspmm"]


def can_share(dtype: torch.dtype) -> bool:
    """Return whether Triton can have a part of the entries."""
    return _can_share(dtype, settings.disable)


@lru_cache(maxsize=64)
def _can_share(dtype: torch.dtype, disabled: str) -> bool:
    spec = OpSpec.of_any_size("gspmm", "cuda", dtype, 1, 1, formula="u0", reduces=("sum",))
    off = "triton" in (name.strip() for name in disabled.split(","))
    return not (off or TRITON.unavailable_reasons() or _GSPMM.reasons(spec))


def spmm_remainder(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    """Sum x [num_cols, F] over the rows, weighted by [E] in the order of entries: [num_rows, F]."""
    note_choice(TRITON.name)
    return weighted_sum(_GSPMM.run, csr, x, weight, "sum")


def sddmm_remainder(csr: CSR, target: Tensor, source: Tensor) -> Tensor:
    """Dots of target [num_rows, F] and source [num_cols, F], [E] in the order of entries."""
    note_choice(TRITON.name)
    operands = [target.unsqueeze(1), source.unsqueeze(1)]
    out: list[Tensor] = _GSPMM.run(
        csr, parse("sum(mul(v0,u1))"), operands, ["none"], want_arg=False
    )
    return out[0].flatten()
