"""References to edge lists that are read later, if at all."""

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["EdgeList"]


class EdgeList:
    """A reference to an edge list [2, E], which must not change before it is read.

    Attributes:
        strong: the list, where the graph keeps it alive.
    """

    __slots__ = ("_part", "_version", "_weak", "strong")

    def __init__(self, edge_index: Tensor) -> None:
        self.strong: Tensor | None = edge_index
        self._version = None if edge_index.is_inference() else edge_index._version
        self._weak: weakref.ref[Tensor] | None = None
        self._part: tuple[Any, ...] = ()

    def release(self) -> None:
        """Do not keep it alive."""
        edge_index = self.strong
        if edge_index is not None:
            self._weak, self.strong = weakref.ref(edge_index), None
            self._part = (
                weakref.ref(edge_index.untyped_storage()), edge_index.dtype,
                (edge_index.storage_offset(), edge_index.shape, edge_index.stride()),
            )  # fmt: skip

    def tensor(self) -> Tensor | None:
        """Return it; None if that tensor has been freed, though its memory may not be."""
        edge_index = self.strong if self._weak is None else self._weak()
        if edge_index is None or self._version in (None, edge_index._version):
            return edge_index
        raise RuntimeError("the edge list of a graph was changed in place before it was read")

    def restored(self) -> Tensor:
        """Return it, or another tensor of the same memory."""
        edge_index = self.tensor()
        if edge_index is not None:
            return edge_index
        owner, dtype, part = self._part
        storage = owner()
        if storage is None:
            raise RuntimeError("the edge list of a graph was freed before it was read")
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        restored: Tensor = empty.set_(storage, *part)
        return restored
