"""Removes trees that cannot be the fastest for any input (paper, section 3.3).

There are two scenarios: the layer has fewer input than output features, or more. Within one, a tree
is dominated if

* another tree has a subset of its primitives, on matrices that are no larger, or
* another tree has the same primitives on smaller matrices.

A tree that is dominated in both scenarios is pruned. The others are promoted, each with the
scenarios in which it may be the fastest. Sizes tell the scenario, and a cost model decides between
the trees that remain.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyg_accel.rewrite.tree import Tree
from pyg_accel.rewrite.tree_cost import Assumptions, PrimitiveCall, TreeCost, tree_cost

__all__ = ["SCENARIOS", "Associations", "prune"]

SCENARIOS = ("in < out", "in > out")


@dataclass(frozen=True)
class Associations:
    """The association trees of an expression before and after pruning.

    Attributes:
        all: every tree.
        promoted: the trees that may be the fastest.
        scenarios: the scenarios in which each promoted tree may be the fastest.
        reasons: for every other tree and scenario, a text that names a tree that is never slower.
        bills: the primitives of every tree.
    """

    all: tuple[Tree, ...]
    promoted: tuple[Tree, ...]
    scenarios: dict[Tree, tuple[str, ...]]
    reasons: dict[Tree, dict[str, str]]
    bills: dict[Tree, TreeCost]

    def candidates(self, num_in: int, num_out: int) -> tuple[Tree, ...]:
        """Return the promoted trees that may be the fastest for these numbers of features."""
        if num_in == num_out:
            return self.promoted
        scenario = SCENARIOS[num_in > num_out]
        return tuple(t for t in self.promoted if scenario in self.scenarios[t])


def prune(trees: Sequence[Tree], assumed: Assumptions) -> Associations:
    """Sort trees into promoted and pruned ones."""
    bills = {tree: tree_cost(tree, assumed) for tree in trees}
    reasons: dict[Tree, dict[str, str]] = {tree: {} for tree in trees}
    for scenario in SCENARIOS:
        works = {tree: _sorted(bill, scenario) for tree, bill in bills.items()}
        # Sorted by weight, a tree comes after all trees that dominate it. Domination is transitive,
        # so comparing with undominated trees suffices.
        undominated: list[Tree] = []
        for tree in sorted(trees, key=lambda t: works[t].weight):
            rival = next(
                (r for r in undominated if _dominates(works[r], works[tree], scenario)), None
            )
            if rival is None:
                undominated.append(tree)
            else:
                fewer = len(bills[rival].all) < len(bills[tree].all)
                what = "does a part of its work" if fewer else "does the same on smaller matrices"
                reasons[tree][scenario] = f"{rival} {what}"
    promoted = tuple(t for t in trees if len(reasons[t]) < len(SCENARIOS))
    scenarios = {t: tuple(s for s in SCENARIOS if s not in reasons[t]) for t in promoted}
    return Associations(tuple(trees), promoted, scenarios,
                  {t: r for t, r in reasons.items() if t not in scenarios}, bills)  # fmt: skip


class _Works(NamedTuple):
    """The primitives of a tree in a scenario.

    Attributes:
        weight: a sort key; trees that dominate this one have a smaller one.
        counts: the number of primitives by name; weighted and unweighted spmm count together.
        works: the primitives, sorted by the sizes of their matrices.
    """

    weight: tuple[int, int, int, int]
    counts: Counter[str]
    works: list[PrimitiveCall]


def _sorted(bill: TreeCost, scenario: str) -> _Works:
    ranked = [(_rank(work, scenario), number) for number, work in enumerate(bill.all)]
    works = [bill.all[number] for _, number in sorted(ranked)]
    weighted = sum([w.name == "spmm_weighted" for w in works])
    sizes = sum([sum(rank) for rank, _ in ranked])
    return _Works(
        (len(works), sizes, weighted, -sum([w.once for w in works])),
        Counter([w.name.removesuffix("_weighted") for w in works]),
        works,
    )


def _dominates(rival: _Works, other: _Works, scenario: str) -> bool:
    """Whether each primitive of ``rival`` matches another one of ``other`` that is no faster."""
    if not rival.counts <= other.counts:
        return False
    unmatched = list(other.works)
    for work in reversed(rival.works):
        match = next((n for n, w in enumerate(unmatched) if _no_slower(work, w, scenario)), None)
        if match is None:
            return False
        del unmatched[match]
    return True


def _rank(work: PrimitiveCall, scenario: str) -> tuple[int, ...]:
    return (*(_size(s, scenario) for s in (work.cols, work.inner, work.rows)), work.heads)


def _size(symbol: str, scenario: str) -> int:
    if symbol in ("F", "H"):
        return 2 if (symbol == "F") == (scenario == "in > out") else 1
    return 0


def _no_slower(a: PrimitiveCall, b: PrimitiveCall, scenario: str) -> bool:
    """Whether primitive ``a`` never takes longer than ``b``."""
    if a.name != b.name and (a.name, b.name) != ("spmm", "spmm_weighted"):
        return False
    if (a.graph, a.transposed) != (b.graph, b.transposed) or a.heads > b.heads:
        return False
    if (b.once and not a.once) or (b.shared and not a.shared) or (b.fused and not a.fused):
        return False
    pairs = ((a.rows, b.rows), (a.inner, b.inner), (a.cols, b.cols))
    if a.name in ("gemm", "gemm_tn") and sorted(x for x, _ in pairs) == sorted(y for _, y in pairs):
        return True  # products of the same three sizes do the same work
    return all(x == y or 0 < _size(x, scenario) <= _size(y, scenario) for x, y in pairs)
