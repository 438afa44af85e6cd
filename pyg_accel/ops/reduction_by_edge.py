"""Plans of :func:`.gspmm` on graphs that have no CSR form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import winners_are_columns
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.edges import Output, Passes
from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    map_children,
    operands_of,
    parse,
    shape_of,
    times,
)
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.autograd import Gradient, Result
from pyg_accel.ops.by_edge import COUNT, EdgePlan, bind_passes, computing, zeros_of
from pyg_accel.ops.gspmm_backward import kinds_of_shapes, operand_gradients
from pyg_accel.ops.plan import folding
from pyg_accel.ops.reduction import EXTREMES, Reduction, rule_of

__all__ = ["edge_plan_of", "without_narrow_sums"]


def edge_plan_of(
    edges: Edges, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> EdgePlan | None:
    """Return the plan for calls like this one; None if they need the rows of a graph.

    Args:
        edges: the graph.
        kind: formula, reductions, whether edge operands are in the order of the edge list, and
            whether a call returns a tensor.
        operands: by index.
        needs: which of them need gradients.
    """
    rule, (_, reduces, _, single) = rule_of(kind, operands, needs), kind
    device = edges.edge_index.device
    odd = any(t.device != device or 0 in t.shape[1:] for t in operands)
    if rule is None or odd or "prod" in reduces:
        return None
    by_edge = "e" in rule.sides or "none" in reduces
    if by_edge and (edges.loops is not None or not rule.edge_order):
        return None
    pairs = [folding(t, *shape) for t, shape in zip(operands, rule.shapes, strict=True)]
    folds, folded = zip(*pairs, strict=True)
    passes = _forward(rule)
    dtype, counting = operands[0].dtype, None
    if "mean" in reduces:
        bound = bind_passes(edges, ((COUNT,), *passes), folded, dtype)
        if bound is None:
            return None
        counting = bound[1]
        folded = (*folded, _one_of(edges, dtype))
    bound = bind_passes(edges, passes, folded, dtype)
    if bound is None:
        return None
    name, launch = bound
    moved = sum(t.stride(0) * t.element_size() for t in folded) + dtype.itemsize * (
        rule.message[0] * rule.message[1] * len(reduces)
    )
    plan = EdgePlan(
        computing(launch, folds, counting), {name: None}, 0 if single else len(reduces),
        sides=rule.sides, counts=counting is not None, bytes=moved * (1 + 2 * any(needs)),
    )  # fmt: skip
    if any(needs):
        plan.differentiate_by(_Rule(rule), rule.keeps, rule.sides)
    return plan


def _one_of(edges: Edges, dtype: torch.dtype) -> Tensor:
    """Return a tensor like the degrees of targets."""
    return torch.empty(1, 1, 1, dtype=accumulate(dtype), device=edges.edge_index.device)


def _share(index: int) -> Formula:
    """Return 1 / degree of the target, whose degree is an operand."""
    return Binary("div", Const(1.0), Operand("v", index))


def without_narrow_sums(formula: Formula, sizes: dict[int, tuple[int, int]]) -> Formula:
    """Return a formula without the sums of one column."""
    formula = map_children(formula, lambda part: without_narrow_sums(part, sizes))
    narrow = isinstance(formula, Sum) and shape_of(formula.arg, sizes)[1] == 1
    return formula.arg if narrow and isinstance(formula, Sum) else formula


def _forward(rule: Reduction) -> Passes:
    """The passes of a call: all reductions, then the winners of maxima and minima."""
    n = len(rule.sides)
    formula = without_narrow_sums(parse(rule.text), dict(enumerate(rule.shapes)))
    first, winners = [], []
    results = n + ("mean" in rule.reduces)
    for r, reduce in enumerate(rule.reduces):
        message = formula
        if reduce == "mean":
            message = times(formula, _share(n))
        elif reduce == "sqsum":
            message = Binary("mul", formula, formula)
        extreme = reduce in EXTREMES
        side = "e" if reduce == "none" else "v"
        first.append(Output(message, side, rule.message, reduce if extreme else "sum",
                            trailing=tuple(rule.trailing)))  # fmt: skip
        if extreme and rule.want_arg:
            winners.append(Output(formula, "v", rule.message, "winner", of=results + r))
    return (tuple(first), tuple(winners)) if winners else (tuple(first),)


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    """How calls are differentiated."""

    reduction: Reduction

    def bind(self, edges: Edges, tensors: list[Tensor | None]) -> Gradient | None:
        """Plan the pass for saved tensors and gradients like these."""
        rule = self.reduction
        n, count = len(rule.sides), len(rule.reduces)
        indices = rule.indices
        ready: dict[int, Tensor] = {}
        folds = []
        for place, (index, t) in enumerate(zip(indices, tensors, strict=True)):
            if t is None:
                continue
            fold, ready[index] = folding(t, *(rule.shapes[index] if index < n else rule.message))
            if fold is not None:
                folds.append((place, fold))
        places = {index: place for place, index in enumerate(indices) if index in ready}
        degrees = n + 2 * count
        if "mean" in rule.reduces:
            like = next(t for t in tensors if t is not None and t.is_floating_point())
            ready[degrees], places[degrees] = _one_of(edges, like.dtype), len(indices)
        grads = tuple(n + 2 * r in ready for r in range(count))
        kinds = kinds_of_shapes(rule.shapes)
        known = dict(enumerate(kinds)) | {degrees: (1, 1)}
        wanted = operand_gradients(
            rule.text, rule.reduces, rule.needs, grads, known, _share(degrees)
        )
        sizes = {i: (t.size(1), t.size(2)) for i, t in ready.items()}
        sizes |= dict(enumerate(rule.shapes))
        outputs = tuple(
            Output(without_narrow_sums(formula, sizes), rule.sides[i], rule.shapes[i],
                   trailing=tuple(rule.trailings[i]))
            for i, formula in wanted.items()
        )  # fmt: skip
        used = {o.index for output in outputs for o in operands_of(output.formula)}
        like = next(t for t in tensors[len(rule.keeps) :] if t is not None)
        given = len(rule.keeps) + next(r for r, is_there in enumerate(grads) if is_there)
        launches: list[Any] = [
            (zeros_of(rule.sides[i], rule.trailings[i]), True, (given,), (Result(i, None),))
            for i, need in enumerate(rule.needs) if need and i not in wanted
        ]  # fmt: skip
        if not outputs:
            return Gradient((), [], launches, {})
        every = [ready.get(i) if i in used else None for i in range(degrees + 1)]
        bound = bind_passes(edges, (outputs,), every, like.dtype)
        if bound is None:
            return None
        reads = tuple(places[i] for i in range(degrees + 1) if i in used)
        folds = [(place, fold) for place, fold in folds if place in reads]
        results = tuple(Result(i, None) for i in wanted)
        return Gradient((), folds, [(bound[1], True, reads, results), *launches], {bound[0]: None})

    def operators(self, graph: Graph, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators, on the rows of the graph."""
        rule, n = self.reduction, len(self.reduction.sides)
        if edges and winners_are_columns(parse(rule.text), rule.reduces) and n + 1 in rule.indices:
            place = rule.indices.index(n + 1)
            (source, _), winner = edges.ends(), tensors[place]
            sources = source.index_select(0, winner.clamp(min=0).flatten()).view(winner.shape)
            tensors[place] = torch.where(winner < 0, -1, sources.to(graph.col.dtype))
        return replace(rule, edge_order=True).operators(graph, None, tensors)
