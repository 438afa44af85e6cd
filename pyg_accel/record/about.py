"""The metadata of a recorded graph's nodes: facts of the tensors of the recorded call."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.cache import memory_of

__all__ = ["ABOUT", "WRITES", "About"]

ABOUT = "about"  # key of the metadata of nodes: an `About`
WRITES = "writes"  # key of the metadata of nodes: the memory that they change in place


class About(NamedTuple):
    """Facts of a tensor of a recorded call.

    Attributes:
        shape: its sizes in that call.
        dtype: its dtype.
        learns: it requires a gradient.
        memory: what tensors that share memory have in common.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    memory: int

    @classmethod
    def of(cls, tensor: Tensor) -> "About":
        """Look at a tensor."""
        with torch._C.DisableTorchFunction():
            return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, memory_of(tensor))
