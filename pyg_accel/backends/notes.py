"""Collects which backends ran, for the report."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyg_accel.runtime.state import running

__all__ = ["note_choice", "record_choices"]


@contextmanager
def record_choices() -> Iterator[dict[str, None]]:
    """Collect the names of the backends that are chosen in the block and in nested ones."""
    names: dict[str, None] = {}
    outer, running.backends = running.backends, names
    try:
        yield names
    finally:
        running.backends = outer
        if outer is not None:
            outer.update(names)


def note_choice(name: str) -> None:
    """Tell :func:`record_choices` that a backend was chosen."""
    if running.backends is not None:
        running.backends[name] = None
