"""Random numbers of a rank: those of dropout differ between ranks, all others stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pyg_accel.distributed.wire import Wire

__all__ = ["RankRandom"]


class RankRandom:
    """A stream of random numbers of this rank, which a model draws from while it is trained.

    It begins at the seed that the first rank was given last, plus the rank. Random numbers drawn
    outside of the model are as before: equal on ranks that were seeded equally.
    """

    def __init__(self, wire: Wire) -> None:
        """Agree on the seed."""
        seed = torch.tensor([torch.initial_seed() % 2**62], device=wire.device)
        self._seed = int(wire.copy_of_first(seed)) + wire.rank + 1
        self._device = wire.device
        self._states: tuple[Tensor, Tensor | None] | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from the rank's stream inside a ``with`` block."""
        on_gpu = self._device.type == "cuda"
        before = torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_gpu else None
        if self._states is None:
            torch.manual_seed(self._seed)
        else:
            self._set(self._states)
        try:
            yield
        finally:
            after = torch.cuda.get_rng_state(self._device) if on_gpu else None
            self._states = torch.get_rng_state(), after
            self._set(before)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _set(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)
