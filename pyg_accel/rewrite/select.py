"""Which tree a layer runs for calls of some kind and size, and why (paper, section 3.4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.sampling import Sampling
from pyg_accel.rewrite.algebra import Algebra, Call
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
from pyg_accel.rewrite.lower import Program
from pyg_accel.rewrite.matrices import Matrix
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.tree import Tree, is_sparse
from pyg_accel.rewrite.tree_cost import Assumptions, Features

__all__ = ["Choice", "Choose", "Decision", "Options", "assumptions_of", "decide", "make_decision",
           "sort_of", "widths_of"]  # fmt: skip

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
    """Return the tree that a user asks for."""
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
    """What a layer does with calls of some kind and size.

    Attributes:
        algebra: what it computes.
        pruned: all trees.
        given: what was known of the leaves.
        sizes: by symbol, those that were decided for.
        entries: number of edges.
        fresh: graphs were new in every call.
        sampling: what ``sampled()`` asked for, if it applies.
        kind: of the call, as compiled calls know it.
        cost: the cost model.
        features: of the matrices of edges, those that it was told.
        choice: the tree, and why.
        program: the tree, ready to run.
    """

    algebra: Algebra
    pruned: Associations
    given: Assumptions
    sizes: Mapping[str, int]
    entries: int
    fresh: bool
    sampling: Sampling | None
    choice: Choice
    program: Program
    kind: Any
    cost: CostModel
    features: Mapping[tuple[str, bool], GraphFeatures]

    @property
    def form(self) -> Expr:
        """What the layer computes, simplified."""
        return merge(simplify(self.algebra.expr))

    def holds(self, sizes: Mapping[str, int], entries: int) -> bool:
        """Whether sizes are near enough to those that were decided for."""
        pairs = [(entries, self.entries), *((sizes[s], self.sizes[s]) for s in sizes)]
        return all(a == b or max(a, b) <= DRIFT * min(a, b) for a, b in pairs)

    def afresh(self, choose: Choose | None) -> Program:
        """Return what to run in compiled code, which keeps nothing from one call to the next."""

        def graphs(name: str, transposed: bool) -> GraphFeatures:
            return self.features[name, transposed]

        cost = _Fused(self.cost)
        choice = decide(self.pruned, self.sizes, graphs, cost, fresh=True, choose=choose)
        return Program(choice.tree, self.algebra)


class _Fused:
    """A cost model for compiled code: what is done element by element joins its neighbours."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self.source, self.learned = model.source, model.learned

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        asked = list(primitives)
        found = self._model.many(asked)
        return [0.0 if p.name in ("scale_rows", "elementwise") else seconds
                for p, seconds in zip(asked, found, strict=True)]  # fmt: skip


def make_decision(
    algebra: Algebra,
    call: Call,
    options: Options,
    *,
    sizes: Mapping[str, int],
    fresh: bool = False,
    sampling: Sampling | None = None,
    kind: Any = "",
) -> Decision:
    """Choose a tree for a call.

    A roofline on the sizes of the graph decides first. Where it expects the layer to take longer
    than measuring the graph would, the graph is measured and the cost model decides; unless that
    is the roofline, and it chooses the same whether caches serve every row of features or none.
    """
    given = assumptions_of(algebra, call, train=options.train)
    if sampling is not None:
        given = replace(given, sampled=True, static=given.static - {"X", "Y"})
    pruned = associations_of(algebra.expr, algebra.also, given)
    slowest = None if call.halos is None else call.halos.slowest

    def chosen(
        model: CostModel, measure: Callable[..., GraphFeatures]
    ) -> tuple[Choice, CostModel, dict[tuple[str, bool], GraphFeatures]]:
        features: dict[tuple[str, bool], GraphFeatures] = {}

        def graphs(name: str, transposed: bool) -> GraphFeatures:
            if (name, transposed) not in features:
                matrix = algebra.values[name](call)
                assert isinstance(matrix, Matrix)
                features[name, transposed] = measure(matrix.graph, transposed=transposed)
            return features[name, transposed]

        choice = decide(pruned, sizes, graphs, model, fresh=fresh, choose=options.choose,
                        slowest=slowest, price_all=options.price_all)  # fmt: skip
        return choice, model, features

    model = options.cost or cost_model(call.x.device)
    measured = partial(chosen, model, GraphFeatures.of)
    if isinstance(model, Learned | Roofline):
        found = chosen(model.roofline, GraphFeatures.sizes_of)
        if min(found[0].seconds.values(), default=0) > QUICK:
            near = partial(GraphFeatures.sizes_of, far=0.0)
            learned = isinstance(model, Learned) or options.price_all
            if learned or chosen(model, near)[0].tree != found[0].tree:
                found = measured()
    else:
        found = measured()
    choice, model, features = found
    program = Program(choice.tree, algebra, given.static, sampled=sampling is not None)
    return Decision(algebra, pruned, given, sizes, call.edge_index.size(1), fresh, sampling,
                    choice, program, kind, model, features)  # fmt: skip


def assumptions_of(
    algebra: Algebra, call: Call, *, train: bool, upstream: bool | None = None
) -> Assumptions:
    """Return which leaves learn and which stay the same.

    Args:
        algebra: what the layer computes.
        call: of the layer.
        train: forward and backward are to be fast.
        upstream: features have gradients; by default those that require one, and without gradients
            all of them: there every tensor looks like one that has none.
    """
    if upstream is None:
        upstream = not torch.is_grad_enabled()
    learned: set[str] = set()
    static: set[str] = set()
    stays = call.static or (call.halos is not None and call.halos.stays(call.x))
    with torch.enable_grad():
        for leaf in dict.fromkeys(leaves_of(algebra.expr)):
            if leaf.name in algebra.constants:
                continue
            if is_sparse(leaf) or leaf.kind == "diagonal":
                weight = call.given.get("edge_weight")
                grows = isinstance(weight, Tensor) and weight.requires_grad
                grows = (grows and is_sparse(leaf)) or leaf.name in algebra.learned
                (learned if grows else static).add(leaf.name)
                continue
            value = algebra.values[leaf.name](call)
            assert isinstance(value, Tensor)
            if leaf.kind == "data":
                if stays and leaf.name in ("X", "Y") and not value.requires_grad:
                    static.add(leaf.name)
                elif upstream or value.requires_grad:
                    learned.add(leaf.name)
            elif value.requires_grad:
                learned.add(leaf.name)
    return Assumptions(train, frozenset(learned), frozenset(static), spread=call.halos is not None)


def widths_of(algebra: Algebra, call: Call) -> dict[str, int]:
    """Return the sizes of an expression that are no numbers of nodes, by symbol."""
    sizes = {"1": 1, "F": call.x.size(1), **algebra.sizes}
    if call.x_dst is not None:
        sizes["G"] = call.x_dst.size(1)
    for leaf in dict.fromkeys(leaves_of(algebra.expr)):
        if leaf.kind == "weight":
            value = algebra.values[leaf.name](call)
            assert isinstance(value, Tensor)
            sizes.setdefault(leaf.cols, value.size(1) // leaf.heads)
    return sizes


def sort_of(value: Any) -> str:
    """What a compiled call knows of an argument, and may not differ in."""
    if isinstance(value, Tensor):
        learned = value.dim() == 1 and value.requires_grad  # of features it is not known
        return f"{value.dim()}{'f' if value.is_floating_point() else 'i'}{'g' if learned else ''}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join([sort_of(v) for v in value]) + ")"
    return f"{value}" if value is None or isinstance(value, (bool, int, float, str)) else "?"
