"""Remembers what a function of an edge_index returned, for as long as that edge_index lives.

GCNConv normalises its graph anew in every forward pass and gets a new edge_index each time, so a
graph that is kept by identity would never be found again. The results of such functions are kept
instead: the same tensors come back for the same arguments, and with them the same graph.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.settings import settings

__all__ = ["Memo"]


class _Entry:
    def __init__(self, tensors: list[Tensor], result: Any, forget: Callable[[Any], None]) -> None:
        self.tensors = [weakref.ref(t, forget) for t in tensors]
        self.versions = [t._version for t in tensors]
        self.result = result
        self.result_versions = [t._version for t in _tensors(result)]

    def fits(self, tensors: list[Tensor]) -> bool:
        same = all(ref() is t for ref, t in zip(self.tensors, tensors, strict=True))
        return (
            same
            and self.versions == [t._version for t in tensors]
            and self.result_versions == [t._version for t in _tensors(self.result)]
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _tensors(v)]
    return []


class Memo:
    """Results by the identity and version of tensor arguments and the value of the others.

    Holds at most ``settings.graph_cache`` results, each only while all tensors it was computed from
    are alive. Arguments that carry gradients are never remembered.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._entries: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
        self._lock = threading.RLock()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, from memory if it can be had there."""
        values = [*args, *kwargs.values()]
        tensors = [v for v in values if isinstance(v, Tensor)]
        if not tensors or any(t.requires_grad or t.is_inference() for t in tensors):
            return function(*args, **kwargs)
        if any(type(t) is not Tensor for t in tensors):
            return function(*args, **kwargs)
        try:
            key: tuple[Any, ...] = (
                function,
                tuple(kwargs),
                torch.is_inference_mode_enabled(),
                *(("tensor", id(v)) if isinstance(v, Tensor) else (type(v), v) for v in values),
            )
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and entry.fits(tensors):
                    self._entries.move_to_end(key)
                    return entry.result
        except TypeError:  # an argument that cannot be a key
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if any(t.is_inference() for t in _tensors(result)):
            return result

        def forget(_: object) -> None:
            with self._lock:
                self._entries.pop(key, None)

        # A result that is an argument, or a view of one, would keep itself alive.
        if not any(r is t or r._base is t for r in _tensors(result) for t in tensors):
            with self._lock:
                self._entries[key] = _Entry(tensors, result, forget)
                while len(self._entries) > settings.graph_cache:
                    self._entries.popitem(last=False)
        return result

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
