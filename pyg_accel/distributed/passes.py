"""Whether ranks are about the same: all in a forward pass, or all in a backward pass.

A rank whose loss does not depend on the model computes no gradients. It would call the model again
while the others wait for it, and their collectives would meet its own. So each backward pass, and
each call of the model where one is due, is counted in the store of the process group under its
number: 50 microseconds, and no rank waits for another.
"""

import secrets

import torch.distributed as dist

from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import RanksDiverged

__all__ = ["Passes"]

_FORWARD = 1 << 32  # counted beside the backward passes, which are fewer than that
_OLD = 64  # numbers that are kept


class Passes:
    """The passes of one distributed model, in the order in which this rank does them."""

    def __init__(self, wire: Wire) -> None:
        """Agree on a name; every rank must come."""
        self._wire = wire
        self._store = dist.PrefixStore(
            f"pyg_accel/{wire.texts(secrets.token_hex(8))[0]}",
            dist.distributed_c10d._get_default_store(),
        )
        self._number = 0
        self._due = False

    def forward_begins(self) -> None:
        """Take a note that the model is called.

        Raises:
            RanksDiverged: if another rank computes gradients of the call before.
        """
        if self._due:
            self._due = False
            if self._add(_FORWARD) % _FORWARD:
                raise RanksDiverged(
                    f"rank {self._wire.rank} calls the model again, and another rank computes "
                    "gradients of the call before: the loss of this rank does not depend on what "
                    "the model returned, or its backward() was left out"
                )

    def forward_ends(self, *, learns: bool) -> None:
        """Take a note that the model has returned, and whether that has gradients."""
        self._due = self._due or learns

    def backward_begins(self) -> None:
        """Take a note that gradients are computed.

        Raises:
            RanksDiverged: if another rank has called the model again.
        """
        self._due = False
        if self._add(1) >= _FORWARD:
            raise RanksDiverged(
                f"rank {self._wire.rank} computes gradients, and another rank has called the model "
                "again: the loss of that rank does not depend on what the model returned, or its "
                "backward() was left out"
            )

    def _add(self, amount: int) -> int:
        self._number += 1
        if self._wire.rank == 0 and self._number > _OLD:
            self._store.delete_key(str(self._number - _OLD))
        return int(self._store.add(str(self._number), amount))
