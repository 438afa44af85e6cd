"""The Triton backend: GPU kernels generated from message formulas.

A formula becomes one kernel that gathers, computes and reduces (:mod:`.codegen`); rows are divided
among programs by their lengths and columns by the L2 cache (:mod:`.launch`, and
:mod:`pyg_accel.backends.schedule`). No float is added atomically but in gradients of CBSR features,
where that is allowed, so other results are the same in every run. Under Triton's interpreter the
same kernels run on CPU tensors, slowly: for tests, and only when asked for by name.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Backend, atomics_allowed, shares_rows
from pyg_accel.backends.sampling import Sampling
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Formula, has_sum, parse
from pyg_accel.graph import CSR

__all__ = ["TritonBackend"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_WIDE_ROW = 1024  # bytes


class TritonBackend(Backend):
    """Kernels for CUDA devices."""

    name = "triton"

    def unavailable_reasons(self) -> list[str]:
        """It needs Triton, and a GPU or Triton's interpreter."""
        if find_spec("triton") is None:
            return ["Triton is not installed: pip install triton (Linux)"]
        if not torch.cuda.is_available() and not _interpreted():
            return ["there is no CUDA device (TRITON_INTERPRET=1 interprets kernels on the CPU)"]
        return []

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """It runs every formula in floating point on a GPU."""
        reasons = []
        runs_on = "cpu" if _interpreted() else "cuda"
        if spec.device != runs_on:
            reasons.append(f"tensors are on '{spec.device}', kernels run on '{runs_on}'")
        if spec.dtype not in (_DTYPES + _EIGHT_BITS if spec.op == "sampled_spmm" else _DTYPES):
            reasons.append(f"features are {spec.dtype}")
        if spec.op.startswith("attention") or spec.op == "gspmm_several":
            from pyg_accel.backends.triton.attention import MAX_WIDTH

            if spec.width > MAX_WIDTH:
                reasons.append(f"a head of {spec.width} features (at most {MAX_WIDTH})")
        return reasons

    def cost(self, spec: OpSpec) -> float:
        """Bytes gathered at 4 TB/s, and what a launch costs; interpreted, slower than anything."""
        if spec.device == "cpu":
            return 1e6
        # Two rows an edge, of which one is often near.
        rows = 1.5 if spec.op == "attention_backward" else 1.0
        row = rows * spec.heads * spec.width * spec.dtype.itemsize
        return 3e-5 + 2.5e-13 * spec.num_edges * row

    def prefers_parts(self, spec: OpSpec) -> bool:
        """Attention is one kernel, but for dot products of rows too wide to be gathered twice.

        One pass reads no fewer bytes than its parts where scores and values read different rows,
        and slices of narrow columns, which the L2 keeps, are not for whole heads. See
        ``benchmarks/gpu_attention.py`` and docs/explanation/triton_kernels.md.
        """
        if spec.op != "attention" or shares_rows(spec) or not has_sum(parse(spec.score)):
            return False
        return spec.heads * spec.width * spec.dtype.itemsize >= _WIDE_ROW

    def info(self) -> dict[str, Any]:
        """Return the version of Triton and the devices."""
        import triton

        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return {
            "triton": triton.__version__,
            "runs on": "CPU tensors, interpreted" if _interpreted() else ", ".join(devices),
        }

    def gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm`."""
        from pyg_accel.backends.triton.gspmm import run

        return run(csr, formula, operands, reduces, want_arg=want_arg)

    def bind_gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> Callable[[CSR, list[Tensor]], list[Tensor]]:
        """See :meth:`Backend.bind_gspmm`."""
        from pyg_accel.backends.triton.gspmm import bind

        return bind(csr, formula, operands, reduces, want_arg=want_arg)

    def scatter_arg(self, grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
        """See :meth:`Backend.scatter_arg`; see :mod:`.scatter` for how it is deterministic."""
        from pyg_accel.backends.triton.scatter import run

        return run(grad, arg, num_cols)

    def edge_softmax(self, csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
        """See :meth:`Backend.edge_softmax`."""
        from pyg_accel.backends.triton.softmax import run

        return run(csr, scores, grad)

    def gspmm_several(
        self, csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm_several`."""
        from pyg_accel.backends.triton.attention import run_several

        return run_several(csr, formulas, reduces, operands)

    def attention(
        self, csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.attention`."""
        from pyg_accel.backends.triton.attention import run

        return run(csr, score, value, operands)

    def attention_backward(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_backward`."""
        from pyg_accel.backends.triton.attention import run_backward

        return run_backward(csr, call)

    def maxk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Backend.maxk`."""
        from pyg_accel.backends.triton.maxk import run

        return run(x, k)

    def cbsr_spmm(
        self,
        csr: CSR,
        values: Tensor,
        indices: Tensor,
        width: int,
        weight: Tensor | None,
        reduce: str,
    ) -> Tensor:
        """See :meth:`Backend.cbsr_spmm`."""
        from pyg_accel.backends.triton.cbsr import spmm

        return spmm(csr, values, indices, width, weight, reduce)

    def sspmm(
        self, csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None
    ) -> Tensor:
        """See :meth:`Backend.sspmm`."""
        from pyg_accel.backends.triton.cbsr import sspmm, sspmm_push

        if atomics_allowed():
            return sspmm_push(csr, x, indices, weight)
        return sspmm(transposed, x, indices, weight)

    def cbsr_dot(self, csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_dot`."""
        from pyg_accel.backends.triton.cbsr import dot

        return dot(csr, values, indices, x)

    def sampled_spmm(
        self,
        csr: CSR,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor | None,
        sampling: Sampling,
        seed: Tensor | None,
    ) -> Tensor:
        """See :meth:`Backend.sampled_spmm`."""
        from pyg_accel.backends.triton.sampled import run

        return run(csr, x, scale, weight, sampling, seed)


def _interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
