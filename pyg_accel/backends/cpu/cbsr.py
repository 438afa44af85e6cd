"""Products with CBSR features on the CPU; 16-bit features are accumulated in fp32."""

from torch import Tensor

from pyg_accel.backends.base import weighted_sum
from pyg_accel.backends.cpu import gspmm
from pyg_accel.backends.dtypes import widened
from pyg_accel.graph import CSR
from pyg_accel.graph.cbsr import CBSR, scattered
from pyg_accel.runtime.native import cpu_library

__all__ = ["dot", "spmm", "sspmm"]


def _dense_pays(width: int, k: int) -> bool:
    """Whether reading whole dense rows is faster than reading k single elements of them."""
    return width >= 64 and 8 * k > width


def spmm(
    csr: CSR, values: Tensor, indices: Tensor, width: int, weight: Tensor | None, reduce: str
) -> Tensor:
    """Aggregate compressed rows; if many columns are stored, as dense rows."""
    if _dense_pays(width, values.size(1)):
        x = scattered(CBSR(values, indices, width))
        return weighted_sum(gspmm.run, csr, x, weight, reduce)
    out: Tensor = cpu_library().cbsr_spmm(
        *csr[:4], widened(values), indices, width, widened(weight), reduce == "mean"
    )
    return out.to(values.dtype)


def sspmm(csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None) -> Tensor:
    """Add rows of x to the stored columns of their neighbours, or gather dense rows."""
    if _dense_pays(x.size(1), indices.size(1)):
        return weighted_sum(gspmm.run, transposed, x, weight, "sum").gather(1, indices.long())
    out: Tensor = cpu_library().cbsr_sspmm(
        *csr[:5], transposed.rowptr, widened(x), indices, widened(weight)
    )
    return out.to(x.dtype)


def dot(csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Compute the dot product of the rows at both ends of every edge."""
    out: Tensor = cpu_library().cbsr_dot(*csr[:4], widened(values), indices, widened(x))
    return out.to(x.dtype)
