"""The MaxK nonlinearity: the k largest features of every node, as CBSR."""

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.graph.cbsr import CBSR, index_dtype, scattered, trust
from pyg_accel.ops.operator import call, define
from pyg_accel.runtime.checks import whole

__all__ = ["check_k", "maxk"]


def maxk(x: Tensor, k: int) -> CBSR:
    """Keep the k largest features of each row (MaxK-GNN paper, section 3.1).

    Exact, in the order of ``torch.topk``: NaN is larger than everything, infinities are ordinary
    values, and -0.0 equals 0.0. Among equal features the lowest columns are selected. The gradient
    goes to the selected features.

    Args:
        x: [N, F] with F up to 65,536.
        k: at least 1; with ``k >= F`` all features are selected.

    Returns:
        min(k, F) features of each row and their columns, ascending.

    Raises:
        ValueError: for arguments that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise ValueError("expected 'x' to be a floating-point tensor [N, F]")
    if x.layout != torch.strided:
        raise ValueError(f"expected 'x' to be strided (got {x.layout})")
    check_k(k)
    width = x.size(1)
    dtype = index_dtype(width)
    if k >= width:
        columns = torch.arange(width, device=x.device).to(dtype)
        columns = columns.expand(x.size(0), -1).contiguous()
        return CBSR(x.contiguous(), trust(columns, width), width)
    values, indices = call("maxk", x.contiguous(), k)
    return CBSR(values, indices, width)


def check_k(k: object) -> int:
    """Return k.

    Raises:
        ValueError: unless it is a whole number of at least 1.
    """
    return whole("k", k)


def _maxk(x: Tensor, k: int) -> list[Tensor]:
    spec = OpSpec.by_rows("maxk", x, x.size(1), k=k)
    values, indices = choose(spec).kernel.run(x, k)
    return [values, trust(indices, x.size(1))]


def _fake(x: Tensor, k: int) -> list[Tensor]:
    dtype = index_dtype(int(x.size(1)))
    return [x.new_empty(x.size(0), k), x.new_empty(x.size(0), k, dtype=dtype)]


define(
    "maxk(Tensor x, int k) -> Tensor[]",
    _maxk,
    _fake,
    # The paper's gradient: the pattern of the forward pass.
    {"x": lambda grad, output, x_columns: scattered(CBSR(grad, output, x_columns))},
)
