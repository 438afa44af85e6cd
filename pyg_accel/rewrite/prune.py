"""Leaves out trees that cannot be the fastest, whatever the input (paper, section 3.3).

Two scenarios are told apart: the layer has fewer input than output features, or more. Within one a
tree is dominated if

* the primitives of another are a part of its own, on matrices that are no larger, or
* another has the same primitives on smaller matrices.

A tree that is dominated in both is pruned. The others are promoted, each with the scenarios in
which it may win: a condition on sizes alone, and the cost models decide among what is left.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pyg_accel.rewrite.tree import Tree
from pyg_accel.rewrite.tree_cost import Assumptions, PrimitiveCall, TreeCost, tree_cost

__all__ = ["SCENARIOS", "Associations", "dominates", "prune"]

SCENARIOS = ("in < out", "in > out")


@dataclass(frozen=True)
class Associations:
    """The trees of a layer, and what is left of them.

    Attributes:
        all: every tree.
        promoted: those that may be the fastest.
        scenarios: of every promoted tree, where it may win.
        reasons: of every other tree, the tree that is never slower, in each scenario.
        bills: of every tree.
    """

    all: tuple[Tree, ...]
    promoted: tuple[Tree, ...]
    scenarios: dict[Tree, tuple[str, ...]]
    reasons: dict[Tree, dict[str, str]]
    bills: dict[Tree, TreeCost]

    def candidates(self, num_in: int, num_out: int) -> tuple[Tree, ...]:
        """Return the promoted trees that may win for these sizes: the condition on sizes alone."""
        if num_in == num_out:
            return self.promoted
        scenario = SCENARIOS[num_in > num_out]
        return tuple(t for t in self.promoted if scenario in self.scenarios[t])


def prune(trees: Sequence[Tree], given: Assumptions) -> Associations:
    """Sort trees into promoted and pruned ones."""
    bills = {tree: tree_cost(tree, given) for tree in trees}
    reasons: dict[Tree, dict[str, str]] = {tree: {} for tree in trees}
    for scenario in SCENARIOS:
        # A tree that dominates comes before what it dominates; that it is dominated itself makes
        # no difference, since then a third one dominates both.
        standing: list[Tree] = []
        for tree in sorted(trees, key=lambda t: _weight(bills[t], scenario)):
            rival = next((r for r in standing if dominates(bills[r], bills[tree], scenario)), None)
            if rival is None:
                standing.append(tree)
            else:
                fewer = len(bills[rival].all) < len(bills[tree].all)
                what = "does a part of its work" if fewer else "does the same on smaller matrices"
                reasons[tree][scenario] = f"{rival} {what}"
    promoted = tuple(t for t in trees if len(reasons[t]) < len(SCENARIOS))
    scenarios = {t: tuple(s for s in SCENARIOS if s not in reasons[t]) for t in promoted}
    return Associations(tuple(trees), promoted, scenarios,
                  {t: r for t, r in reasons.items() if t not in scenarios}, bills)  # fmt: skip


def _weight(bill: TreeCost, scenario: str) -> tuple[int, int, int, int]:
    works = bill.all
    weighted = sum(w.name == "spmm_weighted" for w in works)
    sizes = sum(sum(_rank(w, scenario)) for w in works)
    return len(works), sizes, weighted, -sum(w.once for w in works)


def dominates(rival: TreeCost, bill: TreeCost, scenario: str) -> bool:
    """Whether every primitive of ``rival`` has one of its own in ``bill`` that is no cheaper."""
    if _counts(rival) - _counts(bill):
        return False
    left = sorted(bill.all, key=lambda w: _rank(w, scenario))
    for work in sorted(rival.all, key=lambda w: _rank(w, scenario), reverse=True):
        match = next((w for w in left if _no_dearer(work, w, scenario)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _counts(bill: TreeCost) -> Counter[str]:
    """How many primitives there are of each sort; of the two products with edges together."""
    return Counter(w.name.removesuffix("_weighted") for w in bill.all)


def _rank(work: PrimitiveCall, scenario: str) -> tuple[int, ...]:
    return (*(_size(s, scenario) for s in (work.cols, work.inner, work.rows)), work.heads)


def _size(symbol: str, scenario: str) -> int:
    if symbol in ("F", "H"):
        return 2 if (symbol == "F") == (scenario == "in > out") else 1
    return 0


def _no_dearer(a: PrimitiveCall, b: PrimitiveCall, scenario: str) -> bool:
    """Whether primitive ``a`` never takes longer than ``b``."""
    kinds = a.name == b.name or (a.name, b.name) == ("spmm", "spmm_weighted")
    if not kinds or (a.graph, a.transposed) != (b.graph, b.transposed) or a.heads > b.heads:
        return False
    if (b.once and not a.once) or (b.shared and not a.shared):
        return False
    pairs = ((a.rows, b.rows), (a.inner, b.inner), (a.cols, b.cols))
    if a.name in ("gemm", "gemm_tn"):  # a product of the same three sizes is the same work
        ours = sorted((a.rows, a.inner, a.cols))
        if ours == sorted((b.rows, b.inner, b.cols)):
            return True
    return all(x == y or 0 < _size(x, scenario) <= _size(y, scenario) for x, y in pairs)
