"""The CBSR format: a matrix with the same number of stored entries in every row."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph.derived import find, keep
from pyg_accel.runtime.checks import require, shown, whole

__all__ = ["CBSR", "MAX_WIDTH", "check_cbsr", "check_columns", "index_dtype", "scattered", "trust"]

MAX_WIDTH = 65_536


def index_dtype(width: int) -> torch.dtype:
    """Return the dtype of column indices: uint8 up to 256 columns, uint16 up to 65,536.

    Raises:
        ValueError: for a wider matrix.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"CBSR holds at most {MAX_WIDTH} columns (got {width})")
    return torch.uint8 if width <= 256 else torch.uint16


class CBSR(NamedTuple):
    """Compressed balanced sparse rows (MaxK-GNN paper, section 3.2): k entries in each row.

    The columns of a row ascend and are distinct. The first operator on a CBSR checks this in one
    pass, and raises ValueError; results of ``ops.maxk`` need no check. Entries may be zero. torch
    has few operators for uint16: use ``indices.long()`` to compute with it.

    Attributes:
        values: [N, k], floating point.
        indices: [N, k], the columns: uint8 if ``width <= 256``, else uint16.
        width: F, the columns of the dense matrix.
    """

    values: Tensor
    indices: Tensor
    width: int

    @property
    def k(self) -> int:
        """Entries per row."""
        return self.values.size(1)

    def dense(self) -> Tensor:
        """Return the dense matrix [N, F]; differentiable.

        Raises:
            ValueError: if this is not a valid CBSR matrix.
        """
        check_cbsr(self)
        if not torch.compiler.is_compiling():  # compiled code checks indices of scatter() itself
            check_columns(self.indices, self.width)
        return scattered(self)


def check_cbsr(cbsr: object) -> None:
    """Raise ValueError for shapes and dtypes that do not fit a CBSR matrix."""
    if not isinstance(cbsr, CBSR):
        raise ValueError(f"expected 'cbsr' to be a CBSR matrix (got {type(cbsr).__name__})")
    values, indices, width = cbsr
    if not isinstance(values, Tensor) or not isinstance(indices, Tensor):
        raise ValueError(
            f"expected values and indices to be tensors (got {shown(values)} and {shown(indices)})"
        )
    if values.dim() != 2 or values.shape != indices.shape or not values.is_floating_point():
        raise ValueError(
            f"expected values [N, k] in floating point and indices of that shape (got "
            f"{list(values.shape)} {values.dtype} and {list(indices.shape)})"
        )
    if not isinstance(width, torch.SymInt):
        whole("width", width, 0)
    if not min(1, width) <= values.size(1) <= width:
        raise ValueError(f"expected between 1 and {width} entries per row (got {values.size(1)})")
    if indices.dtype != index_dtype(width):
        raise ValueError(f"expected indices in {index_dtype(width)} (got {indices.dtype})")
    if indices.device != values.device:
        raise ValueError(f"expected indices on {values.device} (got {indices.device})")


def check_columns(indices: Tensor, width: int) -> None:
    """Raise ValueError unless columns ascend within each row and are below ``width``.

    The result is stored with the tensor until it changes.
    """
    if find((indices,), ("valid", width), lasting=True):
        return
    # torch cannot compare uint16 on a GPU.
    columns = indices.int() if indices.dtype == torch.uint16 else indices
    ascends = (columns[:, 1:] > columns[:, :-1]).all()
    inside = (columns[:, -1:].int() < width).all()
    require(ascends & inside, f"expected the columns of a CBSR to ascend within [0, {width}) in "
            "each row, each at most once")  # fmt: skip
    trust(indices, width)


def trust(indices: Tensor, width: int) -> Tensor:
    """Note that columns are valid, and return them."""
    if type(indices) is Tensor and not torch.compiler.is_compiling():
        keep((indices,), ("valid", width), True, lasting=True)
    return indices


def scattered(cbsr: CBSR) -> Tensor:
    """Return the dense matrix of a valid CBSR."""
    values, indices, width = cbsr
    return values.new_zeros(values.size(0), width).scatter(1, indices.long(), values)
