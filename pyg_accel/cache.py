"""What was computed from tensors, kept for as long as they live and stay as they are."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "Bounded",
    "RecentlySeen",
    "Snapshot",
    "TensorCache",
    "TensorRef",
    "changes_unseen",
    "holding",
    "memory_of",
    "owner_of",
    "saved_tensors_are_hooked",
    "version_of",
]  # fmt: skip

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_EXACT = frozenset((torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool))
_PLAIN, _STRIDED = (Tensor, Parameter), torch.strided


class Bounded(dict[K, T]):
    """A dictionary that is emptied when it is full, of what can be found again.

    Args:
        most: how many entries there may be.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: T) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


_holders: list[list[Any]] = []


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Collect every value that is lent or put away meanwhile, in any thread.

    A CUDA graph reads the memory of what was there when it was captured, and must keep it alive.
    """
    held: list[Any] = []
    _holders.append(held)
    try:
        yield held
    finally:
        _holders[:] = [other for other in _holders if other is not held]


def owner_of(tensor: Tensor) -> tuple[Tensor, Hashable]:
    """Return the tensor with which to keep what is made of one, and which part of it that is.

    A row of an edge_index is a new view in each call, of a tensor that stays.
    """
    base = tensor._base
    if base is None or type(base) is not Tensor:
        return tensor, None
    return base, _part_of(tensor)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


# Memory of tensors that were trained, as far as that was seen.
_trained: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def changes_unseen(tensor: Tensor) -> bool:
    """Return whether the version of a tensor may not tell that its numbers changed.

    So it is in inference mode, and for parameters: fused optimizers do not count what they write,
    nor does what writes through ``Tensor.data``. What shares memory with a tensor that was trained
    is trained again one day, so this holds from then on.
    """
    if tensor.is_inference():
        return True
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.layout is not _STRIDED:
        return tensor.requires_grad
    if tensor.requires_grad or type(tensor) is Parameter or tensor.grad is not None:
        _trained.add(tensor.untyped_storage())
        return True
    return tensor.untyped_storage() in _trained


def _any_changes_unseen(tensors: Sequence[Tensor]) -> bool:
    for tensor in tensors:
        if tensor.dtype not in _EXACT and changes_unseen(tensor):
            return True
        if tensor.is_inference():
            return True
    return False


def memory_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common; others may have a number of their own.

    Tensors of a class of their own, and sparse ones, are known by identity.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
        return id(tensor)
    number: int = tensor.untyped_storage()._cdata
    return number


def saved_tensors_are_hooked() -> bool:
    """Return whether autograd's saved tensors are packed: in a checkpoint, ``save_on_cpu``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class TensorRef:
    """A tensor as it is now, without keeping it alive.

    A weak reference to its storage and the part of it that the tensor is: of tensors with weak
    references ``torch.utils.swap_tensors`` changes none.

    Args:
        tensor: to remember.
        forget: is called when its storage dies.
    """

    __slots__ = ("_part", "_storage", "_version")

    def __init__(self, tensor: Tensor, forget: Callable[[object], None] | None = None) -> None:
        """Look at the tensor."""
        strided = tensor.layout is _STRIDED  # others have no storage
        self._storage = weakref.ref(tensor.untyped_storage() if strided else tensor, forget)
        self._part, self._version = _part_of(tensor), version_of(tensor)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether this is the same part of the same storage, not changed in place since."""
        if tensor.layout is not _STRIDED:
            return self._storage() is tensor and self._version == version_of(tensor)
        return (
            self._storage() is tensor.untyped_storage()
            and self._version == (-1 if tensor.is_inference() else tensor._version)
            and self._part == (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        )


def _part_of(tensor: Tensor) -> Hashable:
    if tensor.layout is not _STRIDED:
        return None
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class Snapshot:
    """Tensors as they are now, without keeping them alive.

    Args:
        tensors: to remember.
        forget: is called when the storage of one of them dies.
    """

    def __init__(
        self, tensors: Iterable[Tensor], forget: Callable[[object], None] | None = None
    ) -> None:
        """Look at the tensors."""
        self._seen = [TensorRef(t, forget) for t in tensors]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, not changed in place since."""
        if len(tensors) != len(self._seen):
            return False
        return all(map(TensorRef.fits, self._seen, tensors))


class RecentlySeen:
    """Which tensors were seen before, by whom; those of long ago are forgotten.

    Args:
        most: how many are known at a time.
    """

    def __init__(self, most: int) -> None:
        """Start with none."""
        self._most = most
        self._seen: OrderedDict[tuple[Hashable, int], TensorRef] = OrderedDict()
        self._lock = threading.Lock()

    def is_new(self, by: Hashable, tensor: Tensor) -> bool:
        """Return whether a tensor is new here, or was changed since it was last seen."""
        place = (by, id(tensor))
        with self._lock:
            known = self._seen.get(place)
            if known is not None:
                self._seen.move_to_end(place)
                if known.fits(tensor):
                    return False
            self._seen[place] = TensorRef(tensor)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return True

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._seen.clear()


class TensorCache(Generic[T]):
    """Values by the identity and version of tensors, their owners, and a key.

    An owner that was changed in place is another one. A value goes with the storage of the first of
    its owners; it must not refer to the memory of any of them, or none would ever go.

    Args:
        most: returns how many values there may be (the least recently used goes); None: any number.
        trusting: keep values of tensors too that :func:`changes_unseen`.
    """

    # Owners may die inside any of the methods, those of other caches too, whichever thread collects
    # garbage there: with a lock for each cache, two threads could wait for each other.
    _lock = threading.RLock()

    def __init__(self, most: Callable[[], int] | None = None, *, trusting: bool = True) -> None:
        """Start empty."""
        self._most, self._trusting = most, trusting
        self._entries: OrderedDict[tuple[Hashable, ...], tuple[Snapshot, T]] = OrderedDict()

    def get(self, owners: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """Return the value that was kept; make it if there is none."""
        found = self.find(owners, key)
        if found is None:
            found = make()  # without the lock: two threads may both make it
            self.put(owners, key, found)
        return found

    def find(self, owners: Sequence[Tensor], key: Hashable) -> T | None:
        """Return the value that was kept, or None."""
        place = (*map(id, owners), key)
        with self._lock:
            entry = self._entries.get(place)
            if entry is None:
                return None
            owners_then, value = entry
            trusted = self._trusting or not _any_changes_unseen(owners)
            if not (trusted and owners_then.fits(owners)):
                del self._entries[place]
                return None
            self._entries.move_to_end(place)
            for held in _holders:
                held.append(value)
            return value

    def put(self, owners: Sequence[Tensor], key: Hashable, value: T) -> None:
        """Keep a value in place of the one before."""
        if not self._trusting and _any_changes_unseen(owners):
            return
        place = (*map(id, owners), key)
        for held in _holders:
            held.append(value)

        def forget(_: object) -> None:
            with self._lock:
                self._entries.pop(place, None)

        with self._lock:
            self._entries[place] = (Snapshot(owners, forget), value)
            self._entries.move_to_end(place)
            while self._most is not None and len(self._entries) > self._most():
                self._entries.popitem(last=False)

    def values(self) -> list[T]:
        """Return what is kept."""
        with self._lock:
            return [value for _, value in self._entries.values()]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
