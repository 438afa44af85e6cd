"""How eager calls run on a graph that has no CSR form: passes over its edge list.

A plan depends on the kind of a call alone, not on the graph, so that a graph that is new in each
step costs nothing but the launches: one for the call, and one for the gradients of all operands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import atomics_allowed
from pyg_accel.backends.dispatch import (
    asked_for,
    decide,
    named,
    prefer_backend,
    variables_of_choices,
)
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.edges import Output, Passes
from pyg_accel.backends.notes import chosen
from pyg_accel.errors import BackendNotSupported
from pyg_accel.formula import Const
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges, for_autograd
from pyg_accel.ops.operator import each_gradient, is_batch
from pyg_accel.ops.plan import Fold, arguments
from pyg_accel.runtime.cache import Bounded
from pyg_accel.settings import settings

__all__ = [
    "COUNT", "EdgeGradient", "EdgePlan", "EdgeRule", "bind_passes", "degrees_of", "run_by_edge",
]  # fmt: skip

# Seconds a byte that an edge reads or adds, beyond what kernels take that have rows (H100).
EXTRA_SECONDS = 2e-13
HOST_SECONDS = 8e-5  # that the gradient over an edge list takes the host beside that over rows
# Of building a graph, its transpose and the plans of a few calls on an H100, host included.
BUILD_SECONDS, BUILD_SECONDS_AN_EDGE = 5e-4, 3e-10
MOST_COUNTED = 2**24  # edges of a node that float32 can count
_COUNTS = {"e": 0, "u": 1, "v": 2}  # places in Edges.sizes()
_STRIDED, _PLAIN = torch.strided, (Tensor, Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack

Launch = Callable[[Tensor, Sequence[int], Sequence[Tensor]], list[Tensor]]


@dataclass(slots=True, eq=False)
class EdgeGradient:
    """A backward pass that is not differentiated again.

    Attributes:
        launch: of the edge list, its sizes and the tensors ``reads``.
        reads: places of tensors: saved ones, then gradients of results, then degrees.
        folds: (place, change) of tensors that are not read as they are.
        operands: whose gradients it computes.
        zeros: (operand, trailing shape) of those without gradient.
    """

    launch: Launch
    reads: tuple[int, ...]
    folds: Sequence[tuple[int, Callable[[Tensor], Tensor]]]
    operands: tuple[int, ...]
    zeros: Sequence[tuple[int, tuple[int, ...]]] = ()


class EdgeRule(Protocol):
    """How calls of a kind are differentiated."""

    def bind(self, edges: Edges, tensors: list[Tensor | None]) -> EdgeGradient | None:
        """Plan the pass for saved tensors and gradients like these."""

    def differentiate(
        self, graph: Graph, edges: Edges, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Compute the gradients by operators, on the rows of the graph."""


@dataclass(slots=True, eq=False)
class EdgePlan:
    """How calls of a kind run on any graph.

    Attributes:
        launch: of the edge list, its sizes and the operands, with degrees behind them.
        sides: of the operands.
        folds: (place, change) of operands that are not read as they are.
        counting: launches the same where the degrees of targets are not known yet, which are its
            first result then; None if it does not read them.
        results: how many a call returns, in a list; 0 if it returns a tensor. What is computed
            behind them is only saved.
        backends: that run it.
        bytes: that an edge reads and adds, the gradient included.
        rule: how it is differentiated; None if no gradient is needed.
        keeps: what the gradient reads, by places in operands and results.
        saves: the operands among them that are features of nodes.
        asked: the backend that was asked for by name, or ``"auto"``.
        gradients: backward passes, by strides of what they read.
    """

    launch: Launch
    sides: tuple[str, ...]
    folds: Sequence[tuple[int, Callable[[Tensor], Tensor]]]
    counting: Launch | None
    results: int
    backends: dict[str, None]
    bytes: int
    rule: EdgeRule | None = None
    keeps: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    asked: str = "auto"
    gradients: dict[Any, EdgeGradient] = field(default_factory=dict)

    def compute(self, graph: Graph, edges: Edges, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, and what is only saved."""
        read = [*operands]
        for place, fold in self.folds:
            read[place] = fold(read[place])
        if self.counting is not None:
            counts = _counts_of(graph, read[0].dtype)
            if counts is None:
                graph.counts, *outs = self.counting(edges.edge_index, edges.sizes(), read)
                return outs
            read.append(counts)
        return self.launch(edges.edge_index, edges.sizes(), read)

    def backward(
        self,
        graph: Graph,
        edges: Edges,
        saved: Sequence[Tensor],
        grads: tuple[Tensor | None, ...],
    ) -> Sequence[Tensor | None]:
        """Compute gradients that are differentiated again, observed, or many at once."""
        if any(map(is_batch, grads)):
            return each_gradient(lambda *one: tuple(self.backward(graph, edges, saved, one)), grads)
        assert self.rule is not None
        graph = graph.build(edges.edge_index)
        with prefer_backend(self.asked):
            return self.rule.differentiate(graph, edges, saved, grads)


_plans: Bounded[tuple[Any, ...], EdgePlan | None] = Bounded(4096)


def _pays_to_build(graph: Graph, seconds: float) -> bool:
    """Return whether a graph is to be built before a call that takes so much longer if it is not.

    If not, the time is added to the account of the graph, which is built when that reaches the time
    of building: at most twice the best in hindsight, whatever follows.

    Args:
        graph: a graph that is not built.
        seconds: what the call and its gradient take longer on the edge list.
    """
    if graph.extra_seconds >= BUILD_SECONDS + BUILD_SECONDS_AN_EDGE * graph.num_edges:
        return True
    graph.extra_seconds += seconds
    return False


def run_by_edge(
    graph: Graph, make: Callable[..., EdgePlan | None], kind: tuple[Any, ...], operands: Any
) -> Any:
    """Run an eager call on a graph that is not built.

    Args:
        graph: the graph.
        make: of the edges, the kind, operands and whether each needs a gradient, makes the plan.
        kind: what else it depends on.
        operands: of the call.

    Returns:
        The result, or a list of them; None if the graph has to be built.
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
    key: Any = (make, kind, edges.edge_index.dtype, edges.loops is None, graph.device, named.get(),
                settings.changes, *variables_of_choices(), *facts)  # fmt: skip
    plan = _plans.get(key, _MISSING)
    if plan is _MISSING:
        plan = make(edges, kind, operands, tuple([fact[-1] for fact in facts]))
        if plan is not None:
            plan.asked = asked_for()
        _plans[key] = plan
    sizes = edges.sizes()
    if plan is None or (plan.counting is not None and sizes[0] >= MOST_COUNTED):
        return None
    for t, side in zip(operands, plan.sides, strict=True):
        if t.size(0) != sizes[_COUNTS[side]]:
            return None
    host = HOST_SECONDS if plan.rule is not None else 0.0
    if _pays_to_build(graph, host + plan.bytes * sizes[0] * EXTRA_SECONDS):
        return None
    given = arguments.tensors
    if plan.saves and given:
        operands = [t.clone() if i in plan.saves and any(t is g or t._base is g for g in given)
                    else t for i, t in enumerate(operands)]  # fmt: skip
    names = chosen.get()
    if names is not None:
        names.update(plan.backends)
    if plan.rule is None:
        outs = plan.compute(graph, edges, operands)
    else:
        outs = _apply(plan, graph, edges, *operands)
    return [*outs[: plan.results]] if plan.results else outs[0]


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
        key = (graph.device, edges.edge_index.dtype, edges.loops is None, dtype, named.get(),
               settings.changes)  # fmt: skip
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
    """Return the backend that runs passes, and its launch; None if none is faster than to build.

    Args:
        edges: a graph of the kind.
        passes: to run.
        operands: [rows, H, F]; None for those that nothing reads.
        dtype: of the features.
    """
    sizes: list[tuple[int, ...]] = [tuple(t.shape[1:]) for t in operands if t is not None]
    sizes += [output.shape for part in passes for output in part]
    heads, width = (max(1, *(size[d] for size in sizes)) for d in (0, 1))
    texts = tuple(str(output.formula) for part in passes for output in part)
    shapes = tuple((size[0], size[1]) for size in sizes)
    spec = OpSpec.of_any_size("edge_passes", edges.edge_index.device.type, dtype, heads, width,
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

    def launch(edge_index: Tensor, sizes: Sequence[int], given: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(given)
        read = [next(rest) if is_there else None for is_there in there]
        found: list[Tensor] = kernel.run(
            Edges(edge_index, target, sizes[2], sizes[1], sizes[0] - sizes[6] if loops else None),
            passes,
            read,
        )
        return found

    return name, launch


class _ByEdge(torch.autograd.Function):
    """A call as a node of autograd, which keeps the edge list alive."""

    @staticmethod
    def forward(ctx: Any, plan: EdgePlan, graph: Graph, edges: Edges, *operands: Tensor) -> Any:
        outs = plan.compute(graph, edges, operands)
        every = [*operands, *outs]
        ctx.save_for_backward(edges.edge_index, *map(every.__getitem__, plan.keeps))
        ctx.plan, ctx.graph, ctx.edges = plan, graph, edges[1:]
        ctx.set_materialize_grads(False)
        return tuple(outs[: plan.results or 1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan, graph = ctx.plan, ctx.graph
        edge_index, *saved = ctx.saved_tensors
        edges = Edges(edge_index, *ctx.edges)
        tensors: list[Any] = [*saved, *grads]
        gradient = None
        if not (torch.is_grad_enabled() or _modes() or _transforms() is not None):
            key = tuple([t.stride() if type(t) in _PLAIN and not is_batch(t) else t
                         for t in tensors])  # fmt: skip
            if not any(isinstance(part, Tensor) for part in key):
                gradient = plan.gradients.get(key)
                if gradient is None:
                    with prefer_backend(plan.asked):
                        gradient = plan.rule.bind(edges, tensors)
                    if gradient is not None:
                        plan.gradients[key] = gradient
        if gradient is None:
            return (None, None, None, *plan.backward(graph, edges, saved, grads))
        for place, fold in gradient.folds:
            tensors[place] = fold(tensors[place])
        if plan.counting is not None:
            tensors.append(graph.counts)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        sizes = edges.sizes()
        outs = gradient.launch(edge_index, sizes, [tensors[i] for i in gradient.reads])
        for i, out in zip(gradient.operands, outs, strict=True):
            found[3 + i] = out
        for i, trailing in gradient.zeros:
            like = next(g for g in grads if g is not None)
            found[3 + i] = like.new_zeros(sizes[_COUNTS[plan.sides[i]]], *trailing)
        names = chosen.get()
        if names is not None:
            names.update(plan.backends)
        return tuple(found)


# Whether function transforms are active, which is what Function.apply asks, was asked before.
_apply: Any = super(torch.autograd.Function, _ByEdge).apply


def changes(folds: Sequence[Fold]) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
    """Return the places that are changed, and how."""
    return [(place, fold) for place, fold in enumerate(folds) if fold is not None]
