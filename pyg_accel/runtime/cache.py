"""Identity of tensors: recognises tensors that are the same and unchanged."""

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
    """A dictionary that is cleared when it is full: a cache of values that can be computed again.

    Args:
        most: the largest number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: T) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor; -1 in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


# Storages of tensors that were seen to be trained.
_trained: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def changes_unseen(tensor: Tensor) -> bool:
    """Return whether a tensor may change without a new version.

    Tensors in inference mode have no version, and fused optimizers and writes through
    ``Tensor.data`` do not update the version of parameters. Tensors that share memory with a
    trained one are included, as it may be trained again.
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
    """Return a number that is the same for tensors that share memory.

    For tensor subclasses and sparse tensors, it is the ``id()``.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside of vmap and the like
        tensor = torch._C._functorch.get_unwrapped(tensor)
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
    """Recognises a tensor in its current version, without keeping it alive.

    It refers weakly to the storage, as ``torch.utils.swap_tensors`` refuses tensors with weak
    references.

    Args:
        tensor: the tensor.
    """

    __slots__ = ("_part", "_storage", "_version")

    def __init__(self, tensor: Tensor) -> None:
        """Take the identity and version of the tensor."""
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
    """Recognises tensors in their current versions, without keeping them alive.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Take the identities and versions of the tensors."""
        self._refs = [*map(TensorRef, tensors)]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, not changed in place since."""
        if len(tensors) != len(self._refs):
            return False
        return all(map(TensorRef.fits, self._refs, tensors))
