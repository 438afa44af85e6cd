"""The backends that exist, by name."""

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from pyg_accel.backends.base import Backend

__all__ = ["backends", "changes", "get_backend", "register_backend", "unregister_backend"]

ENTRY_POINTS = "pyg_accel.backends"

# Loaded by name, like those of other packages: backends may ask the dispatch, which asks here.
_BUILTIN = tuple(
    EntryPoint(value.split(":")[0], f"pyg_accel.backends.{value}", ENTRY_POINTS)
    for value in (
        "reference:ReferenceBackend",
        "cpu:CpuBackend",
        "triton:TritonBackend",
        "cuda:CudaBackend",
        "torch_sparse:TorchSparseBackend",
        "pyg_lib:PygLibBackend",
    )
)
_backends: dict[str, Backend] = {}
_changes = 0


@lru_cache(maxsize=1)
def _load_builtin() -> None:
    for entry in _BUILTIN:
        register_backend(entry.load()())


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register_backend(entry.load()())


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Add a backend. Packages can do it by an entry point of the group ``pyg_accel.backends``.

    Args:
        backend: an instance of a :class:`Backend`.
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
    _note_change()


def unregister_backend(name: str) -> None:
    """Remove a backend that was registered."""
    get_backend(name)
    del _backends[name]
    _note_change()


def _note_change() -> None:
    global _changes
    _changes += 1


def changes() -> int:
    """Return how often a backend came or went: decisions hold until then."""
    return _changes


def backends() -> dict[str, Backend]:
    """Return all backends by name, in the order of registration."""
    _load_builtin()
    _load_entry_points()
    return dict(_backends)


def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        ValueError: naming those that exist.
    """
    known = backends()
    if name not in known:
        raise ValueError(f"no backend named '{name}'; there are {', '.join(known)}")
    return known[name]
