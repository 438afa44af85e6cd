"""Watches the calls that a recorded call makes, with a profiler.

:class:`~pyg_accel.record.guard.Reading` follows Python code of the layer and its callees.
Functions in C must be on the list of functions without side effects and state: any other, such as
``random.random`` or ``print``, ends the recording. Code that is not followed may also call
functions of torch.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from pyg_accel.record.code import Kind, is_package_file, is_wrapper, kind_of
from pyg_accel.record.finals import is_of_torch, is_pure
from pyg_accel.record.guard import NotComparable, Reading
from pyg_accel.runtime.hooks import hooks_in

__all__ = ["Calls"]

_CALL = Module._call_impl.__code__
# Functions of torch that change its state, or run functions of the user repeatedly.
_SEEDS = ("torch/random.py", "torch/cuda/random.py", "torch/utils/checkpoint.py")


def _is_import(code: types.CodeType) -> bool:
    return code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib")


class Calls:
    """Watches calls while a layer runs.

    Args:
        reading: of the layer.
        stop: is called with the reason why the call cannot be recorded.

    Attributes:
        ran: code objects that ran and are followed.
        ended: the recording has ended; nothing is watched any more.
    """

    def __init__(self, reading: Reading, stop: Callable[..., None]) -> None:
        self.ran, self.ended = set[types.CodeType](), False
        self._reading, self._stop, self._imports = reading, stop, 0
        # Code objects of this package, and others that are not followed.
        self._package_code, self._pure_code = set[types.CodeType](), set[types.CodeType]()

    def see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Check a call; a function for :func:`sys.setprofile`."""
        code = frame.f_code
        if self.ended:
            sys.setprofile(None)
        elif event == "call":
            if code in self._package_code or code in self._pure_code:
                return
            if _is_import(code):
                self._imports += 1
            elif not self._imports:  # else a module that is loaded now
                self._see_code(frame, code)
        elif event == "c_call":
            # Code of this package may call any function, as _acts_for() would tell.
            if not (code in self._package_code or self._imports or is_pure(arg)):
                self._see_builtin(frame, arg)
        elif event == "return" and self._imports and _is_import(code):
            self._imports -= 1

    def _see_code(self, frame: types.FrameType, code: types.CodeType) -> None:
        if code.co_name == "import_module":
            return self._stop("it computes the name of a module")
        if code is _CALL and (hooks := hooks_in(frame.f_locals["self"])):
            self._stop("; ".join(hooks), may_change=True)
        if code in self.ran:
            return
        if is_package_file(code.co_filename):  # rules read layers and aggregations
            self._package_code.add(code)
            return self._try(self._reading.name, code)
        if kind_of(code.co_filename) is Kind.PURE and code is not _CALL:
            self._pure_code.add(code)
        if self._acts_for(frame):
            return
        self.ran.add(code)
        if code.co_filename.endswith(_SEEDS):
            return self._stop(f"it calls torch.{code.co_name}")
        self._try(self._reading.enter, code)

    def _see_builtin(self, frame: types.FrameType, function: Any) -> None:
        path = self._acts_for(frame)
        if is_package_file(path) or (path and is_of_torch(function)):
            return
        owner = getattr(function, "__self__", None)
        plain = owner is None or isinstance(owner, types.ModuleType)
        of = function.__module__ if plain else type(owner).__name__
        self._stop(f"it calls {of}.{function.__name__}")

    def _try(self, note: Callable[[types.CodeType], None], code: types.CodeType) -> None:
        try:
            note(code)
        except NotComparable as error:
            self._stop(str(error), may_change=error.may_change)

    def _acts_for(self, frame: types.FrameType) -> str:
        """Return the file of the code that a frame acts for, or "" if its reads are followed.

        Libraries act for their caller, and so does what this package calls, such as a backend.
        """
        called = frame
        others = False  # code that is of no library, on the way from the frame to its caller
        while True:
            code, caller = frame.f_code, frame.f_back
            kind = kind_of(code.co_filename)
            wraps = frame is not called and is_wrapper(code.co_filename)
            if kind is Kind.PURE and not wraps:
                followed = others and not is_package_file(code.co_filename)
                return "" if followed else code.co_filename
            # Code of an interactive session has no file, and what Python generates has none either.
            of_user = kind is Kind.FOLLOWED or code.co_filename.startswith("<")
            if caller is None or (of_user and self._reading.is_reached(code)):
                return ""
            others |= kind is Kind.FOLLOWED
            frame = caller
