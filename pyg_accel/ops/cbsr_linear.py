"""Linear maps of CBSR features: each row has k numbers to multiply, in place of F.

With V a CBSR matrix [N, F] with columns c, and M and Y dense:

- ``cbsr_mm``: V M, dense [N, H];
- ``cbsr_sddmm``: Y M^T at the columns c alone, [N, k];
- ``cbsr_mm_t``: V^T Y, dense [F, H].

They are one another's gradients, so that any of them can be differentiated any number of times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.dispatch import is_fast
from pyg_accel.cbsr import CBSR, check_cbsr, check_columns
from pyg_accel.checks import shown, whole
from pyg_accel.ops.operator import call, define

__all__ = ["cbsr_linear", "multiplies_compressed"]


def cbsr_linear(cbsr: CBSR, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map: ``torch.nn.functional.linear(cbsr.dense(), weight, bias)``.

    What the zeros of MaxK save beyond the aggregation, the subject of the MaxK-GNN paper.
    Differentiable for the stored values, the weight and the bias.

    Args:
        cbsr: features [N, F].
        weight: [H, F] of the dtype of the features; under autocast of any.
        bias: [H] of that dtype.

    Returns:
        [N, H]. Features are multiplied as they are stored where :func:`multiplies_compressed` says
        so; elsewhere they are written out and multiplied with their zeros.

    Raises:
        ValueError: for shapes or dtypes that do not fit.
    """
    check_cbsr(cbsr)
    values, indices, width = cbsr
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.size(1) != width:
        raise ValueError(f"expected 'weight' to be [H, {width}] (got {shown(weight)})")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        raise ValueError(f"expected 'bias' to be [{weight.size(0)}] (got {shown(bias)})")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.device != values.device:
            raise ValueError(f"expected '{name}' on {values.device} (got {t.device})")
    dtypes = {t.dtype for t in (values, weight, bias) if t is not None}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(values.device.type):
        raise ValueError(f"expected one dtype (got {', '.join(sorted(map(str, dtypes)))})")
    if not multiplies_compressed(cbsr, weight.size(0)):
        return linear(cbsr.dense(), weight, bias)
    dense = weight.t().contiguous()
    out: Tensor = call("cbsr_mm", values.contiguous(), indices.contiguous(), width, dense)
    return out if bias is None else out + bias


def multiplies_compressed(cbsr: CBSR, columns: int) -> bool:
    """Return whether a backend maps CBSR features to ``columns`` without writing them out.

    Not in compiled code and not under autocast, where the dense product is compiled or narrowed.
    """
    if not isinstance(cbsr, CBSR):
        raise ValueError(f"expected 'cbsr' to be a CBSR matrix (got {type(cbsr).__name__})")
    whole("columns", columns, 0)
    values = cbsr.values
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(values.device.type):
        return False
    return is_fast(_spec("cbsr_mm", values, cbsr.width, cbsr.k, columns))


def _spec(op: str, like: Tensor, width: int, k: int, columns: int) -> OpSpec:
    return OpSpec.by_rows(op, like, columns, num_cols=width, k=k)


def _mm(values: Tensor, indices: Tensor, width: int, dense: Tensor) -> Any:
    check_columns(indices, width)
    spec = _spec("cbsr_mm", values, width, values.size(1), dense.size(1))
    return choose(spec).kernel.run(values, indices, width, dense)


def _sddmm(x: Tensor, indices: Tensor, dense: Tensor) -> Any:
    spec = _spec("cbsr_sddmm", x, dense.size(0), indices.size(1), x.size(1))
    return choose(spec).kernel.run(x, indices, dense)


def _mm_t(values: Tensor, indices: Tensor, width: int, x: Tensor) -> Any:
    spec = _spec("cbsr_mm_t", values, width, values.size(1), x.size(1))
    return choose(spec).kernel.run(values, indices, width, x)


define(
    "cbsr_mm(Tensor values, Tensor indices, SymInt width, Tensor dense) -> Tensor",
    _mm,
    lambda values, indices, width, dense: values.new_empty(values.size(0), dense.size(1)),
    gradients={
        "values": lambda grad, indices, dense: call(
            "cbsr_sddmm", grad.contiguous(), indices, dense
        ),
        "dense": lambda grad, values, indices, width: call(
            "cbsr_mm_t", values, indices, width, grad.contiguous()
        ),
    },
)
define(
    "cbsr_sddmm(Tensor x, Tensor indices, Tensor dense) -> Tensor",
    _sddmm,
    lambda x, indices, dense: x.new_empty(indices.shape),
    gradients={
        "x": lambda grad, indices, dense: call(
            "cbsr_mm", grad.contiguous(), indices, dense.size(0), dense
        ),
        "dense": lambda grad, x, indices, dense_rows: call(
            "cbsr_mm_t", grad.contiguous(), indices, dense_rows, x
        ),
    },
)
define(
    "cbsr_mm_t(Tensor values, Tensor indices, SymInt width, Tensor x) -> Tensor",
    _mm_t,
    lambda values, indices, width, x: values.new_empty(width, x.size(1)),
    gradients={
        "values": lambda grad, indices, x: call("cbsr_sddmm", x, indices, grad.contiguous()),
        "x": lambda grad, values, indices, width: call(
            "cbsr_mm", values, indices, width, grad.contiguous()
        ),
    },
)
