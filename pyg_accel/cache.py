"""Whether a tensor is the same as before: its memory, its part of it, and its version."""

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "EXACT", "Bounded", "Snapshot", "TensorRef", "arrays_of", "changes_unseen", "memory_of",
    "saved_tensors_are_hooked", "version_of",
]  # fmt: skip

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

EXACT = frozenset((torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool))
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


def memory_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common; others may have a number of their own.

    Tensors of a class of their own, and sparse ones, are known by identity.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED:
        return id(tensor)
    number: int = tensor.untyped_storage()._cdata
    return number


def arrays_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor, or the indices of a sparse one and, last, its values."""
    if tensor.layout is _STRIDED:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def saved_tensors_are_hooked() -> bool:
    """Return whether autograd's saved tensors are packed: in a checkpoint, ``save_on_cpu``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class TensorRef:
    """A tensor as it is now, without keeping it alive.

    A weak reference to its storage and the part of it that the tensor is: of tensors with weak
    references ``torch.utils.swap_tensors`` changes none.

    Args:
        tensor: to remember.
    """

    __slots__ = ("_part", "_storage", "_version")

    def __init__(self, tensor: Tensor) -> None:
        """Look at the tensor."""
        strided = tensor.layout is _STRIDED  # others have no storage
        self._storage = weakref.ref(tensor.untyped_storage() if strided else tensor)
        self._part: Hashable = None
        if strided:
            self._part = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        self._version = version_of(tensor)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether this is the same part of the same storage, not changed in place since."""
        if tensor.layout is not _STRIDED:
            return self._storage() is tensor and self._version == version_of(tensor)
        return (
            self._storage() is tensor.untyped_storage()
            and self._version == (-1 if tensor.is_inference() else tensor._version)
            and self._part == (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        )


class Snapshot:
    """Tensors as they are now, without keeping them alive.

    Args:
        tensors: to remember.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Look at the tensors."""
        self._seen = [*map(TensorRef, tensors)]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, not changed in place since."""
        if len(tensors) != len(self._seen):
            return False
        return all(map(TensorRef.fits, self._seen, tensors))
