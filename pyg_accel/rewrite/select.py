"""Chooses the tree that a layer runs (paper, section 3.4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost import CostModel, GraphFeatures, Learned, Roofline, cost_model
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.equivalents import merge, simplify
from pyg_accel.rewrite.ir import Expr, is_ones, leaves_of
from pyg_accel.rewrite.lift import Region
from pyg_accel.rewrite.nodes import facts_of, features_of, lasts
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.tree import Tree, is_sparse
from pyg_accel.rewrite.tree_cost import Assumptions, Features

__all__ = ["Choice", "Choose", "Decision", "Options", "assumptions_of", "decide", "make_decision"]

# The text of a tree, a tree, or a function that takes the promoted trees and returns one of them.
Choose = str | Tree | Callable[[Sequence[Tree]], Tree]

CALLS = 100  # expected per graph; they share the cost of static nodes (paper, section 6.3)
EQUAL = 1.02  # among trees within this factor of the fastest, the least saved memory decides
DRIFT = 2  # a decision is valid while no size changes by more than this factor (section 6.4)
# Seconds to measure a graph and run a learned model. If the roofline, which only reads the sizes of
# a graph, predicts that a layer takes less, it decides.
QUICK = 3e-3


@dataclass(frozen=True)
class Options:
    """The options of :func:`~pyg_accel.optimize`.

    Attributes:
        train: optimize the forward and backward pass together, not the forward pass alone.
        choose: the choice of the user, if there is one.
        cost: the cost model; the default for the device if None.
        price_all: predict the time of every tree, also where sizes suffice.
    """

    train: bool = False
    choose: Choose | None = None
    cost: CostModel | None = None
    price_all: bool = False


@dataclass(frozen=True)
class Choice:
    """A tree, and why.

    Attributes:
        tree: the tree that runs.
        by: the criterion: ``"the only one"``, ``"sizes"``, ``"cost"``, ``"memory"`` between trees
            of nearly the lowest cost, or ``"forced"``.
        source: the cost model, if it was used.
        seconds: its predictions.
    """

    tree: Tree
    by: str
    source: str
    seconds: Mapping[Tree, float]


def decide(
    pruned: Associations, sizes: Mapping[str, int], graphs: Features, model: CostModel,
    options: Options = Options(), *, fresh: bool = False,
    slowest: Callable[[Sequence[float]], list[float]] | None = None,
) -> Choice:  # fmt: skip
    """Choose a tree: by the sizes if they suffice, else by the cost model.

    Args:
        pruned: the trees.
        sizes: by symbol.
        graphs: returns features of a matrix of edges by name, or of its transpose; called only if
            the cost model is used.
        model: the cost model.
        options: of ``optimize()``.
        fresh: whether every call has a new graph, so that nothing computed once is shared.
        slowest: replaces predictions with the largest of all processes, which have to choose the
            same tree.

    Raises:
        ValueError: if the user's choice is not a tree of this layer.
    """
    candidates = pruned.candidates(sizes.get("F", 0), sizes.get("H", 0))
    if options.choose is not None:
        candidates, by = (forced(pruned, options.choose),), "forced"
    elif len(candidates) > 1:
        by = "cost"
    else:
        by = "sizes" if len(pruned.promoted) > 1 else "the only one"
    if by != "cost" and not options.price_all:
        return Choice(candidates[0], by, "", {})
    trees = pruned.all if options.price_all else candidates
    works = dict.fromkeys(work for tree in trees for work in pruned.bills[tree].all)
    times = dict(zip(works, model.many([w.primitive(sizes, graphs) for w in works]), strict=True))
    calls = 1 if fresh else CALLS
    seconds = {
        tree: sum(times[w] / (calls if w.once else 1) for w in pruned.bills[tree].all)
        for tree in trees
    }
    others = sorted({work.name for work in works} - set(model.learned)) if model.learned else []
    source = model.source + (f"; a roofline for {', '.join(others)}" if others else "")
    if slowest is not None:
        seconds = dict(zip(seconds, slowest(list(seconds.values())), strict=True))
        best = min(candidates, key=seconds.__getitem__)
    else:
        fastest = min(seconds[tree] for tree in candidates)
        close = [tree for tree in candidates if seconds[tree] <= fastest * EQUAL]
        best = min(close, key=lambda t: (pruned.bills[t].saved_bytes(sizes), seconds[t]))
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
        names = "\n  ".join(map(str, pruned.all))
        raise ValueError(f"no association '{choose}'; there are\n  {names}")
    return tree


@dataclass(frozen=True)
class Decision:
    """The choice for a region, and its inputs.

    Attributes:
        region: the region.
        pruned: all trees.
        assumed: assumptions about the leaves.
        sizes: by symbol; ``E`` is the number of edges.
        choice: the tree, and why.
    """

    region: Region
    pruned: Associations
    assumed: Assumptions
    sizes: Mapping[str, int]
    choice: Choice

    @property
    def form(self) -> Expr:
        """The simplified expression."""
        return merge(simplify(self.region.expr))


def make_decision(
    region: Region, assumed: Assumptions, options: Options, graphs: Mapping[str, Graph], *,
    fresh: bool = False, slowest: Callable[[Sequence[float]], list[float]] | None = None,
) -> Decision:  # fmt: skip
    """Choose a tree for a region.

    A roofline decides first, by the sizes of the graph. If it predicts that the layer takes longer
    than measuring the graph, the graph is measured and the cost model decides. A roofline measures
    only if the choice differs between perfect and no caching.

    Args:
        region: the region.
        assumed: assumptions about its leaves.
        options: of ``optimize()``.
        graphs: the graph of each matrix of edges, by name.
        fresh: see :func:`decide`.
        slowest: see :func:`decide`.
    """
    pruned = associations_of(region.expr, assumed)
    graph = next(iter(graphs.values()))
    sizes = {"N": graph.num_rows, "M": graph.num_cols, "1": 1, **region.sizes}
    if region.exchange is not None:
        sizes["M"] = facts_of(features_of(region.exchange)).shape[0]
        sizes["h"] = graph.num_cols - sizes["M"]
    if region.sample is not None:
        sizes["S"] = region.sample["width"]
    sizes["E"] = graph.num_edges

    def chosen(model: CostModel, measure: Callable[..., GraphFeatures]) -> Choice:
        def features(name: str, transposed: bool) -> GraphFeatures:
            return measure(graphs[name], transposed=transposed)

        return decide(pruned, sizes, features, model, options, fresh=fresh, slowest=slowest)

    model = options.cost or cost_model(graph.device)
    if not isinstance(model, Learned | Roofline):
        choice = chosen(model, GraphFeatures.of)
    else:
        choice = chosen(model.roofline, GraphFeatures.sizes_of)
        if min(choice.seconds.values(), default=0) > QUICK:
            all_cached = partial(GraphFeatures.sizes_of, far=0.0)
            always = isinstance(model, Learned) or options.price_all
            if always or chosen(model, all_cached).tree != choice.tree:
                choice = chosen(model, GraphFeatures.of)
    return Decision(region, pruned, assumed, sizes, choice)


def assumptions_of(
    region: Region, learns: Callable[[fx.Node], bool], *, train: bool, static: frozenset[Any]
) -> Assumptions:
    """Return which leaves have gradients and which are the same in every call.

    Features have gradients if they require them. Under ``no_grad`` all are assumed to have them.

    Args:
        region: the region.
        learns: whether a node has gradients.
        train: whether the backward pass counts.
        static: arguments that are the same tensors in every call.
    """
    learned: set[str] = set()
    same: set[str] = set()
    for leaf in dict.fromkeys(leaves_of(region.expr)):
        if is_ones(leaf):
            continue
        nodes = region.sources[leaf.name].nodes
        if any(map(learns, nodes)):
            learned.add(leaf.name)
        elif leaf.kind == "data":
            if static.issuperset(nodes):
                same.add(leaf.name)
            elif not torch.is_grad_enabled():
                learned.add(leaf.name)
        elif (is_sparse(leaf) or leaf.kind == "diagonal") and all(map(lasts, nodes)):
            same.add(leaf.name)
    sampled, spread = region.sample is not None, region.exchange is not None
    return Assumptions(train, frozenset(learned), frozenset(same), sampled, spread)
