"""Plans of :func:`.gspmm`: layout, kernel and gradients of a kind of call, bound to a graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.base import winners_are_columns
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import has_sum, is_summed, operands_of, parse, shape_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.autograd import Gradient, OperatorPlan, Result
from pyg_accel.ops.gspmm_backward import (
    kinds_of_shapes,
    mean_share,
    plan_gradients,
    prod_coefficients,
)
from pyg_accel.ops.launch import bind_gspmm
from pyg_accel.ops.layout import find_layout
from pyg_accel.ops.passes import Passes, RowRule
from pyg_accel.ops.plan import computing, folding
from pyg_accel.ops.steps import SCATTER, Pass, passes_of

__all__ = ["EXTREMES", "REDUCES", "Reduction", "plan_of", "reduction_on", "rule_of"]

REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")
EXTREMES = ("max", "min")


def plan_of(
    graph: Graph, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> OperatorPlan | None:
    """Return the plan of a kind of call; None if it needs the registered operator.

    Args:
        graph: the graph.
        kind: formula, reductions, whether edge operands are in the order of the edge list, and
            whether a call returns a tensor.
        operands: by index.
        needs: which of them need gradients.
    """
    rule = rule_of(kind, operands, needs)
    if rule is None or not rule.fits(graph, operands):
        return None
    _, reduces, _, single = kind
    csr = graph.csr(edge_order=rule.edge_order)
    folds, folded = zip(*map(folding, operands, *zip(*rule.shapes, strict=True)), strict=True)
    backend, bound = bind_gspmm(csr, (rule.text,), reduces, folded, want_arg=rule.want_arg)
    launch = bound(csr)
    shapes = [(graph.num_edges if r == "none" else graph.num_rows, *rule.trailing) for r in reduces]
    if launch.accepts_any_layout:
        folds = (None,) * len(operands)
        if reduces != ("none",) and rule.trailings[rule.sides.index("u")] == rule.trailing:
            shapes = []
    results = 0 if single else len(reduces)
    plan = OperatorPlan(computing(launch, folds, shapes), {backend: None}, results)
    if any(needs):
        plan.differentiate_by(rule, rule.keeps, rule.sides)
    return plan


def rule_of(
    kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> "Reduction | None":
    """Return the rule of a kind of call; None if no plan serves it."""
    one_dtype = len({t.dtype for t in operands}) == 1 and operands[0].is_floating_point()
    if not one_dtype or 0 in map(Tensor.dim, operands):
        return None
    return reduction_of(*kind[:3], tuple(t.shape[1:] for t in operands), needs)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduction(RowRule):
    """A formula and its reductions, for operands of fixed shapes.

    Attributes:
        text: the formula.
        reduces: of its messages.
        trailing: shape of a row of the results.
        want_arg: the gradient needs winners.
    """

    text: str
    reduces: tuple[str, ...]
    trailing: tuple[int, ...]
    want_arg: bool

    def special(
        self, csr: CSR, turned: CSR | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Pass | None]:
        """Return operand 2 of the gradient of a plain mean, and its pass.

        None for other calls, and for double backward.
        """
        plain = self.text == "u0" and self.reduces == ("mean",)
        if turned is None or not plain or torch.is_grad_enabled():
            return None, None
        share, formula = mean_share(csr.rowptr, turned._replace(eid=None), dtype)
        return share, Pass((0,), True, False, (formula,), ("sum",), (1, 2))

    def bind(self, graph: Graph | Arrays, tensors: list[Any]) -> Gradient | None:
        """Plan the pass of kernels; None for products, which need operators."""
        return None if "prod" in self.reduces else super().bind(graph, tensors)

    def operators(self, graph: Graph | Arrays, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators; over an edge list, convert winners from edges to columns."""
        n, columns = len(self.sides), winners_are_columns(parse(self.text), self.reduces)
        if edges is not None and columns and n + 1 in self.indices:
            place = self.indices.index(n + 1)
            (source, _), winner = edges.ends(), tensors[place]
            sources = source.index_select(0, winner.clamp(min=0).flatten()).view(winner.shape)
            tensors[place] = torch.where(winner < 0, -1, sources)
        return super().operators(graph, edges, tensors)

    def passes(self, plan: Passes, arrays: Arrays | None, special: Pass | None) -> Sequence[Pass]:
        """Return the passes of :func:`plan_gradients`, and prepare the gradients of results."""
        n, ready, places = len(self.sides), plan.ready, plan.places
        for index, reduce in zip(count(n, 2), self.reduces, strict=False):
            if index not in ready:
                continue
            if reduce == "mean" and special is None:
                plan.divided.append((places[index], ready[index].dtype))
            elif reduce == "prod" and arrays is not None:
                read = tuple(places[i] for i in (*range(n), index))
                coefficients = partial(prod_coefficients, arrays, self.text)
                plan.first.append((coefficients, True, read, (Result(None, None),) * 2))
                places[index], places[index + 1] = plan.end, plan.end + 1
                ready[index + 1], plan.end = ready[index], plan.end + 2
        if special is not None:
            return [special]
        has_grad = tuple(n + 2 * r in ready for r in range(len(self.reduces)))
        kinds = kinds_of_shapes(self.shapes)
        steps = plan_gradients(self.text, self.reduces, self.needs, has_grad, kinds)
        lone = self.reduces in (("max",), ("min",))
        if steps and lone and winners_are_columns(parse(self.text), self.reduces):
            return [Pass((0,), True, False, (SCATTER,), ("sum",), (n, n + 1))]
        return passes_of(steps, ready)

    def gathered(self, part: Pass) -> tuple[int, ...] | None:
        """Return the shape of a row of the features that a pass gathers, if any."""
        text = "u0" if part.formulas == (SCATTER,) else part.formulas[0]
        sources = [o.index for o in operands_of(parse(text)) if o.side == "u"]
        if part.reduces == ("none",) or not sources:
            return None
        index = part.used[sources[0]]
        return self.trailings[index] if index < len(self.trailings) else self.trailing


@lru_cache(maxsize=4096)
def reduction_of(
    text: str,
    reduces: tuple[str, ...],
    edge_order: bool,
    trailings: tuple[torch.Size, ...],
    needs: tuple[bool, ...],
) -> Reduction | None:
    """The rule of a call; None for wrong arguments, and for operands that fold() expands."""
    formula = parse(text)
    read = {(o.index, o.side) for o in operands_of(formula)}
    if sorted(index for index, _ in read) != list(range(len(trailings))):
        return None
    if not reduces or not set(reduces) <= set(REDUCES):
        return None
    layout = find_layout(trailings, keep_last=has_sum(formula))
    rows = [layout.fold(torch.empty(1, *trailing, device="meta")) for trailing in trailings]
    if any(row.shape[1:].numel() != t.numel() for row, t in zip(rows, trailings, strict=True)):
        return None
    unfold = layout.unfold_summed if is_summed(formula) else layout.unfold
    shapes = shapes_of(rows)
    message = shape_of(formula, dict(enumerate(shapes)))
    trailing = unfold(torch.empty(1, *message, device="meta")).shape[1:]
    # Without edge operands and messages, the numbers of edges are not read.
    edge_order = edge_order and ("none" in reduces or "e" in {side for _, side in read})
    return reduction_on(text, reduces, needs, shapes, edge_order, trailings, trailing)


def reduction_on(
    text: str,
    reduces: tuple[str, ...],
    needs: tuple[bool, ...],
    shapes: Shapes,
    edge_order: bool = True,
    trailings: tuple[Any, ...] = (),
    trailing: torch.Size | None = None,
) -> Reduction:
    """The rule of a call on folded operands.

    Args:
        text: the formula.
        reduces: of its messages.
        needs: which operands need gradients.
        shapes: (heads, width) of the operands.
        edge_order: edge operands are in the order of the edge list.
        trailings: shapes of the rows of operands before folding.
        trailing: shape of a row of the results after unfolding.
    """
    formula, n = parse(text), len(shapes)
    sides = {o.index: o.side for o in operands_of(formula)}
    message = shape_of(formula, dict(enumerate(shapes)))
    steps = plan_gradients(text, reduces, needs, (True,) * len(reduces), kinds_of_shapes(shapes))
    used = (
        set(range(n))
        if "prod" in reduces
        else {o.index for step in steps for o in operands_of(step.formula)}
    )
    indices = [i for i in range(n) if i in used]
    extremes = [r for r, reduce in enumerate(reduces) if reduce in EXTREMES] if any(needs) else []
    grads = range(n, n + 2 * len(reduces), 2)
    return Reduction(
        edge_order, tuple([sides[i] for i in range(n)]), trailings or shapes, shapes, needs,
        message,
        (*indices, *(n + len(reduces) + place for place in range(len(extremes)))),
        (*indices, *(n + 2 * r + 1 for r in extremes), *grads), text=text, reduces=reduces,
        trailing=message if trailing is None else trailing, want_arg=bool(extremes),
    )  # fmt: skip
