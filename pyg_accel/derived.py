"""What is derived of tensors and graphs, stored for as long as they live and stay as they are.

There is one store. An entry belongs to its owners: tensors, graphs, or other objects. It is
dropped when one of them dies, and not returned after one was changed in place. Of a tensor the
store refers weakly to its storage, of which the owner is a part, so views of the same part are the
same owner, and ``torch.utils.swap_tensors``, which refuses tensors with weak references, works.
A value must not refer to the memory of all owners, or neither would ever be freed.

There are no locks: owners die in any thread, whenever garbage is collected, and a process may fork
while another thread holds a lock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pyg_accel.cache import EXACT, arrays_of, changes_unseen
from pyg_accel.settings import settings

__all__ = ["Seen", "derived", "find", "forget", "holding", "keep", "values"]

T = TypeVar("T")
_Place = tuple[Any, ...]
_STRIDED = torch.strided
_Record = dict[_Place, tuple[list[int], Any]]  # versions of the owners, and the value

_records: "dict[ref[Any], _Record]" = {}  # by the first owner
_recent: "OrderedDict[ref[Any], ref[Any]]" = OrderedDict()  # those that graph_cache limits
_holders: list[list[Any]] = []


def derived(
    owners: Sequence[Any], key: Hashable, make: Callable[[], T], *, lasting: bool = False
) -> T:
    """Return what was derived of the owners before; compute and store it otherwise.

    Nothing is stored of a tensor that :func:`~pyg_accel.cache.changes_unseen`. Of first owners that
    are tensors at most ``settings.graph_cache`` have entries: the least recently used lose theirs.

    Args:
        owners: what it is computed from. The entry is stored with the first. Sparse tensors own
            nothing; their :func:`~pyg_accel.cache.arrays_of` do.
        key: what it is.
        make: computes it.
        lasting: store it whatever the owners are, for as long as they live. So are all entries of
            an owner that has such an entry.
    """
    found: T | None = find(owners, key, lasting=lasting)
    if found is None:
        found = make()
        keep(owners, key, found, lasting=lasting)
    return found


def find(owners: Sequence[Any], key: Hashable, *, lasting: bool = False) -> Any:
    """Return what :func:`derived` or :func:`keep` has stored; None if there is nothing."""
    where = _where(owners, key, lasting)
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
    for held in _holders:
        held.append(entry[1])
    return entry[1]


def keep(owners: Sequence[Any], key: Hashable, value: Any, *, lasting: bool = False) -> bool:
    """Store a value, as :func:`derived` does; return whether it was stored."""
    for held in _holders:
        held.append(value)
    where = _where(owners, key, lasting)
    if where is None:
        return False
    first, place, versions = where
    if len(owners) > 1:
        drop = partial(_drop_entries, first)
        place = (key, *(ref(p(), drop) if type(p) is ref else p for p in place[1:]))
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


class Seen:
    """Tensors that were seen as they are, for as long as they live."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        """Begin with none."""
        # Of memory: the versions of its parts.
        self._parts: dict[ref[Any], dict[_Place, int]] = {}

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor is seen for the first time, and nothing was derived of it."""
        if tensor.layout is not _STRIDED:
            tensor = arrays_of(tensor)[0]
        owner, version = tensor.untyped_storage(), -1 if tensor.is_inference() else tensor._version
        weak, part = ref(owner), (tensor.storage_offset(), tensor.shape)
        parts = self._parts.get(weak)
        if parts is None:  # a callback in C: this is asked in calls that take microseconds
            parts = self._parts[ref(owner, self._parts.__delitem__)] = {}
        if parts.get(part) == version:
            return False
        parts[part] = version
        record = _records.get(weak, {})
        # Not its items: pairs are new objects, so garbage may be collected while they are made, and
        # owners that die then take their entries out.
        return not any(
            place[1:3] == part and (entry := record.get(place)) and entry[0][0] == version
            for place in list(record)
        )


def forget() -> None:
    """Drop what is not stored for as long as its owners live."""
    while _recent:
        with suppress(KeyError):
            _drop(_recent.popitem()[0])


def values() -> list[Any]:
    """Return all that is stored."""
    return [value for record in list(_records.values()) for _, value in list(record.values())]


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Collect every value that is returned or stored meanwhile, in any thread.

    A CUDA graph reads the memory of what was there when it was captured, and must keep it alive.
    """
    held: list[Any] = []
    _holders.append(held)
    try:
        yield held
    finally:
        _holders[:] = [other for other in _holders if other is not held]


def _where(
    owners: Sequence[Any], key: Hashable, lasting: bool
) -> "tuple[ref[Any], _Place, list[int]] | None":
    """The first owner, the place of an entry in its record, and the versions of all owners."""
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


def _drop(first: "ref[Any]") -> None:
    """Drop all entries of an owner, which may be dead."""
    _recent.pop(first, None)
    _records.pop(first, None)


def _drop_entries(first: "ref[Any]", dead: "ref[Any]") -> None:
    """Drop the entries of an owner that another owner, which is dead, had too."""
    record = _records.get(first, {})
    for place in list(record):
        if any(part is dead for part in place):
            record.pop(place, None)
