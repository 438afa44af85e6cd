"""Random numbers drawn twice: a message that turns out to be no formula runs again as PyG's own."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RandomState", "random_state", "restore"]


class RandomState(NamedTuple):
    """Of the generators of the CPU and of a GPU.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        cuda: as ``torch.cuda.get_rng_state`` returns it; None where no GPU takes part.
        device: the GPU.
    """

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device


def random_state(device: torch.device) -> RandomState:
    """Return the state that calls on a device start from, without waiting for the device."""
    # While a CUDA graph is captured nobody may ask; what is no formula was found out before.
    asks = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return RandomState(
        torch.get_rng_state(), torch.cuda.get_rng_state(device) if asks else None, device
    )


def restore(state: RandomState) -> None:
    """Let the next numbers be those that were drawn after ``state`` was taken."""
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, state.device)
