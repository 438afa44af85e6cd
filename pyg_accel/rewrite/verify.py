"""Holds a rewritten model against the original, on the examples that it was made with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["differences", "evaluated"]

# Of the largest element: another order of additions moves results by far less, code that was
# misunderstood by far more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def evaluated(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a model computes in evaluation mode, and leave it as it was.

    That is its modes, random numbers, and what layers with ``cached=True`` keep of a first call.
    """
    modes = [(module, module.training) for module in model.modules()]
    layers = [m for module, _ in modes for m in (
        [vars(module)[name] for name in ("conv", "source") if name in vars(module)] or [module]
    )]  # fmt: skip
    cached = [(vars(layer), name, value) for layer in layers for name, value in vars(layer).items()
              if name.startswith("_cached")]  # fmt: skip
    devices = {t.device.index for t in model.parameters() if t.device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[d for d in devices if d is not None]):
            torch.manual_seed(0)
            return model(*args, **kwargs)
    finally:
        for own, name, value in cached:
            own[name] = value
        for module, mode in modes:
            module.training = mode
            if vars(module).get("conv") is not None:
                module.train(mode)


def differences(expected: Any, found: Any, name: str = "the result") -> str:
    """Return how two results differ, or nothing."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return f"{name} has another shape"
        if not expected.is_floating_point():
            return "" if torch.equal(expected, found) else f"{name} differs"
        if not expected.numel():
            return ""
        a, b = expected.double(), found.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return f"{name} is not finite elsewhere"
        error = float((a - b)[finite].abs().max()) if bool(finite.any()) else 0.0
        most = TOLERANCE.get(expected.dtype, 1e-2) * max(float(a[finite].abs().max()), 1e-30)
        return f"{name} differs by {error:.2g}" if error > most else ""
    if isinstance(expected, Mapping):
        keys = [k for k in expected if not isinstance(found, Mapping) or k not in found]
        return f"{name} lacks {keys}" if keys else _first(
            differences(expected[k], found[k], f"{name}[{k!r}]") for k in expected
        )  # fmt: skip
    if isinstance(expected, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(expected):
            return f"{name} has another length"
        return _first(
            differences(a, b, f"{name}[{i}]")
            for i, (a, b) in enumerate(zip(expected, found, strict=True))
        )
    return ""


def _first(texts: Any) -> str:
    return next((text for text in texts if text), "")
