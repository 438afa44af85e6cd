"""The CPU backend: the copy-reduce and binary-reduce of the DGL paper on x86, in C++.

Each thread computes rows of the result (pull model; paper, section 3.1). Rows are divided among
threads by entries, and long rows are split. Features are kept in registers, and blocks of columns
and of sources are sized by the last-level cache. Results are bit-equal for any number of threads.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import Backend, Kernel, Launch, by_launch, placement_reasons, table
from pyg_accel.backends.cpu import attention, cbsr, gspmm
from pyg_accel.backends.cpu.stages import is_product
from pyg_accel.backends.dtypes import DTYPES, widened
from pyg_accel.backends.sampling import RESCALES, STRATEGIES, Sampling
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Sum, has_sum, parse
from pyg_accel.graph import CSR
from pyg_accel.runtime.native import build_info, cpu_library, cpu_unavailable_reasons, direct

__all__ = ["CPU"]


def _of_cpu(spec: OpSpec) -> list[str]:
    return placement_reasons(spec, "cpu")


def _fused_reasons(spec: OpSpec) -> list[str]:
    """Reasons against one pass over the rows by csrc/cpu/stages.h."""
    return placement_reasons(spec, "cpu") + attention.reasons(spec)


def _gspmm_reasons(spec: OpSpec) -> list[str]:
    if has_sum(parse(spec.formula)) and any(0 in shape for shape in spec.shapes):
        return ["a sum over no columns"]
    return _fused_reasons(spec)


def _sampled_reasons(spec: OpSpec) -> list[str]:
    return placement_reasons(spec, "cpu", (*DTYPES, torch.int8))


def _are_products(spec: OpSpec) -> bool:
    """Whether all are products of two operands or dot products, whose own kernels are faster."""
    formulas = map(parse, spec.formulas)
    return all(is_product(f.arg if isinstance(f, Sum) else f) for f in formulas)


def _scatter_arg(grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
    out: Tensor = cpu_library().scatter_arg(num_cols, widened(grad), arg.contiguous())
    return out.to(grad.dtype)


def _bind_scatter_arg(grad: Tensor, num_cols: int) -> Launch:
    if grad.dtype.itemsize > 2:
        return Launch(direct(cpu_library().scatter_arg), (num_cols,), accepts_any_layout=True)
    return Launch(lambda grad, arg: _scatter_arg(grad, arg, num_cols), accepts_any_layout=True)


def _edge_softmax(csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
    grad = None if grad is None else grad.contiguous()
    out: Tensor = cpu_library().softmax(csr.rowptr, csr.eid, scores.contiguous(), grad)
    return out


def _maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = cpu_library().maxk(x, k)
    return values, indices


def _sampled_spmm(
    csr: CSR,
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    sampling: Sampling,
) -> Tensor:
    how = (STRATEGIES.index(sampling.strategy), RESCALES.index(sampling.rescale))
    scale = None if scale is None else scale.contiguous()
    out: Tensor = cpu_library().sampled(*csr[:4], x, scale, weight, sampling.width, *how)
    return out


def _info() -> dict[str, Any]:
    """Return the instruction sets, the cache size and the facts of the build."""
    facts = dict(item.split("=", 1) for item in cpu_library().info().split(";"))
    return {**facts, **{k: v for k, v in build_info().items() if not k.startswith("cuda")}}


CPU = Backend(
    "cpu",
    {
        "gspmm": Kernel(gspmm.run, None, _gspmm_reasons, bind=gspmm.bind),
        "gspmm_several": Kernel(
            attention.run_several, None, _fused_reasons, prefers_unfused=_are_products
        ),
        "attention": Kernel(by_launch(attention.bind), None, _fused_reasons, attention.bind),
        "attention_backward": Kernel(attention.run_backward, None, _fused_reasons),
        "scatter_arg": Kernel(_scatter_arg, None, _of_cpu, _bind_scatter_arg),
        "sampled_spmm": Kernel(_sampled_spmm, None, _sampled_reasons),
        **table(
            {
                "edge_softmax": _edge_softmax, "maxk": _maxk,
                "cbsr_spmm": cbsr.spmm, "sspmm": cbsr.sspmm, "cbsr_dot": cbsr.dot,
            },
            reasons=_of_cpu,
        ),
    },
    cpu_unavailable_reasons,
    info=_info,
)  # fmt: skip
