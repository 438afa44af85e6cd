"""Plans of :func:`.gspmm`: layout, kernel and gradients of a kind of call, bound to a graph."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import situation
from pyg_accel.backends.spec import Shapes
from pyg_accel.cache import Bounded
from pyg_accel.facts import facts_of
from pyg_accel.formula import has_sum, is_summed, operands_of, parse, shape_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.gspmm_backward import (
    backward_passes,
    degrees,
    gradients,
    is_plain_mean,
    kinds_of_shapes,
    plan_gradients,
)
from pyg_accel.ops.launch import launch_of
from pyg_accel.ops.layout import contiguous_rows, find_layout
from pyg_accel.ops.plan import Fold, Gradient, Plan, Result, computing, folding
from pyg_accel.ops.steps import SCATTER, Pass, fit

__all__ = ["REDUCES", "plan_of", "transposed_of"]

REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")
_EXTREMES = ("max", "min")


def plan_of(
    graph: Graph, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> Plan | None:
    """Return the plan for calls like this one; None if they go through the registered operator.

    Args:
        graph: the graph.
        kind: formula, reductions, whether edge operands are in the order of the edge list, and
            whether a call returns a tensor.
        operands: by index.
        needs: which of them need gradients.
    """
    text, reduces, edge_order, single = kind
    trailings = tuple(t.shape[1:] for t in operands)
    if len({t.dtype for t in operands}) != 1 or not operands[0].is_floating_point():
        return None
    rule = None
    if 0 not in map(Tensor.dim, operands):
        rule = _reduction(text, reduces, edge_order, trailings, needs)
    if rule is None:
        return None
    rows, folds, given = rule.rows(graph), [], []
    for t, side, shape in zip(operands, rule.sides, rule.shapes, strict=True):
        if t.size(0) != rows[side] or t.device != graph.device:
            return None  # the operator says what is wrong
        fold, folded = folding(t, *shape)
        folds.append(fold)
        given.append(folded)
    csr = graph.csr(edge_order=rule.edge_order)
    name, launch = launch_of(csr, text, reduces, given, want_arg=rule.want_arg)
    shapes = [(rows["e" if r == "none" else "v"], *rule.trailing) for r in reduces]
    if launch.raw:
        folds = [None] * len(operands)
        if reduces != ("none",) and trailings[rule.sides.index("u")] == rule.trailing:
            shapes = []
    plan = Plan(computing(launch, folds, shapes), {name: None}, 0 if single else len(reduces))
    if any(needs):
        plan.rule, plan.keeps = rule, rule.keeps
    return plan


def transposed_of(graph: Graph, *, edge_order: bool) -> CSR:
    """Return the transposed graph, which stays if the graph does."""
    csr, turned = graph.csr(), graph.transposed(edge_order=edge_order)
    facts, of_turned = map(facts_of, (csr, turned))
    of_turned.uses = max(of_turned.uses, facts.uses)
    return turned


class _Reduction(NamedTuple):
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

    def rows(self, graph: Graph) -> dict[str, int]:
        """Rows of operands by their side."""
        return {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}

    def _turned(self, graph: Graph) -> CSR | None:
        needed = ("u", True) in zip(self.sides, self.needs, strict=True)
        return transposed_of(graph, edge_order=self.edge_order) if needed else None

    def bind(self, graph: Graph, tensors: list[Tensor | None]) -> Gradient | None:
        """Plan the pass for saved tensors and gradients like these."""
        if "prod" in self.reduces:
            return None
        n, csr = len(self.sides), graph.csr(edge_order=self.edge_order)
        turned, rows = self._turned(graph), self.rows(graph)
        plain = is_plain_mean(self.text, self.reduces, turned)
        indices = [*self.indices, *(n + 2 * r for r in range(len(self.reduces)))]
        folds: list[tuple[int, Any]] = []
        ready: dict[int, Tensor] = {}
        divided = []
        for place, (index, t) in enumerate(zip(indices, tensors, strict=True)):
            if t is None:
                continue
            fold, ready[index] = folding(t, *(self.shapes[index] if index < n else self.message))
            if fold is not None:
                folds.append((place, fold))
            r = place - len(self.keeps)
            if r >= 0 and self.reduces[r] == "mean" and not plain:
                divided.append((place, partial(torch.div, other=degrees(csr, t.dtype))))
        backends: dict[str, None] = {}
        left = {i for i, need in enumerate(self.needs) if need}
        like = next(iter(ready.values()))
        key = (self, plain, tuple(ready), like.dtype, like.device.type, situation())
        passes = None if plain else _passes.get(key)
        if passes is None:
            found = backward_passes(csr, turned, self.text, self.reduces, self.needs, ready,
                                    self.shapes)  # fmt: skip
            passes, known = [], dict(ready)
            for part in found:
                passes.append((part, self._fits(part, known), self._trailing(part)))
                known |= {i: like.new_empty(0, self.message[0], 1) for i in part.operands if i >= n}
            _passes[key] = passes
        constants = [(i, t) for i, t in ready.items() if i not in indices]
        places = {index: place for place, index in enumerate([*indices, *dict(constants)])}
        launches = []
        for part, _, _ in passes:
            graph_of_pass = turned if part.source and turned is not None else csr
            name, launch = part.launch(graph_of_pass, [ready[i] for i in part.used])
            launches.append(launch)
            for i in part.operands:
                if i >= n:
                    ready[i] = like.new_empty(rows["e"], self.message[0], 1)
                    places[i] = len(places)
            backends[name] = None
            left -= set(part.operands)
        raw = not divided and all(launch.raw for launch in launches)
        folds = [] if raw else folds + divided
        run: list[tuple[Callable[..., Any], bool, tuple[int, ...], tuple[Result, ...]]] = []
        for (part, fits, trailing), launch in zip(passes, launches, strict=True):
            if part.formulas == (SCATTER,) and not raw:
                flat = methodcaller("flatten", 1), methodcaller("contiguous")
                folds += [(places[i], change) for i in part.used for change in flat]
            results = []
            for i, change in zip(part.operands, fits, strict=True):
                if i >= n:
                    results.append(Result(None, _reshaping(change, ready[i].shape)))
                elif raw and change is None and trailing == self.trailings[i]:
                    results.append(Result(i, None))
                else:
                    shape = torch.Size((rows[self.sides[i]], *self.trailings[i]))
                    results.append(Result(i, _reshaping(change, shape)))
            used = tuple([places[i] for i in part.used])
            run.append((launch.bound(), launch.listed, used, tuple(results)))
        for i in left:  # e.g. of signs
            shape = torch.Size((rows[self.sides[i]], *self.trailings[i]))
            zeros = partial(torch.zeros, shape, dtype=like.dtype, device=like.device)
            run.append((zeros, False, (), (Result(i, None),)))
        return Gradient(tuple(t for _, t in constants), folds, run, backends)

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
        n, tensors = len(self.sides), dict(zip(self.indices, saved, strict=True))

        def folded(t: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
            return None if t is None else contiguous_rows(t.reshape(t.size(0), *shape))

        operands = [folded(tensors.get(i), shape) for i, shape in enumerate(self.shapes)]
        winners = [folded(tensors.get(n + 2 * r + 1), self.message)
                   for r in range(len(self.reduces))]  # fmt: skip
        csr = graph.csr(edge_order=self.edge_order)
        found = gradients(Arrays.join(csr, self._turned(graph)), operands, winners,
                          [folded(g, self.message) for g in grads], self.text, self.reduces,
                          self.needs, self.shapes)  # fmt: skip
        return [None if g is None else g.reshape(g.size(0), *trailing)
                for g, trailing in zip(found, self.trailings, strict=True)]  # fmt: skip


def _reshaping(fit: Fold, shape: torch.Size) -> Fold:
    """Fit a gradient, and bring it to its shape."""
    if fit is None:
        return methodcaller("reshape", shape)
    return lambda t: fit(t).reshape(shape)


# The passes of backward passes, which do not depend on the graph; how their results are fitted; and
# the shape of a row of these, see `_Reduction._trailing`.
_passes: Bounded[Any, list[tuple[Pass, list[Fold], torch.Size | None]]] = Bounded(4096)


@lru_cache(maxsize=4096)
def _reduction(
    text: str,
    reduces: tuple[str, ...],
    edge_order: bool,
    trailings: tuple[torch.Size, ...],
    needs: tuple[bool, ...],
) -> _Reduction | None:
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
    extremes = [r for r, reduce in enumerate(reduces) if reduce in _EXTREMES] if any(needs) else []
    keeps = [*keeps, *(n + len(reduces) + place for place in range(len(extremes)))]
    indices = [*indices, *(n + 2 * r + 1 for r in extremes)]
    sides = tuple(side for _, side in read)
    # Where nothing is of edges, their numbers are not read.
    edge_order = edge_order and ("e" in sides or "none" in reduces)
    return _Reduction(
        text, reduces, edge_order, sides, trailings, shapes, needs, message, trailing,
        bool(extremes), tuple(keeps), tuple(indices),
    )  # fmt: skip
