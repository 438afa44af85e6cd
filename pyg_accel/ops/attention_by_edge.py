"""Plans of :func:`.attention` on graphs that have no CSR form.

Forward: the largest score of each target; the exponentials of scores and their sums; the weighted
sum of values. Backward: the gradient of the weights, its sum over each target, and the gradients of
the values; then the gradients of what scores read.
"""

from collections.abc import Callable, Sequence
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
    gradient,
    operands_of,
    parse,
    shape_of,
)
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.attention_unfused import extent
from pyg_accel.ops.by_edge import EdgePlan, Launch, bind_passes, computing, zeros_of
from pyg_accel.ops.gspmm_backward import kinds_of_shapes
from pyg_accel.ops.plan import Gradient, Result, folding
from pyg_accel.ops.reduction_by_edge import without_narrow_sums

__all__ = ["attention_plan_of"]


def attention_plan_of(
    edges: Edges,
    kind: tuple[Any, ...],
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
    attention: Callable[..., Tensor],
) -> EdgePlan | None:
    """Return the plan for calls like this one; None if they need the rows of a graph.

    Args:
        edges: the graph.
        kind: formulas of scores and values, and whether edge operands are in the order of the edge
            list.
        operands: of both, by index.
        needs: which of them need gradients.
        attention: runs a call on the rows of a graph.
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
                 edge_order, attention)  # fmt: skip
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
        attention: runs a call on the rows of a graph.
    """

    score: str
    value: str
    needs: tuple[bool, ...]
    sizes: Shapes
    trailings: tuple[torch.Size, ...]
    extent: tuple[int, int]
    edge_order: bool
    attention: Callable[..., Tensor]

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
        first = [Output(inner, "e", number, wide=True, kept=False),
                 Output(inner, "v", number, wide=True, kept=False)]  # fmt: skip
        second: list[Output] = []
        order: list[int] = []
        later: list[int] = []
        launches: list[Any] = []
        for i, need in enumerate(self.needs):
            if not need:
                continue
            by_value = gradient(value, i, Binary("mul", grad, weight), kinds)
            by_score = gradient(score, i, of_score, kinds)
            parts = [part for part in (by_value, by_score) if part is not None]
            if not parts:
                zeros = zeros_of(sides[i], self.trailings[i])
                launches.append((zeros, True, (len(ready) - 1,), (Result(i, None),)))
                continue
            if len(parts) == 2 and self.sizes[i][1] == 1:  # of one width, or none is repeated
                parts = [p if shape_of(p, kinds)[1] == 1 else Sum(p) for p in parts]
            formula = parts[0] if len(parts) == 1 else Binary("add", parts[0], parts[1])
            output = Output(without_narrow_sums(formula, kinds), sides[i], self.sizes[i],
                            trailing=tuple(self.trailings[i]))  # fmt: skip
            (first if by_score is None else second).append(output)
            (order if by_score is None else later).append(i)
        passes = (tuple(first), tuple(second)) if second else (tuple(first),)
        read: list[Tensor | None] = [*ready]
        bound = bind_passes(edges, passes, read, ready[-1].dtype)
        if bound is None:
            return None
        reads = tuple(range(len(ready)))
        results = tuple(Result(i, None) for i in (*order, *later))
        return Gradient((), folds, [(bound[1], True, reads, results), *launches], {bound[0]: None})

    def differentiate(
        self, graph: Graph, saved: Sequence[Tensor], grads: Sequence[Tensor | None], edges: Edges
    ) -> list[Tensor | None]:
        """Run the call again on the rows of the graph, and differentiate that."""
        recorded = torch.is_grad_enabled()
        found: list[Tensor | None] = [None] * len(self.needs)
        with torch.enable_grad():
            operands = [t.view_as(t) if recorded else t.detach().requires_grad_(need)
                        for t, need in zip(saved, self.needs, strict=False)]  # fmt: skip
            out = self.attention(graph, self.score, self.value, operands,
                                 edge_order=self.edge_order)  # fmt: skip
            wanted = [i for i, need in enumerate(self.needs) if need]
            parts = torch.autograd.grad(out, [operands[i] for i in wanted], grads[0],
                                        create_graph=recorded, allow_unused=True)  # fmt: skip
        for i, part in zip(wanted, parts, strict=True):
            found[i] = torch.zeros_like(saved[i]) if part is None else part
        return found
