"""Rules with gradients by passes over the rows of a graph and of its transpose.

A rule lists its passes once. They launch kernels in eager calls, and call differentiable operators
if the pass is differentiated again or observed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.spec import Shapes
from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.graph.csr import Edges
from pyg_accel.graph.facts import cache_of, facts_of
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.autograd import NO_GRADIENT, Fold, Gradient, Result
from pyg_accel.ops.launch import kernel_key
from pyg_accel.ops.plan import folding, reshaping
from pyg_accel.ops.steps import SCATTER, Pass, fit, flat
from pyg_accel.runtime.cache import Bounded
from pyg_accel.runtime.machine import is_captured

__all__ = ["Passes", "RowRule"]


@dataclass(slots=True, eq=False)
class Passes:
    """The backward pass of a kind of call on a kind of graph.

    Attributes:
        ready: examples of the inputs, by index in the formulas of passes.
        places: places of the inputs when the pass runs, as in :class:`.Gradient`.
        end: the place of the next intermediate result.
        folds: (place, function) for inputs that change their layout first.
        divided: places and dtypes of gradients of means.
        first: launches before the passes.
        launches: functions from a graph to a launch; whether on the transpose; places; results.
        zeros: operands with a gradient of zeros, e.g. operands of signs.
        backends: names of the backends.
    """

    ready: dict[int, Tensor]
    places: dict[int, int]
    end: int
    folds: list[tuple[int, Any]] = field(default_factory=list)
    divided: list[tuple[int, torch.dtype]] = field(default_factory=list)
    first: list[Any] = field(default_factory=list)
    launches: list[Any] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    backends: dict[str, None] = field(default_factory=dict)


_passes: Bounded[Any, Passes] = Bounded(4096)


@dataclass(frozen=True, eq=False)
class RowRule(ABC):
    """The gradient of calls on the rows of a graph.

    Attributes:
        edge_order: edge operands are in the order of the edge list.
        sides: of the operands, by index.
        trailings: shape of each without its rows.
        shapes: (heads, width) of each as the kernel reads them.
        needs: which of them need gradients.
        message: (heads, width) of the messages.
        keeps: places of saved tensors in operands and all results.
        indices: indices of these and of the gradients of results in the formulas of passes.
    """

    edge_order: bool
    sides: tuple[str, ...]
    trailings: tuple[tuple[int, ...], ...]
    shapes: Shapes
    needs: tuple[bool, ...]
    message: tuple[int, int]
    keeps: tuple[int, ...]
    indices: tuple[int, ...]

    def fits(self, graph: Graph, operands: Sequence[Tensor]) -> bool:
        """Return whether operands belong to a graph; if not, the operator says what is wrong."""
        rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
        return all(t.size(0) == rows[side] and t.device == graph.device
                   for t, side in zip(operands, self.sides, strict=True))  # fmt: skip

    @abstractmethod
    def passes(self, plan: Passes, arrays: Arrays | None, special: Pass | None) -> Sequence[Pass]:
        """Return the passes; results after the gradients of operands are inputs of later ones.

        Args:
            plan: inputs of the passes; may be extended.
            arrays: of the graph, if operators run the passes.
            special: pass of :meth:`special`.
        """

    def special(
        self, csr: CSR, turned: CSR | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Pass | None]:
        """Return the second operand and the only pass of a special gradient, or None."""
        return None, None

    def bind(self, graph: Graph | Arrays, tensors: list[Any]) -> Gradient | None:
        """Plan the pass of kernels for saved tensors and gradients like these."""
        if isinstance(graph, Arrays):
            return None
        csr, turned = graph.csr(edge_order=self.edge_order), None
        if self.turns:
            turned = graph.transposed(edge_order=self.edge_order)
            facts, of_turned = facts_of(graph.csr()), facts_of(turned)
            of_turned.uses = max(of_turned.uses, facts.uses)  # it stays if the graph does
        return self._gradient(csr, turned, tensors, None)

    def operators(self, graph: Graph | Arrays, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators."""
        edge_order = self.edge_order or edges is not None
        arrays = Arrays.of(graph, edge_order=edge_order, transposed=self.turns)
        turned = None if arrays.rowptr_t is None else arrays.transposed
        return self._gradient(arrays.csr, turned, tensors, arrays)

    def inputs(self, tensors: list[Any]) -> tuple[dict[int, Tensor], list[tuple[int, Any]]]:
        """Return examples of folded inputs by index, and the (place, function) of folds."""
        ready, folds = dict[int, Tensor](), []
        for place, (index, t) in enumerate(zip(self.indices, tensors, strict=True)):
            if t is not None:
                fold, ready[index] = folding(t, *self.size(index))
                if fold is not None:
                    folds.append((place, fold))
        return ready, folds

    def size(self, index: int) -> tuple[int, int]:
        """Return (heads, width) of an input, by its index in the formulas of passes."""
        return self.shapes[index] if index < len(self.shapes) else self.message

    @property
    def turns(self) -> bool:
        """Whether a gradient needs the transposed graph."""
        return ("u", True) in zip(self.sides, self.needs, strict=True)

    def _gradient(
        self, csr: CSR, turned: CSR | None, tensors: list[Any], arrays: Arrays | None
    ) -> Gradient:
        """Plan the pass; with arrays, a pass of operators."""
        like = next((t for t in tensors[len(self.keeps) :] if t is not None), None)
        if like is None:
            return NO_GRADIENT
        share, special = self.special(csr, turned, like.dtype)
        key: Any = None
        if arrays is None:
            key = (
                self, special, kind_of(csr, counts=turned is None), turned and kind_of(turned),
                *kernel_key(csr),
                *[None if t is None else (t.dtype, t.stride()) for t in tensors],
            )  # fmt: skip
        plan = None if key is None else _passes.get(key)
        if plan is None:
            plan, reusable = self._bind(csr, turned, tensors, arrays, share, special)
            if key is not None and reusable:
                _passes[key] = plan
        launches = [*plan.first]
        for bound, source, used, results in plan.launches:
            launch = bound(turned if source and turned is not None else csr)
            launches.append((launch.bound(), launch.listed, used, results))
        folds = [*plan.folds]
        for place, dtype in plan.divided:
            divisor = _degrees(csr, dtype, stored=arrays is None)
            folds.append((place, partial(torch.div, other=divisor)))
        rows = {"u": csr.num_cols, "v": csr.num_rows, "e": csr.col.numel()}
        for i in plan.zeros:
            shape = (rows[self.sides[i]], *self.trailings[i])
            zeros = partial(torch.zeros, shape, dtype=like.dtype, device=like.device)
            launches.append((zeros, False, (), (Result(i, None),)))
        return Gradient(() if share is None else (share,), folds, launches, plan.backends)

    def _bind(
        self,
        csr: CSR,
        turned: CSR | None,
        tensors: list[Any],
        arrays: Arrays | None,
        share: Tensor | None,
        special: Pass | None,
    ) -> tuple[Passes, bool]:
        """Return the passes for a kind of graph, and whether other graphs may use them."""
        n = len(self.sides)
        places, end = {index: place for place, index in enumerate(self.indices)}, len(self.indices)
        plan = Passes({}, places, end + (share is not None))
        plan.ready, plan.folds = self.inputs(tensors)
        if share is not None:
            plan.ready[n + 1], places[n + 1] = share, end
        passes, bounds = self.passes(plan, arrays, special), []
        ready = plan.ready
        like = next(t for t in ready.values() if t.is_floating_point())
        raw = not plan.divided and arrays is None
        for part in passes:
            of_pass = turned if part.source and turned is not None else csr
            bound = None if arrays is None else part.by_operators(arrays)
            if bound is None:
                name, bound = part.bind(of_pass, [ready[i] for i in part.used])
                raw = raw and bound(of_pass).accepts_any_layout
                plan.backends[name] = None
            bounds.append((part, bound, part.sizes(ready)))
            for i in part.operands:
                if i >= n:
                    ready[i] = like.new_empty(of_pass.col.numel(), self.message[0], 1)
                    places[i], plan.end = plan.end, plan.end + 1
        if raw:
            plan.folds.clear()
        for part, bound, sizes in bounds:
            if part.formulas == (SCATTER,) and not raw and arrays is None:
                plan.folds.extend([(places[i], flat) for i in part.used])
            results, number = [], (self.message[0], 1)
            for i, size in zip(part.operands, sizes, strict=True):
                shape, to = (self.shapes[i], self.trailings[i]) if i < n else (number, number)
                same = raw and i < n and shape == size and self.gathered(part) == to
                change = None if shape == size else partial(fit, shape=shape)
                finish = None if same else _reshaping(change, to)
                results.append(Result(i if i < n else None, finish))
            used = tuple([places[i] for i in part.used])
            plan.launches.append((bound, part.source, used, tuple(results)))
        computed = {i for part in passes for i in part.operands}
        plan.zeros.extend([i for i, need in enumerate(self.needs)
                            if need and i not in computed])  # fmt: skip
        ready.clear()
        return plan, all(part.formulas != (SCATTER,) for part in passes)

    def gathered(self, part: Pass) -> tuple[int, ...] | None:
        """Return the shape of a row of the result for unfolded inputs, if known."""
        return None


def _reshaping(fit: Fold, trailing: Sequence[int]) -> Fold:
    """Fit a gradient, and reshape its rows."""
    reshape = reshaping(trailing)
    return reshape if fit is None else lambda t: reshape(fit(t))


def _degrees(csr: CSR, dtype: torch.dtype, *, stored: bool) -> Tensor:
    """Return the divisor of the gradient of a mean, [num_rows, 1, 1].

    Args:
        csr: the graph.
        dtype: of the gradient.
        stored: keep it with the graph.
    """
    cache, key = cache_of(csr) if stored else {}, ("degrees", dtype)
    degrees: Tensor | None = cache.get(key)
    if degrees is None:
        degrees = csr.rowptr.diff().clamp(min=1).view(-1, 1, 1).to(dtype)
        if not is_captured(csr.col):
            cache[key] = degrees
    return degrees
