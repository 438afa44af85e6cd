"""Traces models with torch.fx, and refuses code that the graph would not reproduce.

A graph only has calls on tensors. It misses contexts (``torch.no_grad()``, ``torch.autocast`` or
any other), assignments to attributes, and random numbers that are drawn without a tensor, which
become constants.
"""

import dis
import sys
from collections.abc import Collection
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch_geometric.nn import MessagePassing, Sequential

from pyg_accel.cache import saved_tensors_are_hooked

__all__ = ["FAILURES", "LeftOut", "Reader"]

_TRACING = ("torch.fx.", "torch.overrides", "pyg_accel.")  # modules that take part in tracing


class LeftOut(Exception):
    """A graph would not do what the code of a model does; the text says what or why."""


# Errors that tracing may raise. Mistakes in the model show when it is run.
FAILURES = (
    fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError,
    AssertionError, NameError, LeftOut,
)  # fmt: skip


class Reader(fx.Tracer):
    """Records calls of layers of PyG and torch, and traces into all other modules.

    It raises if a call is made in a mode that the graph would not have.

    Args:
        leaves: ids of other modules whose calls are recorded.
    """

    proxy_buffer_attributes = True  # otherwise, results computed from buffers would be constants

    def __init__(self, leaves: Collection[int]) -> None:
        """Remember the modes of torch."""
        super().__init__()
        self._leaves, self._modes = leaves, _modes()

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether calls of a module are recorded."""
        if isinstance(m, Sequential):
            return False
        of_pyg = type(m).__module__.startswith("torch_geometric.")
        if isinstance(m, MessagePassing) or of_pyg or id(m) in self._leaves:
            return True
        return bool(super().is_leaf_module(m, module_qualified_name))

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call.

        Raises:
            LeftOut: if it is made inside a context.
        """
        if _modes() != self._modes:
            raise LeftOut("it switches gradients, autocast or another mode of torch on or off")
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(_TRACING) and _has_with(frame.f_code):
                where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise LeftOut(f"it enters a context ({where}), and a graph would not")
            frame = frame.f_back
        return super().create_node(*args, **kwargs)


@lru_cache(maxsize=1024)
def _has_with(code: CodeType) -> bool:
    return any(i.opname == "WITH_EXCEPT_START" for i in dis.get_instructions(code))


def _modes() -> tuple[Any, ...]:
    """Return the modes of torch that change what calls do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        saved_tensors_are_hooked(),  # checkpoint() enters contexts in none of the frames
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
