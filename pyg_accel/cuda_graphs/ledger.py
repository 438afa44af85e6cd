"""Accounts for what captures cost and what their replays save: may another one be made?

A capture takes as long as about ten calls, so it only pays if it is replayed. Both times are
measured when it is compared with eager calls, and the ledger adds them up. The first calls are not
counted. After them :func:`~pyg_accel.graphed` promises to take at most 5% longer than eager calls,
whatever the sizes: another capture is made when 5% of the time of all calls, and what replays have
saved, pay for it.

Checking whether a call can be replayed takes time, too. If a similar call could not, another one is
checked when 5% of the time of the calls since then pays for it.

A capture that is dropped before it has paid for itself is a loss. After as many losses as captures
are kept, no capture replaces another any more: there are too many sizes.
"""

from time import perf_counter as clock

__all__ = ["Ledger", "clock"]

_FREE_CALLS, _SHARE = 30, 0.05  # calls that are not counted; the promise for the others


class Ledger:
    """The account of the calls of one state of a model's modules.

    Attributes:
        captures: how many were made.
        replays: of all of them.
        losses: captures that were dropped before they had paid for themselves.
    """

    def __init__(self) -> None:
        self.captures = self.replays = self.losses = 0
        self._calls, self._balance = 0, 0.0
        self._prices: dict[bool, float] = {}
        self._look = 0.0

    def called(self, eager: float, saved: float, *, replayed: bool) -> None:
        """Count a call, with the seconds that it takes eagerly, and that a replay saved."""
        self.replays += replayed
        self._calls += 1
        if self._calls > _FREE_CALLS:
            self._balance += _SHARE * eager + saved

    def spent(self, seconds: float) -> None:
        """Count the seconds of a capture, or of comparing one with an eager call."""
        if self._calls >= _FREE_CALLS:
            self._balance -= seconds

    def worked(self, seconds: float, *, made: bool) -> None:
        """Update the price of making or comparing a capture: the least, as the first compiles."""
        self.captures += made
        self._prices[made] = min(self._prices.get(made, seconds), seconds)

    def looked(self, seconds: float) -> None:
        """Count a call that was checked and could not be replayed."""
        self._look = min(self._look or seconds, seconds)
        self.spent(seconds)

    @property
    def looks(self) -> bool:
        """Whether another call like that may be checked."""
        return self._calls < _FREE_CALLS or self._balance >= self._look

    @property
    def affords(self) -> bool:
        """Whether another capture may be made."""
        return self._calls < _FREE_CALLS or self._balance >= sum(self._prices.values())

    @property
    def too_often(self) -> str:
        """Why no capture replaces another any more."""
        return f"recaptured too often: {self.captures} captures, {self.replays} replays"
