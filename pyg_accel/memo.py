"""Remembers what a function of an edge_index returned, for as long as that edge_index lives.

GCNConv normalises its graph anew in every forward pass and gets a new edge_index each time, so a
graph that is kept by identity would never be found again. The results of such functions are kept
instead: the same tensors come back for the same arguments, and with them the same graph.

Where that cannot be, because a weight is being learned or a mask is new in every call, the function
runs; but an edge_index that equals one which came out before is replaced by that one. Comparing is
far cheaper than sorting, and needs no belief in what the function does.

Tensors that come back are shared, so none of them may get to where it could be changed: a
layer borrows them while its forward runs (:meth:`Memo.begin`), and leaves copies behind where it
returns or keeps one.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_default_dtype, is_inference_mode_enabled
from torch._C import _is_any_autocast_enabled

from pyg_accel.cache import RecentlySeen, Snapshot, TensorCache, changes_unseen, memory_of
from pyg_accel.machine import is_captured
from pyg_accel.settings import settings

__all__ = ["MEMO", "Memo", "changed", "copied", "is_sparse_tensor", "tensors_in"]

_INERT = frozenset({type(None), bool, int, float, str})  # what most attributes of layers are


class _Argument(NamedTuple):
    """Stands for an argument that is returned as it is: remembered, it would keep itself alive."""

    place: int  # among the tensors of the call


class _Remembered(NamedTuple):
    result: Any
    tensors: list[Tensor]  # in it
    unchanged: Snapshot  # of them

    def fits(self) -> bool:
        """Whether the result is unchanged and has no gradients."""
        for t in self.tensors:
            if t.requires_grad:
                return False
        return self.unchanged.fits(self.tensors)

    def of(self, tensors: list[Tensor]) -> Any:
        """Return the result, with the arguments of this call."""
        if type(self.result) is not tuple:
            return self.result
        return tuple(tensors[r.place] if type(r) is _Argument else r for r in self.result)


def is_sparse_tensor(value: Any) -> bool:
    """Return whether this is a ``torch_sparse.SparseTensor``, without importing torch_sparse."""
    return type(value).__name__ == "SparseTensor" and hasattr(value, "storage")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists, dictionaries and sparse matrices."""
    if type(value) in _INERT:
        return []
    if isinstance(value, Tensor):
        return [value]
    if is_sparse_tensor(value):
        storage = value.storage
        own = (storage._row, storage._rowptr, storage._col, storage._value)
        return [t for t in own if t is not None]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    return []


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its tensors and sparse matrices changed.

    Those inside of lists, tuples and dictionaries too; a container in which all stay is itself.
    """
    if type(value) in _INERT:
        return value
    if isinstance(value, Tensor) or is_sparse_tensor(value):
        return change(value)
    if type(value) is dict:
        items: Any = {key: changed(item, change) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        items = type(value)(changed(item, change) for item in value)
        return items if any(i is not v for i, v in zip(items, value, strict=True)) else value
    return value


def copied(value: Any, shared: list[Tensor]) -> Any:
    """Return a value with copies of tensors that share memory with certain ones."""

    def copy(own: Any) -> Any:
        again = not set(map(memory_of, tensors_in(own))).isdisjoint(map(memory_of, shared))
        return own.clone() if again else own

    return changed(value, copy)


def _is_edge_index(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.dim() == 2
        and value.dtype in (torch.int32, torch.int64)
        and not value.is_inference()
    )


def _key(value: Any) -> Any:
    """What an argument is told apart by; tensors by identity, so that no key keeps them alive."""
    if type(value) in _INERT:
        return (type(value), value)
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    if is_sparse_tensor(value):
        return ("sparse", *value.sizes(), *map(id, tensors_in(value)))
    return (type(value), value)


def _modes() -> tuple[Any, ...]:
    """What a result depends on beside the arguments."""
    return is_inference_mode_enabled(), get_default_dtype(), _is_any_autocast_enabled()


def _given(values: list[Any]) -> list[Tensor]:
    """The tensors among arguments, and those that sparse matrices are made of."""
    tensors: list[Tensor] = []
    for value in values:
        if type(value) not in _INERT and (isinstance(value, Tensor) or is_sparse_tensor(value)):
            tensors += tensors_in(value)
    return tensors


def _without(tensors: list[Tensor], result: Any) -> Any:
    """The result of a call, with places for those of its tensors that it was given."""
    if type(result) is not tuple:
        return result
    places = {id(t): _Argument(place) for place, t in enumerate(tensors)}
    return tuple(places.get(id(r), r) for r in result)


class _Running(threading.local):
    """State of a thread.

    Attributes:
        on: a function runs whose inner calls need no memory.
        lent: what the layer that runs has borrowed; None outside of layers.
        layer: that layer.
    """

    on = False
    lent: list[Tensor] | None = None
    layer: object = None


_Before = tuple[list[Tensor] | None, object]


class Memo:
    """Results by the identity and version of tensor arguments and the value of the others.

    Holds at most ``settings.graph_cache`` results, each only while all tensors it was computed from
    are alive; and for as many edge_indices what was derived from them, while they are. Nothing is
    remembered of arguments that are or were trained: see :func:`~pyg_accel.cache.changes_unseen`.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._results: TensorCache[_Remembered] = TensorCache(
            lambda: settings.graph_cache, trusting=False
        )
        # What came out of functions of an edge_index, by that parent.
        self._families: TensorCache[list[Tensor]] = TensorCache(lambda: settings.graph_cache)
        self._lock = threading.RLock()
        self._running = _Running()
        self._glimpses = RecentlySeen(256)
        self.hits = 0  # calls whose result came from memory

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)``, from memory if it can be had there."""
        return self._recalled(function, args, kwargs)[0]

    def _recalled(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor] | None]:
        """The same, and what tensors of it came from memory; None if the function ran."""
        if self._running.on:  # what it calls needs no memory of its own
            return function(*args, **kwargs), None
        values = [*args, *kwargs.values()]
        tensors = _given(values)
        if any([type(t) is not Tensor for t in tensors]):
            return function(*args, **kwargs), None
        key, known = self._look_up(function, kwargs, values, tensors)
        if key is None:
            return self._equal_to_known(values, self.run(function, *args, **kwargs)), None
        if known is not None:
            self.hits += 1
            return known.of(tensors), known.tensors
        result = self._equal_to_known(values, self.run(function, *args, **kwargs))
        kept = _without(tensors, result)
        made = tensors_in(kept)
        if any(t.is_inference() or t.requires_grad for t in made):
            return result, None
        # An argument elsewhere, or what shares its memory, would keep itself alive.
        if set(map(memory_of, made)).isdisjoint(map(memory_of, tensors)):
            self._results.put(tensors, key, _Remembered(kept, made, Snapshot(made)))
        return result, None

    def remembers(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Whether a call would be answered from memory; nothing is called."""
        values = [*args, *kwargs.values()]
        tensors = _given(values)
        if self._running.on or any([type(t) is not Tensor for t in tensors]):
            return False
        return self._look_up(function, kwargs, values, tensors)[1] is not None

    def _look_up(
        self,
        function: Callable[..., Any],
        names: Iterable[str],
        values: list[Any],
        tensors: list[Tensor],
    ) -> tuple[tuple[Any, ...] | None, _Remembered | None]:
        """Where the result of a call is kept, None if it is not; and the result that is there."""
        if not tensors or any([changes_unseen(t) for t in tensors]):
            return None, None
        key = (function, *names, *_modes(), *map(_key, values))
        try:
            known = self._results.find(tensors, key)
        except TypeError:  # an argument that cannot be a key
            return None, None
        return key, known if known is not None and known.fits() else None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function; what it calls is not remembered either."""
        before, self._running.on = self._running.on, True
        try:
            return function(*args, **kwargs)
        finally:
            self._running.on = before

    @property
    def idle(self) -> bool:
        """Whether nothing is remembered: outside of layers, and inside of a function."""
        return self._running.lent is None or self._running.on

    @property
    def outside(self) -> bool:
        """Whether neither a layer runs nor a function whose result is remembered."""
        return self._running.lent is None and not self._running.on

    @property
    def lent(self) -> list[Tensor] | None:
        """What the layer that runs has borrowed; None outside of layers."""
        return self._running.lent

    @property
    def layer(self) -> Any:
        """The layer that runs."""
        return self._running.layer

    def begin(self, layer: object) -> _Before:
        """Let a layer borrow results until :meth:`end` is called with what this returns."""
        running = self._running
        before = running.lent, running.layer
        running.lent, running.layer = [], layer
        return before

    def end(self, before: _Before) -> list[Tensor]:
        """Return what the layer has borrowed; what it returns to another is borrowed still."""
        running = self._running
        lent = running.lent or []
        running.lent, running.layer = before
        if running.lent is not None:
            running.lent += lent
        return lent

    def is_new(self, function: Callable[..., Any], edge_index: Tensor) -> bool:
        """Whether the layer that runs has not called a function of this edge_index before.

        To remember what comes of a small batch costs more than it saves the next layers.
        """
        return self._glimpses.is_new((function, id(self._running.layer)), edge_index)

    def borrow(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As a call, for the layer that runs; what it has already comes as a copy."""
        result, made = self._recalled(function, args, kwargs)
        lent = self.lent
        if lent is None or self._running.on:
            return result
        if made is None:
            given = set(map(memory_of, tensors_in([*args, *kwargs.values()])))
            made = [t for t in tensors_in(result) if memory_of(t) not in given]
        if lent and any(t is other for t in made for other in lent):
            return copied(result, made)
        lent += made
        return result

    def _equal_to_known(self, values: list[Any], result: Any) -> Any:
        """Return a result with every edge_index replaced by an equal one of the same parent."""
        given = [t for t in tensors_in(values) if _is_edge_index(t)]
        if not given:
            return result
        if type(result) is tuple:
            return tuple(self._known(given, r) if _is_edge_index(r) else r for r in result)
        return self._known(given, result) if _is_edge_index(result) else result

    def _known(self, given: list[Tensor], found: Tensor) -> Tensor:
        parent = given[0]  # whose life it shares; that it equals what is returned is checked
        if any(found is t or found._base is t for t in given):
            return found  # it would keep itself alive
        if is_captured(found):
            return found  # to compare is to wait for the device
        with self._lock:
            family = self._families.get((parent,), (), list)
            for known in family:
                if known is found or torch.equal(known, found):
                    taken = any(known is t for t in self.lent or ())
                    return found if taken else known
            family.append(found)
            del family[: max(len(family) - settings.graph_cache, 0)]
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._results.clear()
        self._families.clear()
        self._glimpses.clear()

    def __len__(self) -> int:
        return len(self._results) + sum(map(len, self._families.values()))


MEMO = Memo()  # what patch() and the layers share
