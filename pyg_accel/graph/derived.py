"""A cache of values derived from tensors and graphs, while these live and do not change.

An entry belongs to its owners: tensors, graphs, or other objects. It is dropped when one of them is
freed, and not returned after one was changed in place. Tensors are identified by a weak reference
to their storage, and offset, shape and stride in it. So equal views are the same owner, and
``torch.utils.swap_tensors``, which refuses tensors with weak references, works. A value must not
refer to the memory of all owners, or neither would ever be freed.

There are no locks: owners are freed in any thread, whenever garbage is collected, and a process may
fork while another thread holds a lock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pyg_accel.runtime.cache import EXACT, arrays_of, changes_unseen
from pyg_accel.settings import settings

__all__ = [
    "GraphHistory", "derived", "find", "forget", "hold", "holding", "keep", "values",
]  # fmt: skip

T = TypeVar("T")
_Place = tuple[Any, ...]
_STRIDED = torch.strided
_Where = tuple["ref[Any]", _Place, list[int]]  # the first owner, place in its record, versions
_Record = dict[_Place, tuple[list[int], Any]]  # versions of the owners, and the value

_records: "dict[ref[Any], _Record]" = {}  # by the first owner
_recent: "OrderedDict[ref[Any], ref[Any]]" = OrderedDict()  # owners that graph_cache limits
_collectors: list[list[Any]] = []  # of the blocks of holding()


def derived(
    owners: Sequence[Any], key: Hashable, make: Callable[[], T], *, lasting: bool = False
) -> T:
    """Return the stored value, or compute and store it.

    Nothing is stored for a tensor that :func:`~pyg_accel.runtime.cache.changes_unseen`. At most
    ``settings.graph_cache`` first owners that are tensors have entries; the least recently used
    lose them.

    Args:
        owners: objects from which the value is computed; the first stores it. Sparse tensors cannot
            own entries; their :func:`~pyg_accel.runtime.cache.arrays_of` can.
        key: distinguishes values of the same owners.
        make: computes the value.
        lasting: store it for any owners, as long as they live. It applies to all entries of an
            owner with a lasting entry.
    """
    where = _where(owners, key, lasting)
    value: T | None = _look_up(where)
    if value is None:
        value = make()
        _keep(where, owners, value, lasting)
    return value


def find(owners: Sequence[Any], key: Hashable, *, lasting: bool = False) -> Any:
    """Return the value that :func:`derived` or :func:`keep` has stored, or None."""
    return _look_up(_where(owners, key, lasting))


def _look_up(where: "_Where | None") -> Any:
    """Return the value stored at a place, or None."""
    if where is None:
        return None
    first, place, versions = where
    record = _records.get(first)
    entry = None if record is None else record.get(place)
    if entry is None or entry[0] != versions:
        return None
    owner = _recent.pop(first, None)
    if owner is not None:
        _recent[owner] = owner  # the most recent one
    if _collectors:
        hold(entry[1])
    return entry[1]


def keep(owners: Sequence[Any], key: Hashable, value: Any, *, lasting: bool = False) -> bool:
    """Store a value, as :func:`derived` does; return whether it was stored."""
    return _keep(_where(owners, key, lasting), owners, value, lasting)


def _keep(where: "_Where | None", owners: Sequence[Any], value: Any, lasting: bool) -> bool:
    """Store a value at a place; return whether it was stored."""
    hold(value)
    if where is None:
        return False
    first, place, versions = where
    if len(owners) > 1:
        drop = partial(_drop_entries, first)
        place = (place[0], *(ref(p(), drop) if type(p) is ref else p for p in place[1:]))
    record = _records.get(first)
    if record is None:
        owner = ref(first(), _drop)
        record = _records[owner] = {}
        if not lasting and isinstance(owners[0], Tensor):
            _recent[owner] = owner
    elif lasting:
        _recent.pop(first, None)
    record[place] = versions, value
    while len(_recent) > settings.graph_cache:
        with suppress(KeyError):  # another thread may have been faster
            _drop(_recent.popitem(last=False)[0])
    return True


class GraphHistory:
    """A set of tensors with their versions, as long as they live."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        """Start empty."""
        # For each storage, the versions of parts of it.
        self._parts: dict[ref[Any], dict[_Place, int]] = {}

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor is new to this set, and nothing was derived from it."""
        if tensor.layout is not _STRIDED:
            tensor = arrays_of(tensor)[0]
        owner, version = tensor.untyped_storage(), -1 if tensor.is_inference() else tensor._version
        weak, part = ref(owner), (tensor.storage_offset(), tensor.shape)
        parts = self._parts.get(weak)
        if parts is None:  # the callback is in C, as this runs in calls of a few microseconds
            parts = self._parts[ref(owner, self._parts.__delitem__)] = {}
        if parts.get(part) == version:
            return False
        parts[part] = version
        record = _records.get(weak)
        # Not items(): new pairs may trigger garbage collection, which removes entries of dead
        # owners.
        return record is None or not any(
            place[1:3] == part and (entry := record.get(place)) and entry[0][0] == version
            for place in list(record)
        )


def forget() -> None:
    """Drop all entries that are not lasting."""
    while _recent:
        with suppress(KeyError):
            _drop(_recent.popitem()[0])


def values() -> list[Any]:
    """Return all stored values."""
    return [value for record in list(_records.values()) for _, value in list(record.values())]


def hold(value: Any) -> None:
    """Let the blocks of :func:`holding` that run now collect a value."""
    for collected in _collectors:
        collected.append(value)


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Collect every value that is returned or stored in the block, in any thread.

    A CUDA graph reads the memory of such values, and must keep it alive. Edge lists are collected
    too: a graph drops its own when a later call builds it.
    """
    collected: list[Any] = []
    _collectors.append(collected)
    try:
        yield collected
    finally:
        _collectors[:] = [other for other in _collectors if other is not collected]


def _where(owners: Sequence[Any], key: Hashable, lasting: bool) -> "_Where | None":
    """Return the first owner, the key of an entry in its record, and the versions of all owners."""
    first: ref[Any] | None = None
    place: list[Any] = [key]
    versions = []
    for owner in owners:
        if not isinstance(owner, Tensor):
            weak: ref[Any] = ref(owner)
        else:
            if owner.layout is not _STRIDED:
                return None
            inference = owner.is_inference()
            if not lasting and (inference or owner.dtype not in EXACT) and changes_unseen(owner):
                return None
            versions.append(-1 if inference else owner._version)
            weak = ref(owner.untyped_storage())
            place += (owner.storage_offset(), owner.shape, owner.stride(), owner.dtype)
        if first is None:
            first = weak
        else:
            place.append(weak)
    assert first is not None
    return first, tuple(place), versions


# Stores are arguments: at exit, owners are freed after the globals of this module.
def _drop(first: "ref[Any]", recent: Any = _recent, records: Any = _records) -> None:
    """Drop all entries of an owner, which may have been freed."""
    recent.pop(first, None)
    records.pop(first, None)


def _drop_entries(first: "ref[Any]", dead: "ref[Any]", records: Any = _records) -> None:
    """Drop the entries of an owner that also belong to a freed one."""
    record = records.get(first, {})
    for place in list(record):
        if any(part is dead for part in place):
            record.pop(place, None)
