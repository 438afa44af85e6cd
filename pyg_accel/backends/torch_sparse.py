"""SpMM by torch-sparse, if it is installed: weighted sums and means, forward and backward.

It is slower than the kernels of this package, so it is only used without them: without a compiler
and without Triton.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import Backend, Kernel
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Formula, parse, weighted_source
from pyg_accel.graph import CSR

__all__ = ["TORCH_SPARSE"]

_DTYPES = (torch.float32, torch.float64)
_REDUCES = (("sum",), ("mean",))
_INSTALL = "pip install --no-build-isolation torch-scatter torch-sparse"


@lru_cache(maxsize=1)
def _load() -> tuple[str, ...]:
    """Import torch-sparse once; return the reasons why it cannot be used."""
    if find_spec("torch_sparse") is None or find_spec("torch_scatter") is None:
        return (f"torch-sparse is not installed: {_INSTALL}",)
    try:
        import torch_sparse  # noqa: F401
    except OSError as error:  # built for another torch
        return (f"torch-sparse does not load ({error}): {_INSTALL}",)
    return ()


def _reasons(spec: OpSpec) -> list[str]:
    """Return the reasons against it: it sums source features with a weight per edge and head."""
    reasons = []
    if spec.device not in ("cpu", "cuda"):
        reasons.append(f"tensors are on '{spec.device}'")
    elif spec.device == "cuda" and not _built_for_cuda():
        reasons.append("torch-sparse was built without CUDA")
    if spec.dtype not in _DTYPES:
        reasons.append(f"features are {spec.dtype}, which it accumulates without more precision")
    source = weighted_source(parse(spec.formula))
    if source is None:
        reasons.append(f"the message is {spec.formula}, not u0 or mul(u0,e1)")
    elif source[1] is not None and spec.shapes:
        x, weight = spec.shapes[source[0]], spec.shapes[source[1]]
        if weight[1] != 1 or x != (spec.heads, spec.width):
            reasons.append("weights differ between features")
    if spec.reduces not in _REDUCES:
        reasons.append(f"the reduction is {'+'.join(spec.reduces)}, not a sum or a mean")
    return reasons


def _gspmm(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    source = weighted_source(formula)
    assert source is not None  # checked by `_reasons`
    like = operands[source[0]]
    shape = (csr.num_rows, *like.shape[1:])
    if csr.col.numel() == 0 or like.numel() == 0:  # its kernels would divide by zero
        return [like.new_zeros(shape)]
    rowptr, col = csr.rowptr.long(), csr.col.long()
    # Detached, as its operators have their own autograd functions.
    x, weight = (None if i is None else operands[i].detach() for i in source)
    assert x is not None
    if weight is not None and csr.eid is not None:
        weight = weight.index_select(0, csr.eid)
    heads = 1 if weight is None else weight.size(1)
    x = x.reshape(csr.num_cols, heads, x.shape[1:].numel() // heads)
    outs = [
        _spmm(rowptr, col, None if weight is None else weight[:, h, 0], x[:, h], reduces[0])
        for h in range(heads)
    ]
    return [torch.stack(outs, dim=1).view(shape)]


def _spmm(rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, reduce: str) -> Tensor:
    value = None if value is None else value.contiguous()
    x = x.contiguous()
    if reduce == "sum":
        total: Tensor = torch.ops.torch_sparse.spmm_sum(None, rowptr, col, value, None, None, x)
        return total
    degree = rowptr.diff()
    mean: Tensor = torch.ops.torch_sparse.spmm_mean(None, rowptr, col, value, degree, None, None, x)
    return mean


def _built_for_cuda() -> bool:
    return int(torch.ops.torch_sparse.cuda_version()) >= 0


def _info() -> dict[str, Any]:
    import torch_sparse

    return {"torch-sparse": torch_sparse.__version__, "cuda": "yes" if _built_for_cuda() else "no"}


TORCH_SPARSE = Backend(
    "torch_sparse", {"gspmm": Kernel(_gspmm, reasons=_reasons)}, lambda: list(_load()), info=_info
)
