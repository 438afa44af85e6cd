"""Launches a kernel on the device of its tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch", "type_of"]

# Compiled kernels by the properties of arguments that Triton specialises on. A look-up in Triton's
# table takes several times as long as launching.
_compiled: dict[tuple[Any, ...], Any] = {}


def type_of(dtype: torch.dtype) -> Any:
    """Return Triton's name of a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    warps: int = 1,
    **constants: Any,
) -> Any:
    """Run a kernel on the device of its first argument, in the current stream.

    Args:
        kernel: a Triton function.
        grid: programs.
        arguments: by position; None for pointers that this version of the kernel does not read.
        warps: of a program.
        constants: compile-time arguments, by name: the last of the kernel's parameters.

    Returns:
        The compiled kernel; None in the interpreter.
    """
    where = arguments[0].device
    if where.type != "cuda":
        kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
        return None
    if where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            return launch(kernel, grid, arguments, warps=warps, **constants)
    # Triton specialises on these properties.
    properties = [
        (a.dtype, a.data_ptr() % 16 == 0)
        if isinstance(a, Tensor)
        else None if a is None else (-(2**31) <= a < 2**31, a == 1, a % 16 == 0)
        for a in arguments
    ]  # fmt: skip
    key = (kernel, where.index, warps, *constants.values(), *properties)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
        _compiled[key] = compiled
    else:
        named = kernel.arg_names[len(arguments) :] if constants else ()
        compiled[(*grid, 1, 1)[:3]](*arguments, *[constants[name] for name in named])
    return compiled
