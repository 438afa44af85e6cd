"""Features in 8 bits: a quarter of the bytes per edge."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_accel.runtime.checks import require, shown

__all__ = ["Quantized", "quantize"]


@dataclass(frozen=True, slots=True)
class Quantized:
    """Features ``values * scale``.

    Attributes:
        values: [N, F] or [N, H, F] of int8.
        scale: float32, [N, 1] or [1, F] (with ones for H).
    """

    values: Tensor
    scale: Tensor

    def check(self) -> None:
        """Raise ValueError for a scale that does not belong to the values."""
        values, scale = self.values, self.scale
        if (
            not isinstance(values, Tensor)
            or values.dtype != torch.int8
            or values.dim() not in (2, 3)
        ):
            got = f"{shown(values)} {values.dtype}" if isinstance(values, Tensor) else shown(values)
            raise ValueError(f"expected values [N, F] or [N, H, F] of int8 (got {got})")
        ones = (1,) * (values.dim() - 1)
        shapes = [(values.size(0), *ones), (1, *values.shape[1:])]
        if not isinstance(scale, Tensor) or tuple(scale.shape) not in shapes:
            either = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"expected 'scale' to be {either} (got {shown(scale)})")
        if scale.dtype != torch.float32 or scale.device != values.device:
            got = f"{scale.dtype}, {scale.device}"
            raise ValueError(f"expected 'scale' in float32 on {values.device} (got {got})")

    def dequantize(self) -> Tensor:
        """Return the features in float32."""
        return self.values.float() * self.scale


def quantize(x: Tensor, *, per: str = "column") -> Quantized:
    """Store features in 8 bits, for :func:`sampled_spmm`.

    Symmetric, with the largest magnitude of a column (row) as scale; the quantisation of the
    AES-SpMM paper, which follows ES-SpMM, without a zero point. Rounds to within 1/254 of that
    largest magnitude.

    Args:
        x: [N, F] or [N, H, F] of finite numbers.
        per: ``"column"``: one scale per feature, which costs a kernel nothing per edge;
            ``"row"``: one per node, for features whose size differs from node to node.

    Returns:
        The 8-bit values and their float32 scale.

    Raises:
        ValueError: for arguments that do not fit.
    """
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or not x.is_floating_point():
        raise ValueError("expected 'x' to be floating-point features [N, F] or [N, H, F]")
    if x.layout != torch.strided:
        raise ValueError(f"expected 'x' to be strided (got {x.layout})")
    if per not in ("column", "row"):
        raise ValueError(f"expected 'per' to be 'column' or 'row' (got '{per}')")
    wide = x.detach().float()
    dims = [0] if per == "column" else list(range(1, x.dim()))
    if wide.numel() == 0:
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        return Quantized(wide.to(torch.int8), wide.new_ones(shape))
    most = wide.abs().amax(dims, keepdim=True)
    require(most.isfinite().all(), "expected 'x' of finite numbers (got NaN or infinity)")
    scale = torch.where(most > 0, most / 127.0, 1.0)
    return Quantized((wide / scale).round().clamp(-127, 127).to(torch.int8), scale)
