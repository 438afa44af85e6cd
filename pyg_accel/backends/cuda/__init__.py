"""The CUDA backend: sparse products on Tensor Cores, after TC-GNN, and those with CBSR features.

Rows of a graph are taken in windows and the columns of a window are condensed into tiles
(:mod:`pyg_accel.tiles`); a tile times the rows of features that its columns name is a dense
product. That pays where the rows of a window share neighbours, so that a fetched row is used
several times. How much they share is a fact of every call on a graph that is used often
(``OpSpec.sharing``), and :mod:`.choice` has what was measured about when it wins.

MaxK and its products (:mod:`.cbsr`) need no Tensor Cores but shared memory that threads scatter
into, which Triton does not have.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Backend, Tolerance
from pyg_accel.backends.cuda import attention, cbsr
from pyg_accel.backends.cuda.choice import Launch, attention_ratio, choose_launch, gradient_ratio
from pyg_accel.backends.cuda.match import product_of
from pyg_accel.backends.spec import OpSpec
from pyg_accel.column_reuse import reuse_of
from pyg_accel.formula import Formula, parse, swap_sides
from pyg_accel.graph import CSR
from pyg_accel.native import build_info, cuda_unavailable_reasons

__all__ = ["CudaBackend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 64  # a warp looks up to 63 entries ahead


# Seconds before a kernel starts, where Triton's takes 3e-5: plans and remainders are several calls.
_HOST = 1e-4


class CudaBackend(Backend):
    """Kernels in CUDA C++ for compute capability 8.0 and later."""

    name = "cuda"

    def unavailable_reasons(self) -> list[str]:
        """It needs a GPU with tf32 Tensor Cores and the native library."""
        reasons = cuda_unavailable_reasons()
        if not reasons and torch.cuda.get_device_capability() < (8, 0):
            return [f"{torch.cuda.get_device_name()} has no tf32 Tensor Cores"]
        return reasons

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """It runs sums and means of weighted source features, and dot products of both ends."""
        reasons = []
        if spec.device != "cuda":
            reasons.append(f"tensors are on '{spec.device}'")
        if spec.dtype not in _DTYPES:
            reasons.append(f"features are {spec.dtype}")
        if max(spec.num_rows, spec.num_cols, spec.num_edges) >= _MOST:
            reasons.append("indices are of 32 bits, and the graph is larger")
        if spec.op == "maxk" and spec.width > cbsr.MAXK_WIDTH:
            reasons.append(f"rows of {spec.width} features (at most {cbsr.MAXK_WIDTH})")
        if (
            spec.op == "gspmm"
            and product_of(parse(spec.formula), spec.shapes, spec.reduces) is None
        ):
            reasons.append("not a sum or mean of sources with at most a weight an edge, nor a dot")
        if spec.op.startswith("attention"):
            reasons += attention.reasons(spec)
        return reasons

    def cost(self, spec: OpSpec) -> float:
        """As the others reckon, times what was measured of their ratio; see :mod:`.choice`."""
        if spec.op in cbsr.OPS:
            return cbsr.cost(spec)
        # An infinite ratio means never, also where there is nothing to gather.
        bytes_gathered = max(spec.num_edges * spec.heads * spec.width, 1) * spec.dtype.itemsize
        if spec.op.startswith("attention"):
            ratio = attention_ratio if spec.op == "attention" else gradient_ratio
            return _HOST + 2.5e-13 * bytes_gathered * ratio(spec.width, spec.sharing)
        dot = spec.reduces == ("none",)
        launch = choose_launch(
            spec.dtype, spec.heads * spec.width, spec.num_cols, spec.sharing,
            mean=spec.num_edges / max(spec.num_rows, 1), rounded=spec.rounded, dot=dot,
        )  # fmt: skip
        return _HOST + 2.5e-13 * bytes_gathered * launch.ratio

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Where torch allows it, float32 products are rounded to tf32 as those of torch are."""
        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            return (2e-3, 1e-6)
        return super().tolerance(dtype)

    def info(self) -> dict[str, Any]:
        """Return the facts of the build."""
        return {k: v for k, v in build_info().items() if k.startswith("cuda")}

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
        shapes = tuple((t.size(1), t.size(2)) for t in operands)
        product = product_of(formula, shapes, tuple(reduces))
        assert product is not None  # `not_supported_reasons` has asked
        if product.dot:
            return [_dot(csr, operands[product.target], operands[product.source])]
        weight = None if product.weight is None else operands[product.weight]
        return [_sum(csr, operands[product.source], weight, mean=reduces == ["mean"])]

    def attention(
        self, csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.attention`."""
        shapes = tuple((t.size(1), t.size(2)) for t in operands)
        how = attention.dot_attention(score, value, shapes)
        assert how is not None  # `not_supported_reasons` has asked
        return attention.run(csr, how, operands)

    def attention_backward(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_backward`."""
        turned = call._replace(score=swap_sides(call.score), value=swap_sides(call.value))
        return self._attention_gradient(csr, turned, sources=True)

    def attention_targets(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_targets`."""
        return self._attention_gradient(csr, call, sources=False)

    def _attention_gradient(
        self, csr: CSR, call: AttentionGradient, *, sources: bool
    ) -> list[Tensor]:
        shapes = tuple((t.size(1), t.size(2)) for t in call.operands)
        how = attention.dot_attention(call.score, call.value, shapes)
        assert how is not None  # `not_supported_reasons` has asked
        return attention.run_backward(csr, how, call, sources=sources)

    def maxk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Backend.maxk`."""
        return cbsr.maxk(x, k)

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
        return cbsr.spmm(csr, values, indices, width, weight, reduce)

    def sspmm(
        self, csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None
    ) -> Tensor:
        """See :meth:`Backend.sspmm`."""
        return cbsr.sspmm(csr, transposed, x, indices, weight)

    def cbsr_dot(self, csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_dot`."""
        return cbsr.dot(csr, values, indices, x)


def _sum(csr: CSR, x: Tensor, weight: Tensor | None, *, mean: bool) -> Tensor:
    """Sum (average) x [N, H, F] over the rows, weighted by [E, 1 | H, 1]: [num_rows, H, F]."""
    from pyg_accel.backends.cuda import spmm

    heads, width = x.size(1), x.size(2)
    if heads * width == 0 or csr.num_rows == 0 or csr.col.numel() == 0:
        return x.new_zeros(csr.num_rows, heads, width)

    def run(x: Tensor, weight: Tensor | None) -> Tensor:
        launch, exact = _launch(csr, x, dot=False)
        return spmm.run(csr, x, weight, window=launch.window, least=launch.least,
                        warps=launch.warps, exact=exact, mean=mean)  # fmt: skip

    if weight is None or weight.size(1) == 1:
        flat = x.reshape(x.size(0), heads * width)
        return run(flat, None if weight is None else weight.flatten()).view(-1, heads, width)
    return torch.stack([run(x[:, h], weight[:, h, 0]) for h in range(heads)], 1)


def _dot(csr: CSR, target: Tensor, source: Tensor) -> Tensor:
    """Dot products [E, H, 1] of target [num_rows, H, F] and source [num_cols, H, F]."""
    from pyg_accel.backends.cuda import sddmm

    heads, width, entries = source.size(1), source.size(2), csr.col.numel()
    if heads * width * entries == 0:
        return source.new_zeros(entries, heads, 1)
    launch, exact = _launch(csr, source[:, 0], dot=True)
    outs = [
        sddmm.run(csr, target[:, h], source[:, h], window=launch.window, least=launch.least,
                  slice=launch.slice, exact=exact)
        for h in range(heads)
    ]  # fmt: skip
    return torch.stack(outs, 1).unsqueeze(-1)


def _launch(csr: CSR, x: Tensor, *, dot: bool) -> tuple[Launch, bool]:
    """How to launch a product of features [N, F], and whether it must be exact."""
    from pyg_accel.backends.cuda.rest import can_share

    exact = torch.get_float32_matmul_precision() == "highest"
    launch = choose_launch(
        x.dtype, x.size(1), csr.num_cols, reuse_of(csr),
        mean=csr.col.numel() / max(csr.num_rows, 1), rounded=not exact, dot=dot,
        alone=not can_share(x.dtype),
    )  # fmt: skip
    return launch, exact
