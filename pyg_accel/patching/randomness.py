"""What must not happen twice: a message that turns out to be no formula runs again as PyG's own."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.kept import version_of

__all__ = ["RandomState", "random_state", "restore"]


class RandomState(NamedTuple):
    """Of the generators of the CPU and of a GPU, and of a module.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        cuda: as ``torch.cuda.get_rng_state`` returns it; None where no GPU takes part.
        device: the GPU.
        buffers: of the module, with a copy and the version of each.
    """

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device
    buffers: tuple[tuple[Tensor, Tensor, int], ...] = ()


def random_state(device: torch.device, module: torch.nn.Module | None = None) -> RandomState:
    """Return the state that calls on a device start from, without waiting for the device.

    Args:
        device: of the generators.
        module: its buffers count too: a BatchNorm in a message changes them.
    """
    buffers = () if module is None else module.buffers()
    # While a CUDA graph is captured nobody may ask; what is no formula was found out before.
    asks = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return RandomState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if asks else None,
        device,
        tuple((b, b.detach().clone(), version_of(b)) for b in buffers),
    )


def restore(state: RandomState) -> None:
    """Let the next numbers be those that were drawn after ``state`` was taken; buffers likewise."""
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, state.device)
    for buffer, copy, version in state.buffers:
        if version_of(buffer) != version:
            with torch.no_grad():
                buffer.copy_(copy)
