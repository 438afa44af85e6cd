"""Loads the native libraries on first use, or says why it cannot."""

import ctypes
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from pyg_accel.errors import HOW_TO_BUILD, ExtensionNotBuilt
from pyg_accel.formula.functions import numbers
from pyg_accel.settings import settings, variables

__all__ = [
    "Entry", "build_info", "cpu_library", "cpu_unavailable_reasons", "cuda_library",
    "cuda_unavailable_reasons", "direct", "identities_hold", "library_of",
]  # fmt: skip

_FOLDER = Path(__file__).parents[1]


def _files(name: str) -> list[Path]:
    return sorted(_FOLDER.glob(f"{name}*.so")) + sorted(_FOLDER.glob(f"{name}*.pyd"))


def _load(name: str, needs: str = "") -> tuple[str, ...]:
    """Load a library; return the reasons why it cannot be loaded."""
    files = _files(name)
    if not files:
        return (f"extension not built: run {HOW_TO_BUILD}{needs}",)
    try:
        torch.ops.load_library(files[0])
    except OSError as error:  # built for another torch, processor or C library
        return (f"extension does not load ({error}): rebuild it with {HOW_TO_BUILD}",)
    return ()


@lru_cache(maxsize=1)
def _load_cpu() -> tuple[str, ...]:
    if reasons := _load("_C_cpu"):
        return reasons
    library, of_python = torch.ops.pyg_accel_cpu, ctypes.PyDLL(str(_files("_C_cpu")[0]))
    if not (hasattr(library, "functions") and hasattr(of_python, "pyg_accel_unchanged")) or (
        library.functions() != numbers()
    ):
        return (f"extension was built from other sources: rebuild it with {HOW_TO_BUILD}",)
    return ()


@lru_cache(maxsize=1)
def _load_cuda() -> tuple[str, ...]:
    return _load("_C_cuda", " where there is nvcc, the CUDA compiler")


def cpu_unavailable_reasons() -> list[str]:
    """Return why the CPU library cannot be used; empty means that it is loaded.

    Raises:
        ValueError: if it lacks the instruction set that is asked for.
    """
    if not (reasons := list(_load_cpu())):
        cpu_library()
    return reasons


def cpu_library() -> Any:
    """Return the namespace of the CPU library's operators.

    Raises:
        ExtensionNotBuilt: with the command that builds it.
    """
    reasons = _load_cpu()
    if reasons:
        raise ExtensionNotBuilt("the CPU library pyg_accel._C_cpu", reasons[0])
    library = torch.ops.pyg_accel_cpu
    if _applied != (settings.changes, *_isa()):
        _follow_settings(library)
    return library


@lru_cache(maxsize=1)
def identities_hold() -> Callable[[tuple[Any, ...]], int]:
    """Return the function of the CPU library that compares objects: see :mod:`.record.guard`.

    Raises:
        ExtensionNotBuilt: with the command that builds it.
    """
    cpu_library()
    function = ctypes.PyDLL(str(_files("_C_cpu")[0])).pyg_accel_unchanged
    function.argtypes, function.restype = (ctypes.py_object,), ctypes.c_int
    return function


def cuda_unavailable_reasons() -> list[str]:
    """Return why the CUDA library cannot be used; empty means that it is loaded.

    Without a GPU it is not loaded: its symbols could not be resolved.
    """
    if not torch.cuda.is_available():
        return ["there is no CUDA device"]
    return list(_load_cuda())


def cuda_library() -> Any:
    """Return the namespace of the CUDA library's operators.

    Raises:
        ExtensionNotBuilt: with the command that builds it.
    """
    reasons = cuda_unavailable_reasons()
    if reasons:
        raise ExtensionNotBuilt("the CUDA library pyg_accel._C_cuda", reasons[0])
    return torch.ops.pyg_accel_cuda


def library_of(device: torch.device) -> Any:
    """Return the library for tensors of a device, or None."""
    if device.type == "cpu":
        return None if _load_cpu() else cpu_library()
    if device.type == "cuda":
        return None if _load_cuda() else torch.ops.pyg_accel_cuda
    return None


def direct(operator: Any) -> Any:
    """Return the C++ function of an operator, without torch's Python wrapper."""
    overload = operator.default
    return getattr(overload, "_op", overload)


# Unused entries and functions that remove them. They run when the next entry is added: a destructor
# may run anywhere, and modes would see its operators.
_unused: list[tuple[Callable[[int], None], int]] = []
_removing = Lock()


class Entry:
    """An entry in a table of a library, for as long as this object lives.

    Args:
        add: adds it and returns its number.
        remove: removes it by its number.
        arrays: the library reads their memory, which assignments to ``.data`` would free.
        owned: further objects that must live as long.

    Attributes:
        number: in the table.
    """

    __slots__ = ("__weakref__", "_owned", "_remove", "number")

    def __init__(
        self,
        add: Callable[[], int],
        remove: Callable[[int], None],
        arrays: Sequence[Tensor],
        owned: Any = None,
    ) -> None:
        with _removing:
            while _unused:
                function, number = _unused.pop()
                function(number)
        self.number = add()
        self._remove = remove
        self._owned = [t.untyped_storage() for t in arrays], owned

    # A default argument, since a module's names are gone when Python exits.
    def __del__(self, unused: Callable[[Any], None] = _unused.append) -> None:
        if hasattr(self, "number"):
            unused((self._remove, self.number))


_isa = variables("isa")
_applied: tuple[Any, ...] = ()
_applied_isa = ""


def _follow_settings(library: Any) -> None:
    global _applied, _applied_isa
    if settings.isa != _applied_isa:
        supported = library.info().partition("supported=")[2].partition(";")[0].split(",")
        if settings.isa not in ("", *supported):
            raise ValueError(f"expected PYG_ACCEL_ISA to be one of {', '.join(supported)}, which "
                             f"this processor and build have (got '{settings.isa}')")  # fmt: skip
        library.configure(settings.isa, 0, 0)
        _applied_isa = settings.isa
    _applied = settings.changes, *_isa()


def build_info() -> dict[str, Any]:
    """Return the versions of torch and compiler and the flags of the build; empty without one."""
    path = _FOLDER / "build_info.json"
    if not path.exists():
        return {}
    info: dict[str, Any] = json.loads(path.read_text())
    return info
