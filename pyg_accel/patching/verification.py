"""``PYG_ACCEL_VERIFY=1``: compare every accelerated call with PyG's own path."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from pyg_accel.errors import VerificationError
from pyg_accel.runtime.module_state import ModuleState, modules_in
from pyg_accel.runtime.state import running

__all__ = ["verify"]

# Allowed ratio of our error to PyG's: both are rounded, in different orders.
MARGIN = 8.0
# Variations of the inputs: several, as all may be on the same side of a discontinuity.
_VARIED = 16


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
        args: after the layer, unchanged.
        kwargs: unchanged.
        out: the accelerated result, a tensor or a dictionary of them; others are not compared.
        state: before the call.

    Raises:
        VerificationError: if they differ by more than rounding errors.
    """
    out = _joined(out)
    if not isinstance(out, Tensor):
        return
    owner = () if module is None else (module,)
    after = ModuleState(modules_in(module), state.device)
    before, running.stock = running.stock, True  # no acceleration inside of it
    try:
        with torch.no_grad():
            state.restore()
            expected = _joined(original(*owner, *args, **kwargs))
            if _agree(out, expected):
                return
            truths = _truths(original, module, args, kwargs, state, out.dtype)
            if out.is_floating_point() and _as_good(out, expected, truths):
                return
    finally:
        running.stock = before
        after.restore()
    raise VerificationError(
        f"{type(module).__name__}: accelerated and PyG's own result differ by "
        f"{float((out.detach() - expected).abs().max()):.3g}"
    )


def _joined(out: Any) -> Any:
    """Concatenate a dictionary of tensors."""
    return torch.cat([t.flatten() for t in out.values()]) if isinstance(out, dict) else out


def _agree(out: Tensor, expected: Tensor) -> bool:
    """Whether results are equal up to rounding errors, relative to the largest one."""
    if out.shape != expected.shape or out.dtype != expected.dtype:
        return False
    relative, absolute = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-3, 1e-6)}.get(
        out.dtype, (5e-2, 1e-3)
    )
    # Sums may cancel: relative to the largest result.
    finite = expected[expected.isfinite()]
    allowed = absolute + relative * float(finite.abs().max()) if finite.numel() else 0.0
    return bool(torch.isclose(out, expected, rtol=relative, atol=allowed, equal_nan=True).all())


def _truths(
    original: Callable[..., Any],
    module: torch.nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: ModuleState,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Yield PyG's own result in float64, and results for inputs perturbed in half of their digits.

    A difference of squares loses as many digits, so it may be anywhere between these results.
    Yields nothing for layers that cannot be converted.
    """
    noise, generator = 0.0, torch.Generator().manual_seed(0)

    def double(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        factor = 1 + noise * torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t.double() * factor.to(t.device)

    for _ in range(1 + _VARIED):
        state.restore()
        inputs, named = tree_map_only(Tensor, double, (args, kwargs))
        try:
            if module is None:
                out: Tensor = _joined(original(*inputs, **named))
            else:
                tensors = (*module.named_parameters(), *module.named_buffers())
                parameters = {name: double(t) for name, t in tensors}
                with _reparametrize_module(module, parameters, tie_weights=True):
                    out = _joined(original(module, *inputs, **named))
        except RuntimeError:  # two dtypes met
            return
        yield out
        noise = torch.finfo(dtype).eps ** 0.5


def _as_good(out: Tensor, expected: Tensor, truths: Iterator[Tensor]) -> bool:
    """Whether the error of a result is similar to PyG's.

    Rounding errors depend on intermediate results: a standard deviation is the root of a small
    difference of large squares, and 0 below a limit. PyG's own error shows their size, unless
    PyG's result and ours are on different sides of that limit.

    Args:
        out: the accelerated result.
        expected: PyG's.
        truths: results in float64, the first for the same inputs.
    """
    truth = next(truths, None)
    if (
        truth is None
        or not out.shape == expected.shape == truth.shape
        or out.dtype != expected.dtype
    ):
        return False
    error = (expected.double() - truth).abs()
    allowed = MARGIN * float(error[error.isfinite()].max()) if error.isfinite().any() else 0.0
    least = most = truth
    for other in chain([truth], truths):
        least, most = torch.minimum(least, other), torch.maximum(most, other)
        near = (out >= least - allowed) & (out <= most + allowed)
        if bool((near | (out == expected) | (out.isnan() & truth.isnan())).all()):
            return True
    return False
