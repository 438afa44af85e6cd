"""Running a kernel where its tensors are."""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["launch"]


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
        kernel: a Triton function.
        grid: programs.
        arguments: by position; None for pointers that this version of the kernel does not read.
        warps: of a program.
        constants: compile-time arguments, by name.
    """
    where = arguments[0].device
    if where.type == "cuda" and where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
    else:
        kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
