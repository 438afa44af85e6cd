"""Which tree a layer runs for calls of some kind and size, and why (paper, section 3.4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost import (
    CostModel,
    GraphFeatures,
    Learned,
    Primitive,
    Roofline,
    cost_model,
)
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.equivalents import merge, simplify
from pyg_accel.rewrite.ir import Expr, leaves_of
from pyg_accel.rewrite.lift import Region
from pyg_accel.rewrite.nodes import Learning, facts_of, features_of, lasts
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.tree import Tree, is_sparse
from pyg_accel.rewrite.tree_cost import Assumptions, Features

__all__ = ["Choice", "Choose", "Decision", "Options", "assumptions_of", "decide", "make_decision"]

# Names a tree, picks one, or takes the promoted trees and returns one of them.
Choose = str | Tree | Callable[[Sequence[Tree]], Tree]

CALLS = 100  # over which what is computed once a graph is spread (paper, section 6.3)
EQUAL = 1.02  # of two predictions that are as close as this, the one that keeps less memory
DRIFT = 2  # a decision holds while no size has changed by more than this factor (section 6.4)
# Seconds that measuring a graph and asking a learned model may take. Where the roofline expects the
# layer to take less, on the sizes of the graph alone, it decides.
QUICK = 3e-3


@dataclass(frozen=True)
class Choice:
    """A tree, and why.

    Attributes:
        tree: what runs.
        by: what decided: ``"the only one"``, ``"sizes"``, ``"cost"``, ``"memory"`` among those of
            nearly the lowest cost, or ``"forced"``.
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
    price_all: bool = False,
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
        price_all: predict the time of every tree, also where sizes suffice.

    Raises:
        ValueError: if ``choose`` names no tree of this layer.
    """
    candidates = pruned.candidates(sizes.get("F", 0), sizes.get("H", 0))
    if choose is not None:
        candidates, by = (forced(pruned, choose),), "forced"
    elif len(candidates) > 1:
        by = "cost"
    else:
        by = "sizes" if len(pruned.promoted) > 1 else "the only one"
    if by != "cost" and not price_all:
        return Choice(candidates[0], by, "", {})
    trees = pruned.all if price_all else candidates
    works = dict.fromkeys(work for tree in trees for work in pruned.bills[tree].all)
    times = dict(zip(works, model.many([w.primitive(sizes, graphs) for w in works]), strict=True))
    calls = 1 if fresh else CALLS
    seconds = {
        tree: sum(times[w] / (calls if w.once else 1) for w in pruned.bills[tree].all)
        for tree in trees
    }
    rest = sorted({work.name for work in works} - set(model.learned)) if model.learned else []
    source = model.source + (f"; a roofline for {', '.join(rest)}" if rest else "")
    if slowest is not None:
        seconds = dict(zip(seconds, slowest(list(seconds.values())), strict=True))
        best = min(candidates, key=seconds.__getitem__)
    else:
        fastest = min(seconds[tree] for tree in candidates)
        close = [tree for tree in candidates if seconds[tree] <= fastest * EQUAL]
        best = min(close, key=lambda t: (pruned.bills[t].bytes_kept(sizes), seconds[t]))
        if by == "cost" and seconds[best] > fastest:
            by = "memory"
    return Choice(best, by, source, seconds)


def forced(pruned: Associations, choose: Choose) -> Tree:
    """Return the tree that a user has chosen."""
    if callable(choose):
        tree = choose(pruned.promoted)
    else:
        tree = next((t for t in pruned.all if choose in (t, str(t))), None)  # type: ignore[assignment]
    if tree not in pruned.all:
        known = "\n  ".join(map(str, pruned.all))
        raise ValueError(f"no association '{choose}'; there are\n  {known}")
    return tree


@dataclass(frozen=True)
class Options:
    """What :func:`~pyg_accel.optimize` was asked for.

    Attributes:
        train: forward and backward are to be fast, else forward alone.
        choose: decides in place of sizes and cost models.
        cost: the cost model; by default that of the device.
        price_all: predict the time of every tree, also where sizes suffice: to explain.
    """

    train: bool = False
    choose: Choose | None = None
    cost: CostModel | None = None
    price_all: bool = False


@dataclass(frozen=True)
class Decision:
    """What a layer does with a region of its calls of some kind and size.

    Attributes:
        region: what it computes.
        pruned: all trees.
        given: assumptions about the leaves.
        sizes: by symbol, those that were decided for.
        entries: number of edges.
        choice: the tree, and why.
    """

    region: Region
    pruned: Associations
    given: Assumptions
    sizes: Mapping[str, int]
    entries: int
    choice: Choice

    @property
    def form(self) -> Expr:
        """What the layer computes, simplified."""
        return merge(simplify(self.region.expr))


class Fused:
    """A cost model for compiled code: what is done element by element joins its neighbours."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self.source, self.learned = model.source, model.learned

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the seconds of each."""
        asked = list(primitives)
        found = self._model.many(asked)
        return [0.0 if p.name in ("scale_rows", "elementwise") else seconds
                for p, seconds in zip(asked, found, strict=True)]  # fmt: skip


def make_decision(
    region: Region,
    given: Assumptions,
    options: Options,
    graphs: Mapping[str, Graph],
    *,
    fresh: bool = False,
    compiled: bool = False,
    slowest: Callable[[Sequence[float]], list[float]] | None = None,
) -> Decision:
    """Choose a tree for a region.

    A roofline on the sizes of the graph decides first. Where it expects the layer to take longer
    than measuring the graph would, the graph is measured and the cost model decides; unless that
    is the roofline, and it chooses the same whether caches serve every row of features or none.

    Args:
        region: what is computed.
        given: assumptions about its leaves.
        options: of ``optimize()``.
        graphs: those of its matrices of edges, by name.
        fresh: every call has a graph of its own.
        compiled: a compiler fuses what is done element by element.
        slowest: as of :func:`decide`.
    """
    pruned = associations_of(region.expr, given)
    graph = next(iter(graphs.values()))
    sizes = {"N": graph.num_rows, "M": graph.num_cols, "1": 1, **region.sizes}
    if region.exchange is not None:
        sizes["M"] = facts_of(features_of(region.exchange)).shape[0]
        sizes["h"] = graph.num_cols - sizes["M"]
    if region.sample is not None:
        sizes["S"] = region.sample["width"]

    def chosen(model: CostModel, measure: Callable[..., GraphFeatures]) -> Choice:
        def features(name: str, transposed: bool) -> GraphFeatures:
            return measure(graphs[name], transposed=transposed)

        return decide(pruned, sizes, features, Fused(model) if compiled else model, fresh=fresh,
                      choose=options.choose, slowest=slowest,
                      price_all=options.price_all)  # fmt: skip

    model = options.cost or cost_model(graph.device)
    if not isinstance(model, Learned | Roofline):
        choice = chosen(model, GraphFeatures.of)
    else:
        choice = chosen(model.roofline, GraphFeatures.sizes_of)
        if min(choice.seconds.values(), default=0) > QUICK:
            near = partial(GraphFeatures.sizes_of, far=0.0)
            learned = isinstance(model, Learned) or options.price_all
            if learned or chosen(model, near).tree != choice.tree:
                choice = chosen(model, GraphFeatures.of)
    return Decision(region, pruned, given, sizes, graph.num_edges, choice)


def assumptions_of(
    region: Region,
    learning: Learning,
    *,
    train: bool,
    static: frozenset[Any] = frozenset(),
    upstream: bool | None = None,
) -> Assumptions:
    """Return which leaves learn and which stay the same.

    Args:
        region: what is computed.
        learning: which nodes have gradients.
        train: forward and backward are to be fast.
        static: arguments that are the same tensors in every call.
        upstream: features have gradients; by default those that require one, and without gradients
            all of them: there every tensor looks like one that has none.
    """
    if upstream is None:
        upstream = not torch.is_grad_enabled()
    learned: set[str] = set()
    same: set[str] = set()
    for leaf in dict.fromkeys(leaves_of(region.expr)):
        if leaf.name in region.ones:
            continue
        nodes = region.sources[leaf.name].nodes
        learns = any(map(learning.learns, nodes))
        if is_sparse(leaf) or leaf.kind == "diagonal":
            if learns:
                learned.add(leaf.name)
            elif all(map(lasts, nodes)):
                same.add(leaf.name)
        elif leaf.kind == "data":
            if static.issuperset(nodes) and not learns:
                same.add(leaf.name)
            elif upstream or learns:
                learned.add(leaf.name)
        elif learns:
            learned.add(leaf.name)
    sampled, spread = region.sample is not None, region.exchange is not None
    return Assumptions(train, frozenset(learned), frozenset(same), sampled, spread)
