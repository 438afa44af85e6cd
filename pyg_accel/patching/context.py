"""Modes of torch and settings: the context of a call."""

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pyg_accel.backends.dispatch import named
from pyg_accel.patching.sampling import in_force
from pyg_accel.settings import settings, variables

__all__ = ["context", "kind_of", "modes"]

_variables = variables("backend", "disable", "isa", "always", "verify", "tuning")


def context() -> tuple[Any, ...]:
    """Return everything that a recorded call depends on besides arguments and guarded values."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch._C._is_any_autocast_enabled() and _autocast(), torch._C._len_torch_dispatch_stack(),
        (torch._C._len_torch_function_stack() and modes()) or None,
        torch.autograd.forward_ad._current_level,
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
        in_force(), named.get(), settings.changes, *_variables(),
    )  # fmt: skip


def kind_of(now: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the context with only the types of modes, as each call may create its own."""
    return now[:4], frozenset(map(type, modes())), now[6:]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )


def modes(*, whole: bool = False) -> tuple[Any, ...]:
    """Return the modes of functions, with the device in place of a mode that sets one.

    Args:
        whole: include modes that do not see functions inside of ``propagate``.
    """
    stack = _get_current_function_mode_stack()
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in stack
                 if whole or not hasattr(mode, "only_outside_propagate"))  # fmt: skip
