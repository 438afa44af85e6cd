"""Eager calls on a graph without a CSR form: passes over its edge list.

A plan depends on the kind of call but not on the graph, so that a new graph in each step costs only
the launches: one for the call, and one for the gradients of all operands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import atomics_allowed
from pyg_accel.backends.dispatch import asked_for, decide, named, variables_of_choices
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.edges import Output, Passes
from pyg_accel.backends.spec import widest
from pyg_accel.errors import BackendNotSupported
from pyg_accel.formula import Const, Formula, operands_of, without_narrow_sums
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges, for_autograd
from pyg_accel.ops.autograd import Fold, Gradient, OperatorPlan, Result
from pyg_accel.ops.passes import RowRule
from pyg_accel.ops.plan import folding
from pyg_accel.runtime.cache import Bounded
from pyg_accel.settings import settings

__all__ = [
    "EdgePlan", "EdgeRule", "Sizes", "degrees_of", "plan_by_edge", "plan_passes",
]  # fmt: skip

# Seconds per byte read or added by an edge, in excess of kernels over rows (H100).
EXTRA_SECONDS = 2e-13
HOST_SECONDS = 8e-5  # of the host: excess of the gradient over an edge list
# Of building a graph, its transpose and the plans of a few calls on an H100, host included.
BUILD_SECONDS, BUILD_SECONDS_AN_EDGE = 5e-4, 3e-10
MOST_COUNTED = 2**24  # edges of a node that float32 can count
_COUNTS = {"e": 0, "u": 1, "v": 2}  # places in Edges.sizes()
_STRIDED, _PLAIN = torch.strided, (Tensor, Parameter)

Launch = Callable[[Tensor, Sequence[int], Sequence[Tensor]], list[Tensor]]


@dataclass(slots=True, eq=False, kw_only=True)
class EdgePlan(OperatorPlan):
    """The execution of a kind of call on any graph that is not built.

    Attributes:
        sides: of the operands.
        counts: whether it reads the degrees of targets.
        bytes: read and added by an edge, in the gradient too.
    """

    sides: tuple[str, ...]
    counts: bool = False
    bytes: int


def computing(
    launch: Launch, folds: Sequence[Fold], counting: Launch | None = None
) -> Callable[[Graph, Edges, Sequence[Tensor]], list[Tensor]]:
    """Return a function that computes the results of a call, and the saved tensors.

    Args:
        launch: takes the edge list, its sizes and the operands, followed by the degrees of targets
            if there is ``counting``.
        folds: functions that bring each operand into the layout of the kernel.
        counting: a launch that computes the degrees too, as its first result.
    """
    changes = [(place, fold) for place, fold in enumerate(folds) if fold is not None]

    def compute(graph: Graph, edges: Edges, operands: Sequence[Tensor]) -> list[Tensor]:
        read = [*operands]
        for place, fold in changes:
            read[place] = fold(read[place])
        if counting is not None:
            counts = _counts_of(graph, read[0].dtype)
            if counts is None:
                graph.counts, *outs = counting(edges.edge_index, edges.sizes(), read)
                return outs
            read.append(counts)
        return launch(edges.edge_index, edges.sizes(), read)

    return compute


def plan_passes(
    edges: Edges,
    rule: "EdgeRule",
    passes: Passes,
    operands: Sequence[Tensor],
    *,
    results: int = 0,
    counts: bool = False,
    last: bool = False,
    numbered: bool = False,
) -> EdgePlan | None:
    """Return a plan; None if no backend is faster than building the graph.

    Args:
        edges: a graph of the kind.
        rule: states the gradient.
        passes: of the call.
        operands: of the call.
        results: number of returned results, in a list; 0 for a tensor.
        counts: passes read the degrees of targets, after the operands.
        last: the last pass computes the result.
        numbered: results have a row for each edge, as edge operands have.
    """
    of, device = rule.rule, edges.edge_index.device
    if any(t.device != device or 0 in t.shape[1:] for t in operands):
        return None
    numbered = numbered or "e" in of.sides
    if numbered and (edges.loops is not None or not of.edge_order):
        return None
    dtype, counting = operands[0].dtype, None
    folds, folded = zip(*map(folding, operands, *zip(*of.shapes, strict=True)), strict=True)
    if counts:
        bound = bind_passes(edges, ((COUNT,), *passes), folded, dtype)
        counting = bound and bound[1]
        folded = (*folded, _one_of(edges, dtype))
    bound = bind_passes(edges, passes, folded, dtype)
    if bound is None or (counts and counting is None):
        return None
    name, launch = bound
    if last:
        launch = _reversed(launch)
    moved = sum(t.stride(0) * t.element_size() for t in folded)
    moved += dtype.itemsize * of.message[0] * of.message[1] * max(results, 1)
    plan = EdgePlan(
        computing(launch, folds, counting), {name: None}, results, sides=of.sides, counts=counts,
        bytes=moved * (1 + 2 * any(of.needs)),
    )  # fmt: skip
    if any(of.needs):
        plan.differentiate_by(rule, of.keeps, of.sides)
    return plan


def _reversed(launch: Launch) -> Launch:
    """Return a launch with the results in reverse order."""
    return lambda edge_index, sizes, operands: launch(edge_index, sizes, operands)[::-1]


def _one_of(edges: Edges, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the layout of the degrees of targets."""
    return torch.empty(1, 1, 1, dtype=accumulate(dtype), device=edges.edge_index.device)


Sizes = dict[int, tuple[int, int]]


class EdgeRule(NamedTuple):
    """The gradient of calls on an edge list.

    Attributes:
        rule: of the same call on the rows of a graph, with the same saved tensors.
        gradients: takes the rule, (heads, width) of the inputs by index, and the index of the
            degrees of targets; returns the outputs of each pass, and their operands.
    """

    rule: RowRule
    gradients: Callable[[Any, Sizes, int], tuple[Passes, list[int]]]

    def bind(self, edges: Edges, tensors: list[Any]) -> Gradient | None:
        """Plan the passes for saved tensors and gradients like these."""
        rule, (ready, folds) = self.rule, self.rule.inputs(tensors)
        grad = next(p for p in range(len(rule.keeps), len(tensors)) if tensors[p] is not None)
        dtype, degrees = tensors[grad].dtype, max(rule.indices) + 1
        ready[degrees] = _one_of(edges, dtype)
        sizes = {i: (t.size(1), t.size(2)) for i, t in ready.items()}
        passes, order = self.gradients(rule, sizes | dict(enumerate(rule.shapes)), degrees)
        launches: list[Any] = [
            (_zeros_of(rule.sides[i], rule.trailings[i]), True, (grad,), (Result(i, None),))
            for i, need in enumerate(rule.needs) if need and i not in order
        ]  # fmt: skip
        if not order:
            return Gradient((), [], launches, {})
        used = {o.index for part in passes for out in part for o in operands_of(out.formula)}
        every = [ready.get(i) if i in used else None for i in range(degrees + 1)]
        bound = bind_passes(edges, passes, every, dtype)
        if bound is None:
            return None
        places = [*sorted(zip(rule.indices, count(), strict=False)), (degrees, len(tensors))]
        reads = tuple([place for index, place in places if index in used])
        folds = [(place, fold) for place, fold in folds if place in reads]
        launches.insert(0, (bound[1], True, reads, tuple([Result(i, None) for i in order])))
        return Gradient((), folds, launches, {bound[0]: None})

    def operators(self, graph: Graph, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators on the rows of the graph."""
        return self.rule.operators(graph, edges, tensors)

    @staticmethod
    def output(rule: RowRule, index: int, formula: Formula, sizes: Sizes) -> Output:
        """Return the output that is the gradient of an operand."""
        return Output(without_narrow_sums(formula, sizes), rule.sides[index], rule.shapes[index],
                      trailing=tuple(rule.trailings[index]))  # fmt: skip


def _zeros_of(side: str, trailing: Sequence[int]) -> Launch:
    """Return a launch that makes a gradient of zeros."""
    return lambda edge_index, sizes, read: [read[0].new_zeros(sizes[_COUNTS[side]], *trailing)]


_plans: Bounded[tuple[Any, ...], EdgePlan | None] = Bounded(4096)


def _pays_to_build(graph: Graph, seconds: float) -> bool:
    """Return whether to build a graph before a call, given the seconds that this saves.

    The seconds add up, and the graph is built when they reach the time of building: at most twice
    the cost of the best choice in hindsight.

    Args:
        graph: a graph that is not built.
        seconds: excess of the call and its gradient on the edge list.
    """
    if graph.extra_seconds >= BUILD_SECONDS + BUILD_SECONDS_AN_EDGE * graph.num_edges:
        return True
    graph.extra_seconds += seconds
    return False


def plan_by_edge(
    graph: Graph, kind: tuple[Any, ...], operands: Any, make: Callable[..., EdgePlan | None]
) -> tuple[EdgePlan, Edges] | None:
    """Return the plan and the edges of an eager call on a graph; None if it must be built.

    Args:
        graph: the graph.
        kind: of the call, apart from the operands.
        operands: of the call.
        make: takes the edges, kind, operands and whether each needs a gradient; makes the plan.
    """
    edges = graph.edge_list()
    if edges is None or not atomics_allowed():
        return None
    recorded, facts = torch.is_grad_enabled(), []
    for t in operands:
        if type(t) not in _PLAIN or t.layout is not _STRIDED or t.dim() == 0:
            return None
        needs = recorded and t.requires_grad
        facts.append((t.shape[1:], t.stride(), t.dtype, t.device, needs))
    key: Any = (make, kind, edges.edge_index.dtype, edges.target, edges.loops is None, graph.device,
                named.get(), settings.changes, *variables_of_choices(), *facts)  # fmt: skip
    plan = _plans.get(key, _MISSING)
    if plan is _MISSING:
        plan = make(edges, kind, operands, tuple([fact[-1] for fact in facts]))
        if plan is not None:
            plan.requested = asked_for()
        _plans[key] = plan
    sizes = edges.sizes()
    if plan is None or (plan.counts and sizes[0] >= MOST_COUNTED):
        return None
    for t, side in zip(operands, plan.sides, strict=True):
        if t.size(0) != sizes[_COUNTS[side]]:
            return None
    host = HOST_SECONDS if plan.rule is not None else 0.0
    if _pays_to_build(graph, host + plan.bytes * sizes[0] * EXTRA_SECONDS):
        return None
    return plan, edges


_MISSING: Any = object()


COUNT = Output(Const(1.0), "v", (1, 1), wide=True)  # of the edges of each target


def _counts_of(graph: Graph, dtype: torch.dtype) -> Tensor | None:
    """Return the degrees of targets [num_rows, 1, 1], for operands of a dtype; None if unknown."""
    counts = graph.counts
    return counts if counts is None or counts.dtype == accumulate(dtype) else None


@for_autograd
def degrees_of(graph: Graph, dtype: torch.dtype) -> Tensor:
    """Return the degrees of targets [num_rows, 1], float32 or float64; stored with the graph."""
    counts, edges = _counts_of(graph, dtype), None if graph.built else graph.edge_list()
    if counts is None and edges is not None and edges.sizes()[0] < MOST_COUNTED:
        key = (graph.device, edges.edge_index.dtype, edges.target, edges.loops is None, dtype,
               named.get(), settings.changes)  # fmt: skip
        bound = _counting.get(key, _MISSING)
        if bound is _MISSING:
            bound = _counting[key] = bind_passes(edges, ((COUNT,),), [], dtype)
        if bound is not None:
            (counts,) = bound[1](edges.edge_index, edges.sizes(), [])
    if counts is None:
        counts = graph.rowptr.diff().to(accumulate(dtype)).view(-1, 1, 1)
    graph.counts = counts
    return counts.view(-1, 1)


_counting: Bounded[Any, tuple[str, Launch] | None] = Bounded(64)


def bind_passes(
    edges: Edges, passes: Passes, operands: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[str, Launch] | None:
    """Return the backend of passes, and its launch; None if building the graph is faster.

    Args:
        edges: a graph of the kind.
        passes: to run.
        operands: [rows, H, F]; None for unread ones.
        dtype: of the features.
    """
    sizes: list[tuple[int, ...]] = [tuple(t.shape[1:]) for t in operands if t is not None]
    sizes += [output.shape for part in passes for output in part]
    texts = tuple(str(output.formula) for part in passes for output in part)
    shapes = tuple((size[0], size[1]) for size in sizes)
    spec = OpSpec.of_any_size("edge_passes", edges.edge_index.device.type, dtype, *widest(shapes),
                              formulas=texts, shapes=shapes)  # fmt: skip
    try:
        decision = decide(spec)
    except BackendNotSupported:
        return None
    name, kernel = decision.backend.name, decision.kernel
    if name == "reference" != asked_for():
        return None
    if kernel.bind is not None:
        return name, kernel.bind(edges, passes, operands)
    target, loops, there = edges.target, edges.loops is not None, [t is not None for t in operands]

    def launch(edge_index: Tensor, sizes: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        read = [next(remaining) if is_there else None for is_there in there]
        outs: list[Tensor] = kernel.run(
            Edges(edge_index, target, sizes[2], sizes[1], sizes[0] - sizes[6] if loops else None),
            passes,
            read,
        )
        return outs

    return name, launch
