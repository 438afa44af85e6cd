"""Reads the code of models with torch.fx, and refuses what a graph would leave out.

A graph has the calls that are made of tensors. What else code does has no place in it: contexts
that it enters (``torch.no_grad()``, ``torch.autocast``, a hand-written one), attributes that it
assigns, and random numbers that it draws without a tensor, which become constants.
"""

import dis
import sys
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx

from pyg_accel.cache import saved_tensors_are_hooked

__all__ = ["FAILURES", "LeftOut", "Reader"]

_OF_READING = ("torch.fx.", "torch.overrides", "pyg_accel.")  # modules that see calls on their way


class LeftOut(Exception):
    """Code does what a graph of its calls would not do; the text says what."""


# What reading code on symbols may raise. A mistake of the model's own comes up when it is run.
FAILURES = (
    fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError,
    AssertionError, NameError, LeftOut,
)  # fmt: skip


class Reader(fx.Tracer):
    """Records calls, as long as nothing is in force that a graph would leave out."""

    proxy_buffer_attributes = True  # else what is computed from buffers would be a constant

    def __init__(self, **options: Any) -> None:
        """Remember what is in force."""
        super().__init__(**options)
        self._in_force = _in_force()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call.

        Raises:
            LeftOut: if it is made inside a context.
        """
        if _in_force() != self._in_force:
            raise LeftOut("it switches gradients, autocast or another mode of torch on or off")
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(_OF_READING) and _has_with(frame.f_code):
                where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise LeftOut(f"it enters a context ({where}), and a graph would not")
            frame = frame.f_back
        return super().create_node(*args, **kwargs)


@lru_cache(maxsize=1024)
def _has_with(code: CodeType) -> bool:
    return any(i.opname == "WITH_EXCEPT_START" for i in dis.get_instructions(code))


def _in_force() -> tuple[Any, ...]:
    """What torch does to calls behind their backs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        saved_tensors_are_hooked(),  # a checkpoint, whose contexts are in no frame of its caller
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
