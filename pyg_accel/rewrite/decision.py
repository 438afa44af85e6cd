"""What a layer does with calls of some kind and size, and why."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.sampling import Sampling
from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.bill import Given
from pyg_accel.rewrite.choice import Choice, Choose, decide, seconds_of, source_for
from pyg_accel.rewrite.cost import CostModel, GraphFeatures, Primitive, cost_model
from pyg_accel.rewrite.enumerate import associations_of
from pyg_accel.rewrite.equivalents import merge, simplify
from pyg_accel.rewrite.ir import Expr, leaves_of
from pyg_accel.rewrite.lower import Program
from pyg_accel.rewrite.matrices import Matrix
from pyg_accel.rewrite.prune import Associations
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["Decision", "Options", "given_of", "make_decision", "sort_of", "widths_of"]

DRIFT = 2  # a decision holds while no size has changed by more than this factor (section 6.4)


@dataclass(frozen=True)
class Options:
    """What :func:`~pyg_accel.optimize` was asked for.

    Attributes:
        train: forward and backward are to be fast, else forward alone.
        static: the features of this layer are the same in every call.
        upstream: parameters that learn come before this layer, so its features have gradients;
            None if nobody knows, and the features themselves have to be asked.
        choose: decides in place of sizes and cost models.
        cost: the cost model; by default that of the device.
        price_all: predict the time of every tree, also where sizes suffice: to explain.
    """

    train: bool = False
    static: bool = False
    upstream: bool | None = None
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
        kind: of the call's arguments, as compiled calls know them.
        cost: the cost model.
        features: of the matrices of edges, those that it was told.
        choice: the tree, and why.
        program: the tree, ready to run.
    """

    algebra: Algebra
    pruned: Associations
    given: Given
    sizes: Mapping[str, int]
    entries: int
    fresh: bool
    sampling: Sampling | None
    choice: Choice
    program: Program
    kind: str
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

    @property
    def source(self) -> str:
        return self._model.source

    @property
    def learned(self) -> Collection[str]:
        return self._model.learned

    def seconds(self, primitive: Primitive) -> float:
        return self.many([primitive])[0]

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
) -> Decision:
    """Choose a tree for a call."""
    given = given_of(algebra, call, options)
    if sampling is not None:
        given = replace(given, sampled=True, static=given.static - {"X", "Y"})
    pruned = associations_of(algebra.expr, algebra.also, given)
    model = options.cost or cost_model(call.x.device)

    features: dict[tuple[str, bool], GraphFeatures] = {}

    def graphs(name: str, transposed: bool) -> GraphFeatures:
        if (name, transposed) not in features:
            matrix = algebra.values[name](call)
            assert isinstance(matrix, Matrix)
            features[name, transposed] = GraphFeatures.of(matrix.graph, transposed=transposed)
        return features[name, transposed]

    slowest = None if call.halos is None else call.halos.slowest
    choice = decide(pruned, sizes, graphs, model, fresh=fresh, choose=options.choose,
                    slowest=slowest)  # fmt: skip
    if options.price_all:
        prices = {
            tree: seconds_of(bill, sizes, graphs, model, fresh=fresh)
            for tree, bill in pruned.bills.items()
        }
        choice = replace(choice, seconds=prices, source=source_for(prices, pruned, model))
    program = Program(choice.tree, algebra, given.static, sampled=sampling is not None)
    return Decision(algebra, pruned, given, sizes, call.edge_index.size(1), fresh, sampling,
                    choice, program, " ".join(map(sort_of, call.given.values())), model,
                    features)  # fmt: skip


def given_of(algebra: Algebra, call: Call, options: Options) -> Given:
    """Return which leaves learn and which stay the same."""
    upstream = options.upstream
    if upstream is None:  # without gradients every tensor looks like one that has none
        upstream = not torch.is_grad_enabled()
    learned: set[str] = set()
    static: set[str] = set()
    stays = options.static or (call.halos is not None and call.halos.stays(call.x))
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
    return Given(
        options.train, frozenset(learned), frozenset(static), spread=call.halos is not None
    )


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
        learned = value.dim() == 1 and value.requires_grad  # of features nobody asks
        return f"{value.dim()}{'f' if value.is_floating_point() else 'i'}{'g' if learned else ''}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join([sort_of(v) for v in value]) + ")"
    return f"{value}" if value is None or isinstance(value, (bool, int, float, str)) else "?"
