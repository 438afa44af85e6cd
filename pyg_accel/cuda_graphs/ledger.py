"""Balances the cost of captures against the time that replays save.

A capture takes as long as about ten calls, so it only pays if it is replayed. Both times are
measured when it is compared with eager calls, and the ledger adds them up. The first calls are not
counted. After them :func:`~pyg_accel.graphed` promises to take at most 5% longer than eager calls,
for any sizes: another capture is made when 5% of the time of all calls, plus the time that replays
saved, pays for it.

Checking whether a call can be replayed takes time, too. After a call that could not be replayed,
another similar one is checked when 5% of the time of the calls since then pays for it.

A capture that is dropped before it has paid for itself is a loss. After as many losses as stored
captures, no capture replaces another: there are too many sizes.
"""

from time import perf_counter as clock

__all__ = ["Ledger", "clock"]

_FREE_CALLS, _SHARE = 30, 0.05  # calls that are not counted; the promise for the others


class Ledger:
    """The account of the calls of one state of a model's modules.

    Attributes:
        captures: number of captures.
        replays: number of replays.
        losses: number of captures that were dropped before they paid for themselves.
    """

    def __init__(self) -> None:
        self.captures = self.replays = self.losses = 0
        self._calls, self._balance = 0, 0.0
        self._prices: dict[bool, float] = {}
        self._look = 0.0

    def called(self, eager: float, saved: float, *, replayed: bool) -> None:
        """Count a call: seconds of an eager call, and seconds that a replay saved."""
        self.replays += replayed
        self._calls += 1
        if self._calls > _FREE_CALLS:
            self._balance += _SHARE * eager + saved

    def spent(self, seconds: float) -> None:
        """Count the seconds of a capture, or of comparing one with an eager call."""
        if self._calls >= _FREE_CALLS:
            self._balance -= seconds

    def worked(self, seconds: float, *, captured: bool) -> None:
        """Update the price of making or comparing a capture: the least, as the first compiles."""
        self.captures += captured
        self._prices[captured] = min(self._prices.get(captured, seconds), seconds)

    def looked(self, seconds: float) -> None:
        """Count a call that was checked and could not be replayed."""
        self._look = min(self._look or seconds, seconds)
        self.spent(seconds)

    @property
    def looks(self) -> bool:
        """Whether another similar call may be checked."""
        return self._calls < _FREE_CALLS or self._balance >= self._look

    @property
    def affords(self) -> bool:
        """Whether another capture may be made."""
        return self._calls < _FREE_CALLS or self._balance >= sum(self._prices.values())

    @property
    def too_often(self) -> str:
        """Why no capture replaces another any more."""
        return f"recaptured too often: {self.captures} captures, {self.replays} replays"
