"""Plans of :func:`.gspmm`: layout, kernel and gradients of a kind of call, bound to a graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.base import Launch
from pyg_accel.backends.spec import Shapes
from pyg_accel.formula import has_sum, is_summed, operands_of, parse, shape_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.graph.facts import facts_of
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.gspmm_backward import (
    backward_passes,
    degrees,
    gradients,
    is_plain_mean,
    kinds_of_shapes,
    mean_pass,
    plan_gradients,
)
from pyg_accel.ops.launch import bind_gspmm, kernel_key
from pyg_accel.ops.layout import contiguous_rows, find_layout
from pyg_accel.ops.plan import Fold, Gradient, OperatorPlan, Result, computing, folding, reshaping
from pyg_accel.ops.steps import SCATTER, Pass, fit
from pyg_accel.runtime.cache import Bounded

__all__ = ["EXTREMES", "REDUCES", "Reduction", "plan_of", "rule_of", "transposed_of"]

REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")
EXTREMES = ("max", "min")


def plan_of(
    graph: Graph, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> OperatorPlan | None:
    """Return the plan for calls like this one; None if they go through the registered operator.

    Args:
        graph: the graph.
        kind: formula, reductions, whether edge operands are in the order of the edge list, and
            whether a call returns a tensor.
        operands: by index.
        needs: which of them need gradients.
    """
    rule = rule_of(kind, operands, needs)
    if rule is None:
        return None
    _, reduces, _, single = kind
    rows, device = rule.rows(graph), graph.device
    for t, side in zip(operands, rule.sides, strict=True):
        if t.size(0) != rows[side] or t.device != device:
            return None  # the operator says what is wrong
    csr = graph.csr(edge_order=rule.edge_order)
    bound = rule.bound(csr, operands)
    launch, folds = bound.launch(csr), bound.folds
    shapes = [(rows["e" if r == "none" else "v"], *rule.trailing) for r in reduces]
    if launch.accepts_any_layout:
        folds = (None,) * len(operands)
        if reduces != ("none",) and rule.trailings[rule.sides.index("u")] == rule.trailing:
            shapes = []
    results = 0 if single else len(reduces)
    plan = OperatorPlan(computing(launch, folds, shapes), {bound.backend: None}, results)
    if any(needs):
        plan.differentiate_by(rule, rule.keeps, rule.sides)
    return plan


def rule_of(
    kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> "Reduction | None":
    """Return what is known of calls like this one; None if no plan serves them."""
    one_dtype = len({t.dtype for t in operands}) == 1 and operands[0].is_floating_point()
    if not one_dtype or 0 in map(Tensor.dim, operands):
        return None
    return reduction_of(*kind[:3], tuple(t.shape[1:] for t in operands), needs)


def transposed_of(graph: Graph, *, edge_order: bool) -> CSR:
    """Return the transposed graph, which stays if the graph does."""
    csr, turned = graph.csr(), graph.transposed(edge_order=edge_order)
    facts, of_turned = map(facts_of, (csr, turned))
    of_turned.uses = max(of_turned.uses, facts.uses)
    return turned


class _Bound(NamedTuple):
    """The forward pass of calls of a kind on graphs of a kind.

    Attributes:
        backend: that runs it.
        launch: of a graph, returns what launches it.
        folds: what brings each operand into the layout of the kernel.
    """

    backend: str
    launch: Callable[[CSR], Launch]
    folds: tuple[Fold, ...]


class _BoundPass(NamedTuple):
    """A pass of the gradient, on graphs of a kind; the places are those of :class:`Gradient`."""

    launch: Callable[[CSR], Launch]
    source: bool
    used: tuple[int, ...]
    results: tuple[Result, ...]


class _BoundGradient(NamedTuple):
    """The backward pass of calls of a kind on graphs of a kind.

    Attributes:
        folds: (place, change) of what is not read as it is.
        divided: places of gradients of means, and their dtypes.
        passes: in their order.
        zeros: operands that have no gradient, e.g. those of signs.
        backends: that run it.
    """

    folds: list[tuple[int, Any]]
    divided: list[tuple[int, torch.dtype]]
    passes: list[_BoundPass]
    zeros: list[int]
    backends: dict[str, None]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A formula and its reductions, on operands of these shapes.

    Attributes:
        text: the formula.
        reduces: of its messages.
        edge_order: edge operands are in the order of the edge list.
        sides: of the operands, by index.
        trailings: shape of each without its rows.
        shapes: (heads, width) of each as the kernel reads them.
        needs: which of them need gradients.
        message: (heads, width) of the messages.
        trailing: shape of a row of the results.
        want_arg: the gradient needs winners.
        keeps: what it reads, by places in operands, results and winners.
        indices: what each of these is in the backward pass, see :func:`plan_gradients`.
        forward: what runs it, by kind of graph, and dtypes and strides of the operands.
        backward: what runs its gradient, likewise.
    """

    text: str
    reduces: tuple[str, ...]
    edge_order: bool
    sides: tuple[str, ...]
    trailings: tuple[torch.Size, ...]
    shapes: Shapes
    needs: tuple[bool, ...]
    message: tuple[int, int]
    trailing: torch.Size
    want_arg: bool
    keeps: tuple[int, ...]
    indices: tuple[int, ...]
    forward: Bounded[Any, _Bound] = field(default_factory=lambda: Bounded(64))
    backward: Bounded[Any, _BoundGradient] = field(default_factory=lambda: Bounded(64))

    def bound(self, csr: CSR, operands: Sequence[Tensor]) -> _Bound:
        """Return what runs calls like this one on graphs like this one."""
        key = (kind_of(csr), *kernel_key(csr), *[(t.dtype, t.stride()) for t in operands])
        found = self.forward.get(key)
        if found is None:
            pairs = [folding(t, *shape) for t, shape in zip(operands, self.shapes, strict=True)]
            folds, folded = zip(*pairs, strict=True)
            name, launch = bind_gspmm(csr, self.text, self.reduces, folded, want_arg=self.want_arg)
            found = self.forward[key] = _Bound(name, launch, folds)
        return found

    def rows(self, graph: Graph) -> dict[str, int]:
        """Rows of operands by their side."""
        return {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}

    def turned(self, graph: Graph, *, edge_order: bool) -> CSR | None:
        """Return the transposed graph if a gradient needs it."""
        needed = ("u", True) in zip(self.sides, self.needs, strict=True)
        return transposed_of(graph, edge_order=edge_order) if needed else None

    def bind(self, graph: Graph, tensors: list[Tensor | None]) -> Gradient | None:
        """Plan the pass for saved tensors and gradients like these."""
        if "prod" in self.reduces:
            return None
        csr = graph.csr(edge_order=self.edge_order)
        turned = self.turned(graph, edge_order=self.edge_order)
        like = next(t for t in tensors[len(self.keeps) :] if t is not None)
        share, mean = None, None
        if is_plain_mean(self.text, self.reduces, turned):
            assert turned is not None
            share, mean = mean_pass(csr, turned, like.dtype)
        key = (
            mean, kind_of(csr, counts=turned is None), turned and kind_of(turned), *kernel_key(csr),
            *[None if t is None else (t.dtype, t.stride()) for t in tensors],
        )  # fmt: skip
        found = self.backward.get(key)
        if found is None:
            found, reusable = self._bind(csr, turned, tensors, share, mean)
            if reusable:
                self.backward[key] = found
        launches = []
        for part in found.passes:
            launch = part.launch(turned if part.source and turned is not None else csr)
            launches.append((launch.bound(), launch.listed, part.used, part.results))
        folds = [*found.folds, *((place, partial(torch.div, other=degrees(csr, dtype)))
                                 for place, dtype in found.divided)]  # fmt: skip
        rows = self.rows(graph)
        for i in found.zeros:
            shape = (rows[self.sides[i]], *self.trailings[i])
            zeros = partial(torch.zeros, shape, dtype=like.dtype, device=like.device)
            launches.append((zeros, False, (), (Result(i, None),)))
        constants = () if share is None else (share,)
        return Gradient(constants, folds, launches, found.backends)

    def _bind(
        self,
        csr: CSR,
        turned: CSR | None,
        tensors: list[Tensor | None],
        share: Tensor | None,
        mean: Pass | None,
    ) -> tuple[_BoundGradient, bool]:
        """What runs the pass on graphs of a kind, and whether it serves others than this one."""
        n = len(self.sides)
        indices = [*self.indices, *(n + 2 * r for r in range(len(self.reduces)))]
        folds: list[tuple[int, Any]] = []
        divided: list[tuple[int, torch.dtype]] = []
        ready: dict[int, Tensor] = {}
        for place, (index, t) in enumerate(zip(indices, tensors, strict=True)):
            if t is None:
                continue
            fold, ready[index] = folding(t, *(self.shapes[index] if index < n else self.message))
            if fold is not None:
                folds.append((place, fold))
            r = place - len(self.keeps)
            if r >= 0 and self.reduces[r] == "mean" and mean is None:
                divided.append((place, t.dtype))
        places = {index: place for place, index in enumerate(indices)}
        if share is not None:
            ready[n + 1], places[n + 1] = share, len(indices)
        passes = [mean] if mean is not None else backward_passes(
            self.text, self.reduces, self.needs, ready, self.shapes
        )  # fmt: skip
        left = {i for i, need in enumerate(self.needs) if need}
        like = next(t for t in ready.values() if t.is_floating_point())
        made: list[tuple[Pass, Callable[[CSR], Launch], list[Fold]]] = []
        backends: dict[str, None] = {}
        raw = not divided
        for part in passes:
            of_pass = turned if part.source and turned is not None else csr
            name, bound = part.bind(of_pass, [ready[i] for i in part.used])
            raw = raw and bound(of_pass).accepts_any_layout
            made.append((part, bound, self._fits(part, ready)))
            for i in part.operands:
                if i >= n:
                    ready[i] = like.new_empty(of_pass.col.numel(), self.message[0], 1)
                    places[i] = len(places)
            backends[name] = None
            left -= set(part.operands)
        if raw:
            folds = []
        found = _BoundGradient(folds, divided, [], sorted(left), backends)
        for part, bound, fits in made:
            if part.formulas == (SCATTER,) and not raw:
                folds += [(places[i], _flat) for i in part.used]
            results = []
            for i, change in zip(part.operands, fits, strict=True):
                if raw and i < n and change is None and self._trailing(part) == self.trailings[i]:
                    results.append(Result(i, None))
                else:
                    to = self.trailings[i] if i < n else (self.message[0], 1)
                    results.append(Result(i if i < n else None, _reshaping(change, to)))
            used = tuple([places[i] for i in part.used])
            found.passes.append(_BoundPass(bound, part.source, used, tuple(results)))
        return found, all(part.formulas != (SCATTER,) for part in passes)

    def _trailing(self, part: Pass) -> torch.Size | None:
        """Shape of a row of what a pass computes of operands as they are; None if it has another.

        It is that of the features that are gathered.
        """
        text = "u0" if part.formulas == (SCATTER,) else part.formulas[0]
        sources = [o.index for o in operands_of(parse(text)) if o.side == "u"]
        if part.reduces == ("none",) or not sources:
            return None
        index = part.used[sources[0]]
        return self.trailings[index] if index < len(self.trailings) else self.trailing

    def _fits(self, part: Pass, tensors: dict[int, Tensor]) -> list[Fold]:
        """What brings the results of a pass to the shapes of the operands."""
        n, number = len(self.sides), (self.message[0], 1)
        wanted = [self.shapes[i] if i < n else number for i in part.operands]
        return [None if mine == size else partial(fit, shape=mine)
                for mine, size in zip(wanted, part.sizes(tensors), strict=True)]  # fmt: skip

    def differentiate(
        self, graph: Graph, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Compute the gradients by operators."""
        turned = self.turned(graph, edge_order=self.edge_order)
        return self.by_operators(graph.csr(edge_order=self.edge_order), turned, saved, grads)

    def by_operators(
        self,
        csr: CSR,
        turned: CSR | None,
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Compute the gradients by operators on a graph and its transpose."""
        n, tensors = len(self.sides), dict(zip(self.indices, saved, strict=True))

        def folded(t: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
            return None if t is None else contiguous_rows(t.reshape(t.size(0), *shape))

        operands = [folded(tensors.get(i), shape) for i, shape in enumerate(self.shapes)]
        winners = [folded(tensors.get(n + 2 * r + 1), self.message)
                   for r in range(len(self.reduces))]  # fmt: skip
        found = gradients(Arrays.join(csr, turned), operands, winners,
                          [folded(g, self.message) for g in grads], self.text, self.reduces,
                          self.needs, self.shapes)  # fmt: skip
        return [None if g is None else g.reshape(g.size(0), *trailing)
                for g, trailing in zip(found, self.trailings, strict=True)]  # fmt: skip


def _flat(t: Tensor) -> Tensor:
    return t.flatten(1).contiguous()


def _reshaping(fit: Fold, trailing: Sequence[int]) -> Fold:
    """Fit a gradient, and bring its rows to their shape."""
    reshape = reshaping(trailing)
    return reshape if fit is None else lambda t: reshape(fit(t))


@lru_cache(maxsize=4096)
def reduction_of(
    text: str,
    reduces: tuple[str, ...],
    edge_order: bool,
    trailings: tuple[torch.Size, ...],
    needs: tuple[bool, ...],
) -> Reduction | None:
    """The kind of a call; None if it is wrong, or if operands are expanded to meet."""
    formula, n = parse(text), len(trailings)
    read = sorted({(o.index, o.side) for o in operands_of(formula)})
    if [index for index, _ in read] != list(range(n)):
        return None
    if not reduces or not set(reduces) <= set(REDUCES):
        return None
    layout = find_layout(trailings, keep_last=has_sum(formula))
    rows = [layout.fold(torch.empty(1, *trailing, device="meta")) for trailing in trailings]
    if any(row.shape[1:].numel() != t.numel() for row, t in zip(rows, trailings, strict=True)):
        return None
    shapes = tuple((row.size(1), row.size(2)) for row in rows)
    message = shape_of(formula, dict(enumerate(shapes)))
    unfold = layout.unfold_summed if is_summed(formula) else layout.unfold
    trailing = unfold(torch.empty(1, *message, device="meta")).shape[1:]
    steps = plan_gradients(text, reduces, needs, (True,) * len(reduces), kinds_of_shapes(shapes))
    used = set(range(n)) if "prod" in reduces else {i for step in steps for i in step.used}
    keeps = indices = [i for i in range(n) if i in used]
    extremes = [r for r, reduce in enumerate(reduces) if reduce in EXTREMES] if any(needs) else []
    keeps = [*keeps, *(n + len(reduces) + place for place in range(len(extremes)))]
    indices = [*indices, *(n + 2 * r + 1 for r in extremes)]
    sides = tuple(side for _, side in read)
    # Where nothing is of edges, their numbers are not read.
    edge_order = edge_order and ("e" in sides or "none" in reduces)
    return Reduction(
        text, reduces, edge_order, sides, trailings, shapes, needs, message, trailing,
        bool(extremes), tuple(keeps), tuple(indices),
    )  # fmt: skip
