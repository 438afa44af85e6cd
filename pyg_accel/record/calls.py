"""Watches calls of other functions than torch's in a recorded call, with a profiler.

Functions without side effects may run. Any other, such as ``random.random`` or ``print``, ends the
recording: later calls, which run the program, would not call it.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.record.code import is_installed_file, is_library, is_library_file, is_package_file
from pyg_accel.record.guard import Guard

__all__ = ["Calls"]

# Functions of Python and its library without side effects.
_PURE_BUILTINS = frozenset({
    "isinstance", "issubclass", "len", "getattr", "hasattr", "callable", "iter", "next", "min",
    "max", "sum", "abs", "any", "all", "sorted", "divmod", "pow", "round", "repr",
    "__build_class__", "chr", "ord", "hash", "format",
})  # fmt: skip
_PURE_MODULES = frozenset({"math", "_operator", "itertools", "_functools", "typing"})
_PURE_TYPES = (str, bytes, int, float, complex, bool, tuple, frozenset, range, slice, type)
_CONTAINERS = (list, dict, set)
_READS = frozenset({
    "get", "keys", "values", "items", "index", "count", "copy", "__contains__", "__getitem__",
    "union", "intersection", "difference", "issubset", "issuperset", "isdisjoint", "__len__",
})  # fmt: skip


# Functions of torch that change its state, or run a function of the user any number of times.
_SEEDS = ("torch/random.py", "torch/cuda/random.py", "torch/utils/checkpoint.py")


class Calls:
    """Watches calls while a layer runs.

    Args:
        guard: of the layer.
        stop: is called with the reason why the call cannot be recorded.

    Attributes:
        ran: code objects that ran.
    """

    def __init__(self, guard: Guard, stop: Callable[[str], None]) -> None:
        self.ran: set[types.CodeType] = set()
        self._guard, self._stop = guard, stop

    def see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Check a call; a function for :func:`sys.setprofile`."""
        code, caller = frame.f_code, self._caller(frame)
        of_library = is_library_file(caller.co_filename) and caller not in self._guard.codes
        if event == "call":
            if code.co_filename.endswith(_SEEDS) and frame.f_back is not None:
                outer = frame.f_back.f_code.co_filename
                if not is_library_file(outer) or outer == code.co_filename:
                    self._stop(f"it calls torch.{code.co_name}")
            if code is caller or not of_library:
                self.ran.add(code)
        elif event == "c_call" and not of_library and not self._is_pure(arg):
            owner = getattr(arg, "__self__", None)
            of = arg.__module__ if owner is None else type(owner).__name__
            self._stop(f"it calls {of}.{arg.__name__}")

    def _caller(self, frame: types.FrameType) -> types.CodeType:
        """Return the code that is responsible for a frame: packages act for their caller."""
        while frame.f_back is not None:
            code, caller = frame.f_code, frame.f_back.f_code
            if code in self._guard.codes or is_library_file(code.co_filename):
                break
            # Code that this package calls, such as that of a backend, is not code of the layer.
            if not (is_installed_file(code.co_filename) or is_package_file(caller.co_filename)):
                break
            frame = frame.f_back
        return frame.f_code

    def _is_pure(self, function: Any) -> bool:
        """Whether a function that is not written in Python has no side effects."""
        owner, module = getattr(function, "__self__", None), function.__module__
        if owner is None or isinstance(owner, types.ModuleType):
            if module == "builtins":
                return function.__name__ in _PURE_BUILTINS
            return is_library(module) or module in _PURE_MODULES
        if isinstance(owner, torch.Generator):
            return False
        if isinstance(owner, Tensor) or is_library(type(owner).__module__) or is_library(module):
            return True
        if isinstance(owner, _CONTAINERS):
            return function.__name__ in _READS or not self._guard.compares(owner)
        return isinstance(owner, _PURE_TYPES) or type(owner).__module__ in _PURE_MODULES
