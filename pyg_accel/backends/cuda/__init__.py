"""The CUDA backend: sparse products on Tensor Cores (TC-GNN), and products with CBSR features.

Rows of a graph are taken in windows and the columns of a window are condensed into tiles
(:mod:`pyg_accel.graph.tiles`); a tile times the rows of features that its columns name is a dense
product. That pays where the rows of a window share neighbours, so that a fetched row is used
several times. How much they share is a fact of every call on a graph that is used often
(``OpSpec.sharing``), and :mod:`.choice` has what was measured about when it wins.

MaxK and its products (:mod:`pyg_accel.graph.cbsr`) need no Tensor Cores but shared memory that
threads scatter into, which Triton does not have.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import Backend, Kernel, placement_reasons, table
from pyg_accel.backends.cuda import cbsr, sddmm, spmm
from pyg_accel.backends.cuda.choice import Launch, choose_launch
from pyg_accel.backends.cuda.match import product_of
from pyg_accel.backends.cuda.remainder import can_share
from pyg_accel.backends.dtypes import DTYPES, Tolerance
from pyg_accel.backends.spec import OpSpec, shapes_of
from pyg_accel.costs import RATES
from pyg_accel.formula import Formula, parse
from pyg_accel.graph import CSR
from pyg_accel.graph.column_reuse import reuse_of
from pyg_accel.runtime.native import build_info, cuda_unavailable_reasons

__all__ = ["CUDA"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 64  # a warp looks up to 63 entries ahead


def _unavailable_reasons() -> list[str]:
    """It needs a GPU with tf32 Tensor Cores and the native library."""
    reasons = cuda_unavailable_reasons()
    if not reasons and torch.cuda.get_device_capability() < (8, 0):
        return [f"{torch.cuda.get_device_name()} has no tf32 Tensor Cores"]
    return reasons


def _reasons(spec: OpSpec) -> list[str]:
    reasons = placement_reasons(spec, "cuda", _DTYPES)
    if max(spec.num_rows, spec.num_cols, spec.num_edges) >= _MOST:
        reasons.append("indices are of 32 bits, and the graph is larger")
    return reasons


def _maxk_reasons(spec: OpSpec) -> list[str]:
    reasons = _reasons(spec)
    if spec.width > cbsr.MAXK_WIDTH:
        reasons.append(f"rows of {spec.width} features (at most {cbsr.MAXK_WIDTH})")
    return reasons


def _gspmm_reasons(spec: OpSpec) -> list[str]:
    """It runs sums and means of weighted source features, and dot products of both ends."""
    reasons = _reasons(spec)
    if product_of(parse(spec.formula), spec.shapes, spec.reduces) is None:
        reasons.append("neither a sum or mean with at most one weight per edge, nor a dot product")
    return reasons


def _gspmm_cost(spec: OpSpec) -> float:
    """Return Triton's cost times the measured ratio of both kernels; see :mod:`.choice`."""
    launch = choose_launch(
        spec.dtype, spec.heads * spec.width, spec.num_cols, spec.sharing,
        mean=spec.num_edges / max(spec.num_rows, 1), rounded=spec.rounded,
        dot=spec.reduces == ("none",),
    )  # fmt: skip
    # At least 1: an infinite ratio means never, also where there is nothing to gather.
    row = max(spec.heads * spec.width, 1) * spec.dtype.itemsize * launch.ratio
    return RATES["cuda", "cuda"].seconds(max(spec.num_edges, 1), row)


def _tolerance(dtype: torch.dtype) -> Tolerance:
    """Products of float32 are rounded to tf32 where torch allows it for its own products."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return (2e-3, 1e-6)
    return DTYPES[dtype].tolerance


def _info() -> dict[str, Any]:
    return {k: v for k, v in build_info().items() if k.startswith("cuda")}


def _gspmm(
    csr: CSR, formula: Formula, operands: list[Tensor], reduces: list[str], *, want_arg: bool
) -> list[Tensor]:
    product = product_of(formula, shapes_of(operands), tuple(reduces))
    assert product is not None  # `_gspmm_reasons` has asked
    if product.dot:
        return [_dot(csr, operands[product.target], operands[product.source])]
    weight = None if product.weight is None else operands[product.weight]
    return [_sum(csr, operands[product.source], weight, mean=reduces == ["mean"])]


def _sum(csr: CSR, x: Tensor, weight: Tensor | None, *, mean: bool) -> Tensor:
    """Sum (average) x [N, H, F] over the rows, weighted by [E, 1 | H, 1]: [num_rows, H, F]."""
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
    exact = torch.get_float32_matmul_precision() == "highest"
    launch = choose_launch(
        x.dtype, x.size(1), csr.num_cols, reuse_of(csr),
        mean=csr.col.numel() / max(csr.num_rows, 1), rounded=not exact, dot=dot,
        alone=not can_share(x.dtype),
    )  # fmt: skip
    return launch, exact


CUDA = Backend(
    "cuda",
    {
        "gspmm": Kernel(_gspmm, _gspmm_cost, _gspmm_reasons),
        "maxk": Kernel(cbsr.maxk, cbsr.cost, _maxk_reasons),
        **table({"cbsr_spmm": cbsr.spmm, "sspmm": cbsr.sspmm}, cbsr.cost, _reasons),
    },
    _unavailable_reasons,
    _tolerance,
    _info,
)
