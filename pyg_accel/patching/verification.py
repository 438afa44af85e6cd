"""``PYG_ACCEL_VERIFY=1``: PyG's own path beside every accelerated call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from pyg_accel.errors import VerificationError
from pyg_accel.module_state import ModuleState, modules_in

__all__ = ["verify"]

# How much further from the truth than PyG a result may be: both are rounded, in different orders.
MARGIN = 8.0


def verify(
    original: Callable[..., Any],
    module: torch.nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    state: ModuleState,
) -> None:
    """Compare the result of an accelerated call with PyG's own.

    Args:
        original: PyG's function.
        module: the layer, or None if the function is no method.
        args: behind the layer, as they were given.
        kwargs: as they were given.
        out: the accelerated result, a tensor or a dictionary of them; others are not compared.
        state: before the call.

    Raises:
        VerificationError: where they differ by more than rounding explains.
    """
    out = _joined(out)
    if not isinstance(out, Tensor):
        return
    own = () if module is None else (module,)
    after = ModuleState(modules_in(module), state.device)
    try:
        with torch.no_grad():
            state.restore()
            expected = _joined(original(*own, *args, **kwargs))
            if _agree(out, expected):
                return
            state.restore()
            truth = _in_double(original, module, args, kwargs)
    finally:
        after.restore()
    if truth is None or not _as_good(out, expected, truth):
        raise VerificationError(
            f"{type(module).__name__}: accelerated and PyG's own result differ by "
            f"{float((out.detach() - expected).abs().max()):.3g}"
        )


def _joined(out: Any) -> Any:
    """A dictionary of tensors as one of all their numbers."""
    return torch.cat([t.flatten() for t in out.values()]) if isinstance(out, dict) else out


def _agree(out: Tensor, expected: Tensor) -> bool:
    """Whether results are equal up to the rounding of sums of the size of the largest one."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    relative, absolute = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-3, 1e-6)}.get(
        out.dtype, (5e-2, 1e-3)
    )
    # Sums of many terms of both signs: measured against the largest result.
    finite = expected[expected.isfinite()]
    allowed = absolute + relative * float(finite.abs().max()) if finite.numel() else 0.0
    return bool(torch.isclose(out, expected, rtol=relative, atol=allowed, equal_nan=True).all())


def _in_double(
    original: Callable[..., Any],
    module: torch.nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor | None:
    """PyG's own result in float64; None if the layer holds what cannot be converted."""

    def double(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    args, kwargs = tree_map_only(Tensor, double, (args, kwargs))
    try:
        if module is None:
            return _joined(original(*args, **kwargs))  # type: ignore[no-any-return]
        tensors = (*module.named_parameters(), *module.named_buffers())
        with _reparametrize_module(module, {name: double(t) for name, t in tensors}):
            out: Tensor = _joined(original(module, *args, **kwargs))
    except RuntimeError:  # two dtypes met
        return None
    return out


def _as_good(out: Tensor, expected: Tensor, truth: Tensor) -> bool:
    """Whether a result is about as close to the truth as PyG's.

    How far rounding carries depends on numbers that the result does not show: a deviation is the
    root of a small difference of large squares. PyG's own error has the size of it.
    """
    if not out.shape == expected.shape == truth.shape or out.dtype != expected.dtype:
        return False
    error = (expected.double() - truth).abs()
    allowed = MARGIN * float(error[error.isfinite()].max()) if error.isfinite().any() else 0.0
    close = torch.isclose(out.double(), truth, rtol=0.0, atol=allowed, equal_nan=True)
    return bool((close | (out == expected)).all())
