"""Compares an optimised model with the original, on the example inputs of ``optimize()``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_accel.runtime.module_state import as_it_was, evaluating
from pyg_accel.runtime.report import uncounted

__all__ = ["differences", "evaluated"]

Outcome = tuple[list[Tensor], list[Tensor | None]]

# Relative to the largest element: far above rounding in another order, far below a wrong product.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}

# Relative to the largest gradient: smaller gradients may consist of rounding errors.
SMALL = 1e-3


def evaluated(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    learning: bool = False,
    gradients: bool = False,
) -> Outcome:
    """Call a model in evaluation mode, and restore its state.

    The state consists of modes, buffers and other attributes, caches of layers with
    ``cached=True``, random number generators, and the report.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        learning: enable gradients.
        gradients: compute gradients too.

    Returns:
        The tensors of the result; gradients of parameters and arguments, or None.
    """
    with as_it_was(model.modules()), uncounted(), evaluating(model):
        torch.manual_seed(0)
        with torch.set_grad_enabled(learning):
            outs = _tensors(model(*args, **kwargs))
        learned = [t for t in (*model.parameters(), *_tensors((args, kwargs)))
                   if gradients and t.requires_grad]  # fmt: skip
        return outs, _gradients([t for t in outs if t.requires_grad], learned)


def _gradients(outs: list[Tensor], learned: list[Tensor]) -> list[Tensor | None]:
    """Return gradients of a sum of all results with different weights."""
    if not outs or not learned:
        return []
    seeds = [torch.linspace(0.5, 1.5, t.numel(), device=t.device).to(t.dtype).view(t.shape)
             for t in outs]  # fmt: skip
    gradients = torch.autograd.grad(outs, learned, seeds, allow_unused=True)
    return [None if g is None else g.to_dense() if g.is_sparse else g for g in gradients]


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided]


def differences(expected: Outcome, actual: Outcome) -> str:
    """Return how two calls differ, or an empty string."""
    small = SMALL * max(map(_largest, expected[1]), default=0.0)
    for number, (what, least) in enumerate((("the result", 1e-30), ("a gradient", small))):
        if [t is None for t in actual[number]] != [t is None for t in expected[number]]:
            return f"{what} is missing in one of the two"
        for a, b in zip(expected[number], actual[number], strict=True):
            if a is None or b is None:
                continue
            allowed = TOLERANCE.get(a.dtype, 0) * max(_largest(a), least)
            try:
                torch.testing.assert_close(b, a, rtol=0, atol=allowed, equal_nan=True)
            except AssertionError as error:
                return f"{what}: {error}"
    return ""


def _largest(t: Tensor | None) -> float:
    finite = t[t.isfinite()] if t is not None else torch.empty(0)
    return float(finite.abs().max()) if finite.numel() else 0.0
