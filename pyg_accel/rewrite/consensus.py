"""Decisions of several processes: all of them run the same tree, or none does."""

from collections.abc import Callable, Hashable

from pyg_accel.patching.sampling import in_force
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.halos import Halos
from pyg_accel.rewrite.ir import leaves_of
from pyg_accel.rewrite.select import Decision, Options, make_decision
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["SharedDecisions", "spread_reasons"]

Lifted = Callable[[Call], tuple[Algebra, dict[str, int]]]


class SharedDecisions:
    """The decisions of one layer for calls whose edges read rows of other processes."""

    def __init__(self) -> None:
        """Start with none."""
        self._known: dict[Hashable, Decision | str] = {}

    def __call__(
        self,
        call: Call,
        kind: Hashable,
        options: Options,
        lifted: Lifted,
        decisions: list[Decision],
    ) -> Decision:
        """Return what all processes do with a call; they ask each other once for each kind.

        Args:
            call: of the layer.
            kind: what of its arguments a rule may look at.
            options: of ``optimize()``.
            lifted: returns what a call computes, and how wide it is.
            decisions: is added to.

        Raises:
            NotLifted: on all of them, if one has to call the layer itself.
        """
        halos = call.halos
        assert halos is not None
        place = halos, halos.stays(call.x), kind
        if place not in self._known:
            found = self._known[place] = _decided(call, halos, options, lifted)
            if isinstance(found, Decision):
                decisions.append(found)
        known = self._known[place]
        if isinstance(known, str):
            raise NotLifted(known)
        return known


def _decided(call: Call, halos: Halos, options: Options, lifted: Lifted) -> Decision | str:
    if why := halos.agree(_unfit(call, halos, lifted)):
        return why
    algebra, widths = lifted(call)
    sizes = {"N": halos.targets, "M": halos.own, "h": halos.rows - halos.own} | widths
    return make_decision(algebra, call, options, sizes=sizes)


def spread_reasons(*, own: bool, precisions: int) -> list[str]:
    """Return why a layer makes its calls itself where rows come from other processes.

    Args:
        own: its code is a user's, without a rule.
        precisions: how many meet in the call.
    """
    reasons = ["a layer without a rule, on several processes"] if own else []
    return reasons + (["several precisions, on several processes"] if precisions > 1 else [])


def _unfit(call: Call, halos: Halos, lifted: Lifted) -> str:
    """Why this process cannot run a tree, or nothing."""
    if in_force() is not None:
        return "a sample of the edges of each process"
    if why := halos.reason(call.conv):
        return why
    try:
        algebra, _ = lifted(call)
        for leaf in filter(is_sparse, dict.fromkeys(leaves_of(algebra.expr))):
            algebra.values[leaf.name](call)  # a rule may find out when it looks at values
    except NotLifted as reason:
        return str(reason)
    return ""
