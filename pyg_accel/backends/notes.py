"""Collects which backends ran, for the report."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["chosen", "note_choice", "record_choices"]

chosen: ContextVar[dict[str, None] | None] = ContextVar("pyg_accel_chosen", default=None)


@contextmanager
def record_choices() -> Iterator[dict[str, None]]:
    """Collect the names of the backends that are chosen in the block and in nested ones."""
    names: dict[str, None] = {}
    outer = chosen.get()
    token = chosen.set(names)
    try:
        yield names
    finally:
        chosen.reset(token)
        if outer is not None:
            outer.update(names)


def note_choice(name: str) -> None:
    """Tell :func:`record_choices` that a backend was chosen."""
    names = chosen.get()
    if names is not None:
        names[name] = None
