"""Checks of what users pass: whole numbers, and conditions on what tensors hold."""

from numbers import Integral

import torch
from torch import Tensor

from pyg_accel.machine import is_captured

__all__ = ["require", "shown", "whole"]


def whole(name: str, value: object, least: int = 1) -> int:
    """Return a whole number; a truth value is none.

    Raises:
        ValueError: for anything else, less than ``least`` or of more than 64 bits.
    """
    is_whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)
    if not is_whole or not least <= value < 2**63:  # type: ignore[operator]
        raise ValueError(
            f"expected '{name}' to be a whole number of at least {least} (got {value!r})"
        )
    return value  # type: ignore[return-value]


def shown(value: object) -> str:
    """Return what an error message says of a value: the shape of a tensor, or its type."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def require(condition: Tensor, message: str) -> None:
    """Demand that a condition on what tensors hold is true.

    This waits for a device. Where that is impossible (compiled code, fake tensors, a CUDA graph
    that is being recorded), the device itself asserts the condition.

    Args:
        condition: bool, of one element.
        message: of the error.

    Raises:
        ValueError: where the condition is false.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(condition):  # of each item of a batch
        condition = torch._C._functorch.get_unwrapped(condition).all()
    recorded = is_captured(condition)
    if recorded or type(condition) is not Tensor:
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
