"""The registered backends, by name."""

from functools import lru_cache
from importlib.metadata import entry_points

from pyg_accel.backends.base import Backend
from pyg_accel.backends.cpu import CPU
from pyg_accel.backends.cuda import CUDA
from pyg_accel.backends.pyg_lib import PYG_LIB
from pyg_accel.backends.reference import REFERENCE
from pyg_accel.backends.torch_sparse import TORCH_SPARSE
from pyg_accel.backends.triton import TRITON
from pyg_accel.settings import settings

__all__ = ["backends", "get_backend", "register_backend", "unregister_backend"]

ENTRY_POINTS = "pyg_accel.backends"

_backends = {
    backend.name: backend for backend in (REFERENCE, CPU, TRITON, CUDA, TORCH_SPARSE, PYG_LIB)
}


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register_backend(entry.load())


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Add a backend. Packages can do it by an entry point of the group ``pyg_accel.backends``.

    Args:
        backend: a :class:`Backend`.
        replace: take the place of the one with the same name.

    Raises:
        ValueError: if it is not a backend, or the name is taken.
    """
    if not isinstance(backend, Backend):
        raise ValueError(f"expected an instance of Backend (got {backend!r})")
    if backend.name in _backends and not replace:
        raise ValueError(
            f"a backend named '{backend.name}' exists; pass replace=True to replace it"
        )
    _backends[backend.name] = backend
    settings.outdate()


def unregister_backend(name: str) -> None:
    """Remove a backend that was registered."""
    get_backend(name)
    del _backends[name]
    settings.outdate()


def backends() -> dict[str, Backend]:
    """Return all backends by name, in the order of registration."""
    _load_entry_points()
    return dict(_backends)


def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    available = backends()
    if name not in available:
        raise ValueError(f"no backend named '{name}'; there are {', '.join(available)}")
    return available[name]
