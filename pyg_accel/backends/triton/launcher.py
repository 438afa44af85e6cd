"""Launches a kernel on the device of its tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher", "launch", "type_of"]

# Compiled kernels by what Triton's compiler looks at. Triton keeps such a table too; finding a
# kernel in it takes several times as long as launching.
_compiled: dict[tuple[Any, ...], Any] = {}


def type_of(dtype: torch.dtype) -> Any:
    """Return what Triton calls a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
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
) -> Any:
    """Run a kernel on the current device; returns what was compiled if the launch was direct."""
    where = arguments[0].device
    if where.type != "cuda" or constants:
        kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
        return None
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
        compiled = _compiled[key] = kernel[grid](*arguments, num_warps=warps, num_stages=1)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)
    return compiled


class Launcher:
    """Runs a kernel on arguments that are of the same types, and of the same range, in each call.

    Args:
        kernel: a Triton function whose integers are not specialised on.
        warps: of a program.
    """

    __slots__ = ("_aligned", "_kernel", "_warps")

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps
        self._aligned: dict[int, Any] = {}  # compiled for pointers to 16 bytes, by device

    def __call__(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], tensors: Sequence[Tensor]
    ) -> None:
        """Run it on the device of the tensors, in the current stream.

        Args:
            grid: programs.
            arguments: by position.
            tensors: those among them.
        """
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        device = tensors[0].get_device()
        compiled = self._aligned.get(device) if addresses % 16 == 0 else None
        if compiled is not None and device == torch.cuda.current_device():
            compiled[grid](*arguments)
        elif device < 0 or device == torch.cuda.current_device():
            compiled = _launch(self._kernel, grid, arguments, self._warps, {})
            if addresses % 16 == 0 and compiled is not None:
                self._aligned[device] = compiled
        else:
            launch(self._kernel, grid, arguments, warps=self._warps)
