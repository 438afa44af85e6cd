"""Plans of :func:`.gspmm`: layout, kernel and gradients of a kind of call, bound to a graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.base import Launch
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import has_sum, is_summed, operands_of, parse, shape_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.graph.csr import Edges
from pyg_accel.graph.facts import facts_of
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.autograd import NO_GRADIENT, Fold, Gradient, OperatorPlan, Result
from pyg_accel.ops.gspmm_backward import (
    backward_passes,
    degrees,
    kinds_of_shapes,
    mean_pass,
    plan_gradients,
    prod_coefficients,
)
from pyg_accel.ops.launch import bind_gspmm, kernel_key
from pyg_accel.ops.layout import find_layout
from pyg_accel.ops.plan import computing, folding, laying, reshaping
from pyg_accel.ops.steps import SCATTER, Pass, fit
from pyg_accel.runtime.cache import Bounded

__all__ = [
    "EXTREMES",
    "REDUCES",
    "Reduction",
    "plan_of",
    "reduction_on",
    "rule_of",
    "transposed_of",
]

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
    rows, device = rule.rows(graph.csr()), graph.device
    for t, side in zip(operands, rule.sides, strict=True):
        if t.size(0) != rows[side] or t.device != device:
            return None  # the operator says what is wrong
    csr = graph.csr(edge_order=rule.edge_order)
    folds, folded = rule.folded(operands)
    backend, bound = bind_gspmm(csr, rule.text, reduces, folded, want_arg=rule.want_arg)
    launch = bound(csr)
    shapes = [(rows["e" if r == "none" else "v"], *rule.trailing) for r in reduces]
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


class _Passes(NamedTuple):
    """The backward pass of calls of a kind on graphs of a kind; places are those of a Gradient.

    Attributes:
        folds: (place, change) of what is not read as it is.
        divided: places of gradients of means, and their dtypes.
        first: launches in front of the passes.
        launches: of a graph, return what is launched; whether on the transpose; places, results.
        zeros: operands that have no gradient, e.g. those of signs.
        backends: that run it.
        reusable: it serves other graphs of the kind.
    """

    folds: list[tuple[int, Any]]
    divided: list[tuple[int, torch.dtype]]
    first: list[tuple[Any, bool, tuple[int, ...], tuple[Result, ...]]]
    launches: list[tuple[Callable[[CSR], Launch], bool, tuple[int, ...], tuple[Result, ...]]]
    zeros: list[int]
    backends: dict[str, None]
    reusable: bool = False


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
        backward: passes of the gradient, by kind of graph, dtypes and strides of what they read.
    """

    text: str
    reduces: tuple[str, ...]
    edge_order: bool
    sides: tuple[str, ...]
    trailings: tuple[tuple[int, ...], ...]
    shapes: Shapes
    needs: tuple[bool, ...]
    message: tuple[int, int]
    trailing: torch.Size
    want_arg: bool
    keeps: tuple[int, ...]
    indices: tuple[int, ...]
    backward: Bounded[Any, _Passes] = field(default_factory=lambda: Bounded(64))

    def folded(self, operands: Sequence[Tensor]) -> tuple[tuple[Fold, ...], tuple[Tensor, ...]]:
        """Return what brings operands like these into the layout of kernels, and some in it."""
        folds, folded = zip(*map(folding, operands, *zip(*self.shapes, strict=True)), strict=True)
        return folds, folded

    def rows(self, csr: CSR) -> dict[str, int]:
        """Rows of operands by their side."""
        return {"u": csr.num_cols, "v": csr.num_rows, "e": csr.col.numel()}

    def bind(self, graph: Graph | Arrays, tensors: list[Any]) -> Gradient | None:
        """Plan the pass of kernels for saved tensors and gradients like these."""
        if "prod" in self.reduces or isinstance(graph, Arrays):
            return None
        csr = graph.csr(edge_order=self.edge_order)
        turned = transposed_of(graph, edge_order=self.edge_order) if self._turns else None
        return self._gradient(csr, turned, tensors, None)

    def operators(self, graph: Graph | Arrays, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators."""
        arrays = Arrays.of(graph, edge_order=self.edge_order, transposed=self._turns)
        turned = None if arrays.rowptr_t is None else arrays.transposed
        return self._gradient(arrays.csr, turned, tensors, arrays)

    @property
    def _turns(self) -> bool:
        """Whether a gradient needs the transposed graph."""
        return ("u", True) in zip(self.sides, self.needs, strict=True)

    def _gradient(
        self, csr: CSR, turned: CSR | None, tensors: list[Any], arrays: Arrays | None
    ) -> Gradient:
        """Plan the pass: of operators on arrays, if they are there."""
        like = next((t for t in tensors[len(self.keeps) :] if t is not None), None)
        if like is None:
            return NO_GRADIENT
        share, mean = mean_pass(self.text, self.reduces, csr, turned, like.dtype)
        key: Any = None
        if arrays is None:
            key = (
                mean, kind_of(csr, counts=turned is None), turned and kind_of(turned),
                *kernel_key(csr),
                *[None if t is None else (t.dtype, t.stride()) for t in tensors],
            )  # fmt: skip
        passes = None if key is None else self.backward.get(key)
        if passes is None:
            passes = self._passes(csr, turned, tensors, arrays, share, mean)
            if key is not None and passes.reusable:
                self.backward[key] = passes
        launches = [*passes.first]
        for bound, source, used, results in passes.launches:
            launch = bound(turned if source and turned is not None else csr)
            launches.append((launch.bound(), launch.listed, used, results))
        folds = [*passes.folds]
        for place, dtype in passes.divided:
            divisor = degrees(csr, dtype, stored=arrays is None)
            folds.append((place, partial(torch.div, other=divisor)))
        for i in passes.zeros:
            shape = (self.rows(csr)[self.sides[i]], *self.trailings[i])
            zeros = partial(torch.zeros, shape, dtype=like.dtype, device=like.device)
            launches.append((zeros, False, (), (Result(i, None),)))
        return Gradient(() if share is None else (share,), folds, launches, passes.backends)

    def _passes(
        self,
        csr: CSR,
        turned: CSR | None,
        tensors: list[Any],
        arrays: Arrays | None,
        share: Tensor | None,
        mean: Pass | None,
    ) -> "_Passes":
        """Return the passes of the gradient, of operators on arrays if they are there."""
        n, lay = len(self.sides), folding if arrays is None else laying
        indices = [*self.indices, *(n + 2 * r for r in range(len(self.reduces)))]
        places = {index: place for place, index in enumerate(indices)}
        found, end = _Passes([], [], [], [], [], {}), len(indices) + (share is not None)
        ready: dict[int, Tensor] = {}
        for place, (index, t) in enumerate(zip(indices, tensors, strict=True)):
            if t is None:
                continue
            fold, ready[index] = lay(t, *(self.shapes[index] if index < n else self.message))
            if fold is not None:
                found.folds.append((place, fold))
            r = place - len(self.keeps)
            if r >= 0 and self.reduces[r] == "mean" and mean is None:
                found.divided.append((place, t.dtype))
            elif r >= 0 and self.reduces[r] == "prod" and arrays is not None:
                read = tuple(places[i] for i in (*range(n), index))
                coefficients = partial(prod_coefficients, arrays, self.text)
                found.first.append((coefficients, True, read, (Result(None, None),) * 2))
                places[index], places[index + 1], end = end, end + 1, end + 2
                ready[index + 1] = ready[index]
        if share is not None:
            ready[n + 1], places[n + 1] = share, len(indices)
        passes = [mean] if mean is not None else backward_passes(
            self.text, self.reduces, self.needs, ready, self.shapes
        )  # fmt: skip
        like = next(t for t in ready.values() if t.is_floating_point())
        bounds: list[tuple[Pass, Callable[[CSR], Launch], list[Fold]]] = []
        raw = not found.divided and arrays is None
        for part in passes:
            of_pass = turned if part.source and turned is not None else csr
            if arrays is not None:
                bound = part.by_operators(arrays)
            else:
                name, bound = part.bind(of_pass, [ready[i] for i in part.used])
                raw = raw and bound(of_pass).accepts_any_layout
                found.backends[name] = None
            bounds.append((part, bound, self._fits(part, ready)))
            for i in part.operands:
                if i >= n:
                    ready[i] = like.new_empty(of_pass.col.numel(), self.message[0], 1)
                    places[i], end = end, end + 1
        if raw:
            found.folds.clear()
        for part, bound, fits in bounds:
            if part.formulas == (SCATTER,) and not raw and arrays is None:
                found.folds.extend([(places[i], _flat) for i in part.used])
            results = []
            for i, change in zip(part.operands, fits, strict=True):
                if raw and i < n and change is None and self._trailing(part) == self.trailings[i]:
                    results.append(Result(i, None))
                else:
                    to = self.trailings[i] if i < n else (self.message[0], 1)
                    results.append(Result(i if i < n else None, _reshaping(change, to)))
            used = tuple([places[i] for i in part.used])
            found.launches.append((bound, part.source, used, tuple(results)))
        computed = {i for part in passes for i in part.operands}
        found.zeros.extend([i for i, need in enumerate(self.needs)
                            if need and i not in computed])  # fmt: skip
        return found._replace(reusable=all(part.formulas != (SCATTER,) for part in passes))

    def _trailing(self, part: Pass) -> tuple[int, ...] | None:
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
    # Where nothing is of edges, their numbers are not read.
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
    """The kind of a call on operands of these (heads, width), which are the shapes of their rows.

    Args:
        text: the formula.
        reduces: of its messages.
        needs: which operands need gradients.
        shapes: (heads, width) of the operands.
        edge_order: edge operands are in the order of the edge list.
        trailings: shapes of the rows of operands, if they are others.
        trailing: shape of a row of the results, if it is another.
    """
    formula, n = parse(text), len(shapes)
    sides = {o.index: o.side for o in operands_of(formula)}
    message = shape_of(formula, dict(enumerate(shapes)))
    steps = plan_gradients(text, reduces, needs, (True,) * len(reduces), kinds_of_shapes(shapes))
    used = set(range(n)) if "prod" in reduces else {i for step in steps for i in step.used}
    indices = [i for i in range(n) if i in used]
    extremes = [r for r, reduce in enumerate(reduces) if reduce in EXTREMES] if any(needs) else []
    return Reduction(
        text, reduces, edge_order, tuple([sides[i] for i in range(n)]), trailings or shapes, shapes,
        needs, message, torch.Size(message) if trailing is None else trailing, bool(extremes),
        (*indices, *(n + len(reduces) + place for place in range(len(extremes)))),
        (*indices, *(n + 2 * r + 1 for r in extremes)),
    )  # fmt: skip
