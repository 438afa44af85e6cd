"""Whether a captured call gives what the eager one does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Still", "cotangents", "difference"]

# Relative to the largest element, because sums of many terms carry the rounding of large ones.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 5e-2  # with half precision somewhere
_DROPOUTS = (
    F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout,
)  # fmt: skip
_NORMAL = {torch.randn: torch.zeros, torch.randn_like: torch.zeros_like}


class Still(TorchFunctionMode):
    """No randomness: padded and unpadded calls would draw different numbers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NORMAL:
            zeros: Any = _NORMAL[func]
            return zeros(*args, **kwargs)
        if func is torch.rand_like:
            return torch.full_like(args[0], 0.5, **kwargs)
        if func is torch.rand:
            shape = args[0] if args and not isinstance(args[0], int) else args
            return torch.full(tuple(shape), 0.5, **kwargs)
        if func in (torch.bernoulli, Tensor.bernoulli) and len(args) == 1:
            return (args[0] > 0.5).to(args[0].dtype)
        return func(*args, **kwargs)


def cotangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients to begin with: the same for the same shapes, and of no structure."""
    numbers = torch.Generator().manual_seed(0)
    return [
        torch.randn(out.shape, generator=numbers, dtype=torch.float32, device="cpu").to(
            out.device, out.dtype
        )
        for out in outputs
    ]


def difference(
    expected: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    name: str,
    *,
    coarse: bool,
) -> str:
    """Return where two sequences of tensors differ by more than rounding; empty if nowhere.

    A gradient that is zero but for rounding, as that of a bias before a normalisation, is measured
    against the largest of all.
    """
    scale = max((_largest(t) for t in expected if t is not None), default=0.0)
    if len(expected) != len(found):
        return f"{len(found)} {name}s instead of {len(expected)}"
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"{name} {i} is missing"
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} {i} is of shape {list(other.shape)} instead of {list(one.shape)}"
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"{name} {i} differs"
            continue
        relative = _COARSE if coarse else _TOLERANCE.get(one.dtype, _COARSE)
        allowed = relative * (_largest(one) + 1e-2 * scale)
        if not torch.isclose(other, one, rtol=0, atol=allowed, equal_nan=True).all():
            return f"{name} {i} is off by {float((one - other).abs().max()):.2g}"
    return ""


def _largest(value: Tensor) -> float:
    if not value.is_floating_point() or value.numel() == 0:
        return 0.0
    finite = value.detach()[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
