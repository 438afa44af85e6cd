"""The metadata of nodes in a recorded graph: properties of the tensors of the recorded call."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.runtime.cache import memory_of

__all__ = ["EFFECT", "FACTS", "WRITES", "TensorFacts"]

FACTS = "facts"  # key of the metadata of nodes: `TensorFacts`
EFFECT = "effect"  # key of the metadata of nodes that must not run twice
WRITES = "writes"  # key of the metadata of nodes: the storages that they write to


class TensorFacts(NamedTuple):
    """Properties of a tensor of a recorded call.

    Attributes:
        shape: its sizes in that call.
        dtype: its dtype.
        learns: whether it requires a gradient.
        memory: :func:`~pyg_accel.runtime.cache.memory_of` it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    memory: int

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorFacts":
        """Return the properties of a tensor."""
        with torch._C.DisableTorchFunction():
            return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_of(tensor))
