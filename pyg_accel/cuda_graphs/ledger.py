"""What captures cost and what their replays save: whether another one may be made.

A capture takes as long as some ten calls, so it has to be replayed to be worth making. Both times
are measured when it is compared with eager calls, and the ledger adds them up. The first calls are
free, as nothing can be known of them. After them :func:`~pyg_accel.graphed` promises to take no
more than a twentieth longer than eager calls, whatever the sizes: so another capture is made when a
twentieth of the time of all calls, and what replays have saved, make up for it.

Looking whether a call can be replayed takes time, too. Where the last one of its like could not,
another is looked at when a twentieth of the time of the calls since pays for it.

A capture that had to make room before it paid for itself is a loss. After as many losses as
captures are kept, no capture makes room for another any more: the sizes that come are too many.
"""

from time import perf_counter as clock

__all__ = ["Ledger", "clock"]

_FREE_CALLS, _SHARE = 30, 0.05  # the promise


class Ledger:
    """The account of the calls of one state of a model's modules.

    Attributes:
        captures: how many were made.
        replays: of all of them.
        losses: captures that made room before they had paid for themselves.
    """

    def __init__(self) -> None:
        self.captures = self.replays = self.losses = 0
        self._calls, self._balance = 0, 0.0
        self._prices: dict[bool, float] = {}
        self._look = 0.0

    def called(self, eager: float, saved: float, *, replayed: bool) -> None:
        """Count a call that takes so many seconds eagerly, of which a replay saved some."""
        self.replays += replayed
        self._calls += 1
        if self._calls > _FREE_CALLS:
            self._balance += _SHARE * eager + saved

    def spent(self, seconds: float) -> None:
        """Count what it took to make a capture, or to compare one with an eager call."""
        if self._calls >= _FREE_CALLS:
            self._balance -= seconds

    def worked(self, seconds: float, *, made: bool) -> None:
        """Count a capture that was made or compared in so many seconds; the first compiles too."""
        self.captures += made
        self._prices[made] = min(self._prices.get(made, seconds), seconds)

    def looked(self, seconds: float) -> None:
        """Count a call that was looked at in vain."""
        self._look = min(self._look or seconds, seconds)
        self.spent(seconds)

    @property
    def looks(self) -> bool:
        """Whether another call like that may be looked at."""
        return self._calls < _FREE_CALLS or self._balance >= self._look

    @property
    def affords(self) -> bool:
        """Whether another capture may be made."""
        return self._calls < _FREE_CALLS or self._balance >= sum(self._prices.values())

    @property
    def too_often(self) -> str:
        """Why no capture makes room for another."""
        return f"recaptured too often: {self.captures} captures, {self.replays} replays"
