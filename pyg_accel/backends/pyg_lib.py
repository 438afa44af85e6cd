"""Segments by pyg-lib, if it is installed: softmax, reductions of edge data, matrix products.

It has no kernels for messages that are gathered from nodes, only for rows that exist already.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import Backend, table
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Formula
from pyg_accel.graph import CSR

__all__ = ["PYG_LIB"]

_DTYPES = (torch.float32, torch.float64)
_REDUCES = (("sum",), ("mean",))
# The operators of pyg-lib itself: patch() may have put others into torch.ops.pyg.
_PYG: Any = torch._ops._OpNamespace("pyg")
_OPS = ("softmax_csr", "segment_sum_csr", "grouped_matmul", "segment_matmul")


@lru_cache(maxsize=1)
def _load() -> tuple[str, ...]:
    """Import pyg-lib once; return the reasons why it cannot be used."""
    if find_spec("pyg_lib") is None:
        return ("pyg-lib is not installed: see https://github.com/pyg-team/pyg-lib",)
    try:
        import pyg_lib  # noqa: F401
    except OSError as error:  # built for another torch
        return (f"pyg-lib does not load ({error})",)
    missing = [op for op in _OPS if not hasattr(_PYG, op)]
    if missing:
        return (f"this pyg-lib has no {', '.join(missing)}: version 0.6 and later do",)
    return ()


def _reasons(spec: OpSpec) -> list[str]:
    """Return the reasons against it: it only reduces edge data, and multiplies segments."""
    reasons = []
    if spec.device not in ("cpu", "cuda"):
        reasons.append(f"tensors are on '{spec.device}'")
    elif spec.device == "cuda" and int(_PYG.cuda_version()) < 0:
        reasons.append("pyg-lib was built without CUDA")
    if spec.op == "edge_softmax" and (spec.device, spec.dtype) != ("cpu", torch.float32):
        reasons.append("its softmax works on float32 on the CPU alone")
    if spec.dtype not in _DTYPES:
        reasons.append(f"features are {spec.dtype}")
    if spec.op == "gspmm" and (spec.formula != "e0" or spec.reduces not in _REDUCES):
        call = f"{'+'.join(spec.reduces)} of {spec.formula}"
        reasons.append(f"it reduces edge data to sums and means (got {call})")
    return reasons


def _gspmm(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    (edges,) = operands
    if edges.numel() == 0:  # its kernels would divide by zero
        return [edges.new_zeros(csr.num_rows, *edges.shape[1:])]
    rows = edges.reshape(edges.size(0), edges.shape[1:].numel())
    rows = rows if csr.eid is None else rows.index_select(0, csr.eid)
    reduce = getattr(_PYG, f"segment_{reduces[0]}_csr")
    out: Tensor = reduce(rows.contiguous(), csr.rowptr.long())
    return [out.view(csr.num_rows, *edges.shape[1:])]


def _edge_softmax(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    if scores.numel() == 0:  # as above
        return scores.clone()
    ptr = csr.rowptr.long()

    def in_rows(t: Tensor) -> Tensor:
        return t.contiguous() if csr.eid is None else t.index_select(0, csr.eid)

    result: Tensor
    if grad is None:
        result = _PYG.softmax_csr(in_rows(scores), ptr, 0)
    else:
        result = _PYG.softmax_csr_backward(in_rows(scores), in_rows(grad), ptr, 0)
    if csr.eid is None:
        return result
    return torch.empty_like(result).index_copy_(0, csr.eid.long(), result)


def _segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = _PYG.segment_matmul(x.contiguous(), ptr, weight.contiguous())
    return result


def _segment_outer(x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
    sizes = ptr.diff().tolist()
    left = [rows.t().contiguous() for rows in x.split(sizes)]
    right = [rows.contiguous() for rows in y.split(sizes)]
    return torch.stack(_PYG.grouped_matmul(left, right))


def _info() -> dict[str, Any]:
    import pyg_lib

    cuda = int(_PYG.cuda_version())
    return {"pyg-lib": pyg_lib.__version__, "cuda": cuda if cuda >= 0 else "no"}


_OPERATORS = (_gspmm, _edge_softmax, _segment_matmul, _segment_outer)
PYG_LIB = Backend(
    "pyg_lib",
    table({run.__name__[1:]: run for run in _OPERATORS}, reasons=_reasons),
    lambda: list(_load()),
    info=_info,
)
