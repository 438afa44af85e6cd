"""Plans of :func:`.attention` on graphs that have no CSR form.

Forward: the largest score of each target; the exponentials of scores and their sums; the weighted
sum of values. Backward: the gradient of the weights, its sum over each target, and the gradients of
the values; then the gradients of what scores read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.edges import Output
from pyg_accel.backends.spec import Shapes
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    Sum,
    Unary,
    operands_of,
    parse,
    shape_of,
)
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.attention_backward import operand_gradients
from pyg_accel.ops.attention_unfused import differentiated, extent
from pyg_accel.ops.autograd import Gradient, Result
from pyg_accel.ops.by_edge import EdgePlan, Launch, bind_passes, computing, zeros_of
from pyg_accel.ops.gspmm_backward import kinds_of_shapes
from pyg_accel.ops.plan import folding
from pyg_accel.ops.reduction_by_edge import without_narrow_sums

__all__ = ["attention_plan_of"]


def attention_plan_of(
    edges: Edges,
    kind: tuple[Any, ...],
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
) -> EdgePlan | None:
    """Return the plan for calls like this one; None if they need the rows of a graph.

    Args:
        edges: the graph.
        kind: formulas of scores and values, and whether edge operands are in the order of the edge
            list.
        operands: of both, by index.
        needs: which of them need gradients.
    """
    score, value, edge_order = kind
    both = parse(score), parse(value)
    sides = {o.index: o.side for formula in both for o in operands_of(formula)}
    read = {(o.side, o.index) for formula in both for o in operands_of(formula)}
    if set(sides) != set(range(len(operands))) or len(read) != len(sides):
        return None
    dtype, device = operands[0].dtype, edges.edge_index.device
    if not dtype.is_floating_point or any(
        t.dim() > 3 or t.dtype != dtype or t.device != device for t in operands
    ):
        return None
    if "e" in sides.values() and (edges.loops is not None or not edge_order):
        return None
    sizes: Shapes = tuple((*t.shape[1:], 1, 1)[:2] for t in operands)
    heads, width = extent(score, value, sizes)
    if shape_of(both[0], dict(enumerate(sizes)))[1] != 1 or 0 in (heads, width):
        return None
    pairs = [folding(t, *size) for t, size in zip(operands, sizes, strict=True)]
    folds, folded = zip(*pairs, strict=True)
    rule = _Rule(score, value, needs, sizes, tuple(t.shape[1:] for t in operands), (heads, width),
                 edge_order)  # fmt: skip
    n, known = len(operands), dict(enumerate(sizes))
    scores, values = (without_narrow_sums(formula, known) for formula in both)
    share = Unary("exp", Binary("sub", scores, Operand("v", n)))
    weight = Binary("div", Operand("e", n + 1), Operand("v", n + 2))
    recorded = any(needs)
    passes = (
        (Output(scores, "v", (heads, 1), "max", kept=False),),
        (Output(share, "e", (heads, 1), wide=True, kept=recorded),
         Output(share, "v", (heads, 1), wide=True, kept=recorded)),
        (Output(Binary("mul", values, weight), "v", (heads, width)),),
    )  # fmt: skip
    bound = bind_passes(edges, passes, list(folded), dtype)
    if bound is None:
        return None
    name, launch = bound
    moved = sum(t.stride(0) * t.element_size() for t in folded) + heads * width * dtype.itemsize
    plan = EdgePlan(
        computing(_reversed(launch), folds), {name: None},
        sides=tuple(sides[i] for i in range(n)), bytes=moved * (1 + 2 * recorded),
    )  # fmt: skip
    if recorded:
        plan.differentiate_by(rule, (*range(n), n + 1, n + 2), plan.sides)
    return plan


def _reversed(launch: Launch) -> Launch:
    """The result first, which is what the last pass computes."""
    return lambda edge_index, sizes, operands: launch(edge_index, sizes, operands)[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    """How calls are differentiated.

    Attributes:
        score: formula of the scores.
        value: of the values.
        needs: which operands need gradients.
        sizes: (heads, width) of each.
        trailings: shape of each without its rows.
        extent: (heads, width) of the result.
        edge_order: edge operands are in the order of the edge list.
    """

    score: str
    value: str
    needs: tuple[bool, ...]
    sizes: Shapes
    trailings: tuple[torch.Size, ...]
    extent: tuple[int, int]
    edge_order: bool

    def bind(self, edges: Edges, tensors: list[Tensor | None]) -> Gradient | None:
        """Plan the passes for operands, sums and exponentials of scores, and a gradient."""
        n, (heads, width) = len(self.sizes), self.extent
        number = heads, 1
        ready, folds = [], []
        wanted = (*self.sizes, number, number, self.extent)
        for place, (t, size) in enumerate(zip(tensors, wanted, strict=True)):
            assert t is not None
            fold, folded = folding(t, *size)
            ready.append(folded)
            if fold is not None:
                folds.append((place, fold))
        total, share, grad = Operand("v", n), Operand("e", n + 1), Operand("v", n + 2)
        of_weight, sums = Operand("e", n + 3), Operand("v", n + 4)
        whole = {**dict(enumerate(self.sizes)), n: number, n + 1: number, n + 2: self.extent}
        score, value = (without_narrow_sums(parse(t), whole) for t in (self.score, self.value))
        weight = Binary("div", share, total)
        inner: Formula = Binary("mul", grad, value)
        inner = Binary("mul", weight, inner if width == 1 else Sum(inner))
        of_score = Binary("sub", of_weight, Binary("mul", weight, sums))
        shapes = (*self.sizes, number, number, self.extent, number, number)
        kinds = dict(enumerate(kinds_of_shapes(shapes)))
        sides = {o.index: o.side for f in (score, value) for o in operands_of(f)}
        outputs = [Output(inner, "e", number, wide=True, kept=False),
                   Output(inner, "v", number, wide=True, kept=False)]  # fmt: skip
        later: list[Output] = []
        order: list[list[int]] = [[], []]
        gradients = operand_gradients(score, value, self.needs, kinds, grad, weight, of_score)
        for i, formula in gradients.items():
            late = any(o.index == of_weight.index for o in operands_of(formula))
            if isinstance(formula, Sum) and self.sizes[i][1] == 1:  # which the output is anyway
                formula = formula.arg
            output = Output(without_narrow_sums(formula, kinds), sides[i], self.sizes[i],
                            trailing=tuple(self.trailings[i]))  # fmt: skip
            (later if late else outputs).append(output)
            order[late].append(i)
        launches: list[Any] = [
            (zeros_of(sides[i], self.trailings[i]), True, (len(ready) - 1,), (Result(i, None),))
            for i, need in enumerate(self.needs) if need and i not in gradients
        ]  # fmt: skip
        passes = (tuple(outputs), tuple(later)) if later else (tuple(outputs),)
        read: list[Tensor | None] = [*ready]
        bound = bind_passes(edges, passes, read, ready[-1].dtype)
        if bound is None:
            return None
        reads = tuple(range(len(ready)))
        results = tuple(Result(i, None) for i in (*order[0], *order[1]))
        return Gradient((), folds, [(bound[1], True, reads, results), *launches], {bound[0]: None})

    def operators(self, graph: Graph, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators, by the parts of a call on the rows of the graph."""
        order, run = differentiated(
            graph, self.score, self.value, self.needs, self.sizes, edge_order=self.edge_order
        )
        used = (*range(len(self.needs)), len(tensors) - 1)
        return Gradient((), (), [(run, False, used, tuple(Result(i, None) for i in order))], {})
