"""What is known of the layer call in progress, per thread."""

import threading
from collections.abc import Hashable

__all__ = ["LOOKS_UP", "NOT", "SMALL", "layer_call"]

NOT, LOOKS_UP, SMALL = 0, 1, 2  # how small a call is known to be: see _LayerCall.small


_Before = tuple[str, tuple[Hashable, ...], bool, bool, int]


class _LayerCall(threading.local):
    """State of the innermost layer call of a thread.

    Attributes:
        small: ``SMALL``, the call is known to be: wrappers inside it run their originals;
            ``LOOKS_UP``, all but those that remember; ``NOT``, it is not.
        again: so was the layer's last call, on the same graph.
        reason: why a part of it was too small; empty if no part was.
        new_to: the parts to which a graph was new, and for that too small.
        others: another part was not, or the reason does not hold for every smaller graph.
        remembers: it asked for what was derived from its edge_index before.
        hits: how often any layer had found that when it began.
    """

    small = NOT
    again = False
    reason = ""
    new_to: tuple[Hashable, ...] = ()
    others = False
    remembers = False
    hits = 0

    def begin(self, hits: int) -> _Before:
        """Begin a nested call and return the state of the outer one for :meth:`end`."""
        before = self.reason, self.new_to, self.others, self.remembers, self.hits
        self.reason, self.new_to, self.others, self.remembers = "", (), False, False
        self.hits = hits
        return before

    def end(self, before: _Before) -> None:
        """Return to the outer call, of which the ended one was a part."""
        reason, new_to, others, remembers, self.hits = before
        self.reason = self.reason or reason
        self.new_to = new_to + self.new_to
        self.others |= others
        self.remembers |= remembers


layer_call = _LayerCall()
