"""Which library a code object belongs to, and the names that it reads."""

import dis
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = [
    "assigned_outside", "codes_of", "is_installed_file", "is_library", "is_library_file",
    "is_package_file", "module_of", "named_in",
]  # fmt: skip

_LIBRARIES = ("torch", "torch_geometric", "pyg_accel", "torch_sparse", "torch_scatter", "pyg_lib")
_PACKAGE = str(Path(__file__).parents[1])
_PYTHON = sysconfig.get_path("stdlib")


def is_library(name: str | None) -> bool:
    """Return whether a module is of torch, PyG or this package, whose code is not guarded."""
    return bool(name) and str(name).split(".", 1)[0] in _LIBRARIES


def module_of(function: Any) -> str:
    """Return the name of the module that a function or class was defined in."""
    return str(getattr(function, "__module__", None) or "")


@lru_cache(maxsize=4096)
def is_installed_file(path: str) -> bool:
    """Return whether a file is of Python's library or of an installed package."""
    return path.startswith(("<frozen ", _PYTHON)) or "site-packages" in path


@lru_cache(maxsize=4096)
def is_library_file(path: str) -> bool:
    """Return whether a file is of torch, PyG or this package."""
    if path.startswith("<"):  # methods of named tuples and data classes, functions of overrides
        return path == "<string>" or path.startswith("<pyg_accel")
    *folders, name = Path(path).parts
    # PyG renders templates into temporary files.
    return name.startswith("torch_geometric.") or any(f in _LIBRARIES for f in folders)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def is_package_file(path: str) -> bool:
    """Return whether code is this package's."""
    return path.startswith(_PACKAGE)


@lru_cache(maxsize=4096)
def named_in(code: CodeType, *operations: str) -> tuple[Any, ...]:
    """Return what instructions of some kinds name, in code and the functions inside of it."""
    return tuple(dict.fromkeys(
        i.argval for c in codes_of(code) for i in dis.get_instructions(c) if i.opname in operations
    ))  # fmt: skip


def assigned_outside(code: CodeType) -> list[str]:
    """Return the globals and the variables of functions around it that code assigns to."""
    variables = named_in(code, "STORE_DEREF", "DELETE_DEREF")
    free = [name for name in variables if name in code.co_freevars]
    return [*named_in(code, "STORE_GLOBAL", "DELETE_GLOBAL"), *free]
