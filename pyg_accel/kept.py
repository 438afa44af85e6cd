"""What was computed from a tensor, kept for as long as that tensor lives and stays as it is."""

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["Kept"]

T = TypeVar("T")


@dataclass
class _Entry:
    owner: "weakref.ref[Tensor]"
    version: int
    made: dict[Hashable, Any] = field(default_factory=dict)


class Kept:
    """Values by the identity and version of a tensor, and a key.

    A tensor that was changed in place is a new one; with it go the values that were made from it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()  # a weak reference may die inside any of the methods

    def get(self, owner: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value that was kept for a tensor and key; make it if there is none."""
        with self._lock:
            made = self._made(owner)
            if key not in made:
                made[key] = make()
            value: T = made[key]
            return value

    def find(self, owner: Tensor, key: Hashable) -> Any:
        """Return the value that was kept for a tensor and key, or None."""
        with self._lock:
            return self._made(owner).get(key)

    def put(self, owner: Tensor, key: Hashable, value: Any) -> None:
        """Keep a value in place of the one before."""
        with self._lock:
            self._made(owner)[key] = value

    def _made(self, owner: Tensor) -> dict[Hashable, Any]:
        version = 0 if owner.is_inference() else owner._version
        number = id(owner)
        entry = self._entries.get(number)
        if entry is None or entry.owner() is not owner or entry.version != version:
            dies = weakref.ref(owner, lambda dead: self._forget(number, dead))
            entry = self._entries[number] = _Entry(dies, version)
        return entry.made

    def _forget(self, number: int, dead: "weakref.ref[Tensor]") -> None:
        with self._lock:
            entry = self._entries.get(number)
            if entry is not None and entry.owner is dead:
                del self._entries[number]
