"""Running a kernel where its tensors are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch"]

# Compiled kernels by what Triton's compiler looks at. Triton keeps such a table too; finding a
# kernel in it takes several times as long as launching.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int] | tuple[int],
    arguments: Sequence[Any],
    *,
    warps: int = 1,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its first argument, in the current stream.

    Args:
        kernel: a Triton function whose integers are not specialised on.
        grid: programs.
        arguments: by position; None for pointers that this version of the kernel does not read.
        warps: of a program.
        constants: compile-time arguments, by name.
    """
    where = arguments[0].device
    if where.type == "cuda" and where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            _launch(kernel, grid, arguments, warps, constants)
    else:
        _launch(kernel, grid, arguments, warps, constants)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    warps: int,
    constants: dict[str, Any],
) -> None:
    where = arguments[0].device
    if where.type != "cuda" or constants:
        kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
        return
    # What of an argument the compiled code depends on.
    looked_at = [
        (a.dtype, a.data_ptr() % 16 == 0)
        if isinstance(a, Tensor)
        else None if a is None else -(2**31) <= a < 2**31
        for a in arguments
    ]  # fmt: skip
    key = (kernel, where.index, warps, *looked_at)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, num_warps=warps, num_stages=1)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)
