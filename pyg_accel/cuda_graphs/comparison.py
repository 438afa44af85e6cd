"""Whether a captured call gives what the eager one does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Still", "Tolerance", "cotangents", "difference", "tolerance"]

_DROPOUTS = (
    F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout,
)  # fmt: skip
_NORMAL = {torch.randn: torch.zeros, torch.randn_like: torch.zeros_like}


class Still(TorchFunctionMode):
    """No randomness: padded and unpadded calls would draw different numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


@dataclass(frozen=True)
class Tolerance:
    """How far results may be apart that differ in the order of additions.

    Attributes:
        elements: of each element, relative to the largest.
        floor: of results that are nothing but rounding, relative to these figures and the largest
            result, such as the gradient of a bias before a normalisation.
        norm: of all elements of a gradient, relative to its norm. A rounding error that changes the
            sign of one number before a ReLU is far more than rounding for a few elements of it.
    """

    elements: float
    norm: float
    floor: float


def tolerance(dtypes: Iterable[torch.dtype], precision: str) -> Tolerance:
    """Return how far results of calls with these types among their results may be apart."""
    least = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    if torch.finfo(least).bits < 32:
        return Tolerance(5e-2, 2e-1, 1e-1)
    if least == torch.float32:  # other precisions multiply matrices in 10 bits
        exact = precision == "highest"
        return Tolerance(5e-4, 2e-2, 1e-2) if exact else Tolerance(1e-2, 5e-2, 1e-1)
    return Tolerance(1e-9, 1e-7, 1e-2)


def difference(
    expected: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    name: str,
    allowed: Tolerance,
    *,
    by_norm: bool = False,
) -> str:
    """Return where two sequences of tensors differ by more than rounding; empty if nowhere."""
    if len(expected) != len(found):
        return f"{len(found)} {name}s instead of {len(expected)}"
    size = _norm if by_norm else _largest
    relative = allowed.norm if by_norm else allowed.elements
    scale = max((size(t) for t in expected if t is not None), default=0.0)
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"{name} {i} is missing"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{name} {i} is of shape {list(other.shape)} instead of {list(one.shape)}"
        elif not one.is_floating_point() and not one.is_complex():
            if not torch.equal(one, other):
                return f"{name} {i} differs"
        elif not torch.equal(one.isfinite(), other.isfinite()):
            return f"{name} {i} is not finite in the same places"
        else:
            off, bound = size(one - other), relative * (size(one) + allowed.floor * scale)
            if off > bound:
                return f"{name} {i} is off by {off:.2g}, more than {bound:.2g}"
    return ""


def _largest(value: Tensor) -> float:
    """Return the largest finite element."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(torch.where(value.isfinite(), value, 0).abs().max())


def _norm(value: Tensor) -> float:
    """Return the norm of the finite elements."""
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(torch.where(value.isfinite(), value, 0).double().norm())
