"""Launches a kernel on the device of its tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Call", "compiled_for", "launch", "type_of"]

# Compiled kernels by what Triton's compiler looks at. Triton keeps such a table too; finding a
# kernel in it takes several times as long as launching.
_compiled: dict[tuple[Any, ...], Any] = {}


def type_of(dtype: torch.dtype) -> Any:
    """Return what Triton calls a dtype."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


class Call(NamedTuple):
    """A launch of a kernel; see :func:`launch`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    warps: int
    constants: dict[str, Any]


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
        constants: compile-time arguments, by name: the last of the kernel's parameters.
    """
    where = arguments[0].device
    call = Call(kernel, grid, arguments, warps, constants)
    if where.type == "cuda" and where.index != torch.cuda.current_device():
        with torch.cuda.device(where):
            _launch(call)
    else:
        _launch(call)


def compiled_for(call: Call) -> Any:
    """Return what Triton compiled for a launch on a GPU before; None if it takes more to launch.

    That is memory of its own, several blocks at a time, or another kind of launch.
    """
    compiled = _compiled.get(_key(call))
    if compiled is None:
        return None
    metadata = compiled.metadata
    simple = metadata.num_ctas == 1 and not any(
        getattr(metadata, name, 0)
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid",
                     "launch_pdl")
    )  # fmt: skip
    return compiled if simple else None


def _key(call: Call) -> tuple[Any, ...]:
    # What of an argument the compiled code depends on.
    looked_at = [
        (a.dtype, a.data_ptr() % 16 == 0)
        if isinstance(a, Tensor)
        else None if a is None else (-(2**31) <= a < 2**31, a == 1, a % 16 == 0)
        for a in call.arguments
    ]  # fmt: skip
    device = call.arguments[0].device.index
    return call.kernel, device, call.warps, *call.constants.values(), *looked_at


def _launch(call: Call) -> None:
    """Run a kernel on the current device."""
    kernel, grid, arguments, warps, constants = call
    if arguments[0].device.type != "cuda":
        kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
        return
    key = _key(call)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, num_warps=warps, num_stages=1, **constants)
    else:
        named = kernel.arg_names[len(arguments) :] if constants else ()
        compiled[(*grid, 1, 1)[:3]](*arguments, *[constants[name] for name in named])
