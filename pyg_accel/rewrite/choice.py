"""Which promoted tree is the fastest for these sizes and this graph (paper, section 3.4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyg_accel.rewrite.bill import Bill, Features
from pyg_accel.rewrite.cost import CostModel
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.tree import Tree

__all__ = ["Choice", "Choose", "decide", "seconds_of", "source_for"]

# Names a tree, picks one, or takes the promoted trees and returns one of them.
Choose = str | Tree | Callable[[Sequence[Tree]], Tree]

CALLS = 100  # over which what is computed once a graph is spread (paper, section 6.3)
EQUAL = 1.02  # of two predictions that are as close as this, the one that keeps less memory


@dataclass(frozen=True)
class Choice:
    """A decision.

    Attributes:
        tree: what runs.
        by: what decided: ``"the only one"``, ``"sizes"``, ``"cost"`` or ``"forced"``.
        source: the cost model, if it was asked.
        seconds: predictions for the trees that it compared.
    """

    tree: Tree
    by: str
    source: str
    seconds: Mapping[Tree, float]


def decide(
    pruned: Associations,
    sizes: Mapping[str, int],
    graphs: Features,
    model: CostModel,
    *,
    fresh: bool = False,
    choose: Choose | None = None,
    slowest: Callable[[Sequence[float]], list[float]] | None = None,
) -> Choice:
    """Choose a tree: by the sizes if they suffice, else by the cost model.

    Args:
        pruned: the trees.
        sizes: by symbol.
        graphs: features of a matrix of edges by name, or of its transpose; asked for only if the
            cost model is.
        model: the cost model.
        fresh: every call has a graph of its own, so nothing is computed once for many.
        choose: decides in place of all that.
        slowest: makes of predictions those of all processes, which have to choose the same.

    Raises:
        ValueError: if ``choose`` names no tree of this layer.
    """
    if choose is not None:
        return Choice(forced(pruned, choose), "forced", "", {})
    if len(pruned.promoted) == 1:
        return Choice(pruned.promoted[0], "the only one", "", {})
    candidates = pruned.candidates(sizes.get("F", 0), sizes.get("H", 0))
    if len(candidates) == 1:
        return Choice(candidates[0], "sizes", "", {})
    # Asked together, a model predicts all primitives of a kind at once, and remembers them.
    works = dict.fromkeys(work for tree in candidates for work in pruned.bills[tree].all)
    model.many([work.primitive(sizes, graphs) for work in works])
    seconds = {
        tree: seconds_of(pruned.bills[tree], sizes, graphs, model, fresh=fresh)
        for tree in candidates
    }
    if slowest is not None:
        seconds = dict(zip(seconds, slowest(list(seconds.values())), strict=True))
        return Choice(min(seconds, key=seconds.__getitem__), "cost",
                      source_for(candidates, pruned, model), seconds)  # fmt: skip
    fastest = min(seconds.values())
    close = [tree for tree in candidates if seconds[tree] <= fastest * EQUAL]
    best = min(close, key=lambda t: (pruned.bills[t].bytes_kept(sizes), seconds[t]))
    return Choice(best, "cost", source_for(candidates, pruned, model), seconds)


def source_for(trees: Iterable[Tree], pruned: Associations, model: CostModel) -> str:
    """Return what priced some trees; of primitives that nobody measured, that a roofline did."""
    names = {work.name for tree in trees for work in pruned.bills[tree].all}
    rest = sorted(names - set(model.learned)) if model.learned else []
    return model.source + (f"; a roofline for {', '.join(rest)}" if rest else "")


def forced(pruned: Associations, choose: Choose) -> Tree:
    """Return the tree that a user asks for."""
    if callable(choose):
        tree = choose(pruned.promoted)
    else:
        tree = next((t for t in pruned.all if choose in (t, str(t))), None)  # type: ignore[assignment]
    if tree not in pruned.all:
        known = "\n  ".join(map(str, pruned.all))
        raise ValueError(f"no association '{choose}'; there are\n  {known}")
    return tree


def seconds_of(
    bill: Bill,
    sizes: Mapping[str, int],
    graphs: Features,
    model: CostModel,
    *,
    fresh: bool = False,
) -> float:
    """Return the predicted time of one call: the sum over its primitives (paper, section 3.5)."""
    works = bill.all
    times = model.many([work.primitive(sizes, graphs) for work in works])
    spread = [CALLS if work.once and not fresh else 1 for work in works]
    return sum(seconds / calls for seconds, calls in zip(times, spread, strict=True))
