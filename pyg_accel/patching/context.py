"""Modes of torch and settings, which calls of one kind have in common."""

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
    """Return all that a recorded call depends on beside its arguments and what its code reads."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch._C._is_any_autocast_enabled() and _autocast(), torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack() and modes(), torch.autograd.forward_ad._current_level,
        torch._C._functorch.peek_interpreter_stack() is None,
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
        in_force(), named.get(), settings.changes, *_variables(),
    )  # fmt: skip


def kind_of(now: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what contexts of one kind have in common: each call may have modes of its own."""
    return now[:4], frozenset(map(type, modes())), now[6:]


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )


def modes(*, whole: bool = False) -> tuple[Any, ...]:
    """Return modes that see functions; of those that set a default device, the device.

    Args:
        whole: with those that do not look into ``propagate``.
    """
    stack = _get_current_function_mode_stack()
    return tuple(mode.device if type(mode) is DeviceContext else mode for mode in stack
                 if whole or not hasattr(mode, "only_outside_propagate"))  # fmt: skip
