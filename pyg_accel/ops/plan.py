"""How eager calls run: one node of autograd, one plan, one launch each way.

A plan has what depends on the kind of a call alone: layout, kernel, what is saved for the gradient.
It is made at the first call of its kind and stays with the graph. A later call looks at shapes,
dtypes and flags of its operands, looks up its plan, and launches. Calls that something observes
(a compiler, a mode, a function transform) go through the registered operators instead.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import (
    asked_for,
    named,
    prefer_backend,
    variables_of_choices,
)
from pyg_accel.backends.notes import chosen
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.graph.facts import Facts, facts_of
from pyg_accel.machine import is_captured
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import each_gradient, is_batch
from pyg_accel.settings import settings

__all__ = [
    "Fold",
    "Gradient",
    "OperatorPlan",
    "Result",
    "arguments",
    "computing",
    "folding",
    "reshaping",
    "run",
]

_MOST = 256  # plans of a graph
_STRIDED, _PLAIN = torch.strided, (Tensor, Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_batched = torch._C._functorch.is_legacy_batchedtensor

Fold = Callable[[Tensor], Tensor] | None
_Grads = tuple[Tensor | None, ...]


class _Arguments(threading.local):
    """Of the layer whose call runs in a thread: its caller may change them before the gradient.

    PyG copies features to the edges, so ``x += conv(x)`` does not change what its gradient reads.
    """

    tensors: tuple[Tensor, ...] = ()


arguments = _Arguments()


class Result(NamedTuple):
    """What a launch computes: the gradient of an operand, and what brings it to its shape.

    None in place of the operand: what later launches read, behind all other tensors.
    """

    operand: int | None
    fit: Fold


class Gradient(NamedTuple):
    """A backward pass that is not differentiated again.

    Attributes:
        constants: what it reads of the graph; behind saved tensors and gradients of results.
        folds: (place, change) of those that are not read as they are.
        launches: functions, whether they take a list, the places of what they read, and the
            gradients that they compute. Over an edge list, they take the list and its sizes first,
            and degrees of targets are behind the gradients of results.
        backends: that run it.
    """

    constants: tuple[Tensor, ...]
    folds: Sequence[tuple[int, Callable[[Tensor], Tensor]]]
    launches: Sequence[tuple[Callable[..., Any], bool, tuple[int, ...], tuple[Result, ...]]]
    backends: dict[str, None]


class Rule(Protocol):
    """How calls of a kind are differentiated."""

    def bind(self, graph: Any, tensors: list[Tensor | None]) -> Gradient | None:
        """Plan the pass for saved tensors and gradients like these; None if it has no plan.

        The graph is an edge list (:class:`~pyg_accel.graph.csr.Edges`) if it is not built.
        """

    @property
    def differentiate(self) -> Callable[..., Sequence[Tensor | None]]:
        """Compute gradients by operators, of the graph, saved tensors and gradients of results.

        The edges are behind them if the call ran on an edge list.
        """


@dataclass(slots=True, eq=False)
class OperatorPlan:
    """How calls of a kind run on a graph.

    Attributes:
        compute: of the operands, returns a tensor or a sequence of them: see :func:`computing`; of
            the graph, the edges and a list of operands for calls over an edge list.
        backends: that run it.
        results: how many a call returns, in a list; 0 if it returns a tensor. What is computed
            behind them is only saved.
        rule: how it is differentiated; None if no gradient is needed.
        keeps: what the gradient reads, by places in operands and results.
        saves: the operands among them that are features of nodes.
        repeats: it reads the operands and the result, which is computed again if it was changed in
            place meanwhile.
        facts: of a graph on a GPU of which it is not known yet whether it stays.
        asked: the backend that was asked for by name, or ``"auto"``.
        gradients: backward passes, by strides of what they read.
    """

    compute: Callable[..., Any]
    backends: dict[str, None]
    results: int = 0
    rule: Rule | None = None
    keeps: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    repeats: bool = False
    facts: Facts | None = None
    asked: str = "auto"
    gradients: dict[Any, Gradient] = field(default_factory=dict)

    def differentiate_by(self, rule: Rule, keeps: tuple[int, ...], sides: Sequence[str]) -> None:
        """Set what differentiates calls, and what it reads; ``sides`` are those of the operands."""
        self.rule, self.keeps = rule, keeps
        self.saves = tuple([i for i, side in enumerate(sides) if i in keeps and side != "e"])

    def backward(
        self, graph: Graph, edges: Edges | None, saved: Sequence[Tensor], grads: _Grads
    ) -> Sequence[Tensor | None]:
        """Compute gradients that are differentiated again, observed, or many at once."""
        if any(map(is_batch, grads)):
            return each_gradient(lambda *one: tuple(self.backward(graph, edges, saved, one)), grads)
        assert self.rule is not None
        with self._as_asked():
            if edges is None:
                return self.rule.differentiate(graph, saved, grads)
            return self.rule.differentiate(graph.build(edges.edge_index), saved, grads, edges)

    def _as_asked(self) -> AbstractContextManager[None]:
        """Prefer the backend that was named for the forward pass: other threads do not know it."""
        return nullcontext() if self.asked == "auto" else prefer_backend(self.asked)

    def bind(
        self, graph: Graph, edges: Edges | None, key: Any, tensors: list[Tensor | None]
    ) -> Gradient | None:
        """Plan the backward pass for tensors like these; None if it goes through operators."""
        if any(isinstance(part, Tensor) for part in key):
            return None
        assert self.rule is not None
        with self._as_asked():
            gradient = self.rule.bind(graph if edges is None else edges, tensors)
        # What is made of a graph while one is captured is its own.
        if gradient is not None and (edges is not None or not is_captured(graph.col)):
            self.gradients[key] = gradient
        return gradient

    def count_use_and_check_reuse(self, graph: Graph) -> bool:
        """Count a use; return whether more is known of the graph than when the plan was made."""
        assert self.facts is not None
        self.facts.uses += 1
        return self.facts.stays and not is_captured(graph.col)


def run(
    graph: Graph,
    make: Callable[..., OperatorPlan | None],
    kind: tuple[Any, ...],
    operands: Sequence[Any],
    by_edge: Callable[..., tuple[OperatorPlan, Edges] | None] | None = None,
) -> Any:
    """Run an eager call.

    Args:
        graph: the graph.
        make: of the graph, the kind, operands and whether each needs a gradient, makes the plan.
        kind: what else it depends on.
        operands: tensors, if all is well.
        by_edge: of the graph, the kind and operands, returns the plan and the edges of a call on a
            graph that is not built; None if it has to be.

    Returns:
        The result, or a list of them; None for a call that goes through the registered operator.
    """
    if is_dynamo_compiling():
        return None
    if forward_ad._current_level >= 0:
        raise NotImplementedError("pyg_accel operators have no forward-mode derivatives")
    if type(graph) is not Graph or _modes() or _transforms() is not None:
        return None
    plan: Any = None
    edges: Edges | None = None
    if not graph.built:
        plan, edges = (by_edge and by_edge(graph, kind, operands)) or (None, None)
        graph = graph if edges is not None else graph.build()
    if edges is None:
        recorded, facts = torch.is_grad_enabled(), []
        for t in operands:
            if type(t) not in _PLAIN or t.layout is not _STRIDED:
                return None
            needs = recorded and t.requires_grad
            facts.append((t.shape, t.stride(), t.dtype, t.device, needs))
        key: Any = (make, kind, named.get(), settings.changes, *variables_of_choices(), *facts)
        if graph.is_cuda:
            key = (*key, torch.get_float32_matmul_precision(),
                   torch.are_deterministic_algorithms_enabled())  # fmt: skip
        plan = graph.plans.get(key)
        if plan is None or (plan.facts is not None and plan.count_use_and_check_reuse(graph)):
            plan = make(graph, kind, operands, tuple([fact[-1] for fact in facts]))
            if plan is None:
                return None
            _keep(graph, key, plan)
    given = arguments.tensors
    if plan.saves and given:
        owned = {i for i in plan.saves if any(t is operands[i] or t is operands[i]._base
                                              for t in given)}  # fmt: skip
        if owned:
            operands = [t.clone() if i in owned else t for i, t in enumerate(operands)]
            return run(graph, make, kind, operands, by_edge)
    names = chosen.get()
    if names is not None:
        names.update(plan.backends)
    if plan.rule is not None:
        outs = _apply(plan, graph, edges, *operands)
    else:
        outs = plan.compute(*operands) if edges is None else plan.compute(graph, edges, operands)
    if plan.results:
        return [outs] if type(outs) is Tensor else list(outs)
    return outs if type(outs) is Tensor else outs[0]


def _keep(graph: Graph, key: Any, plan: OperatorPlan) -> None:
    """Store a plan; those of a graph that turned out to stay are made anew."""
    if plan.rule is not None:
        plan.asked = asked_for()
    if graph.is_cuda and not torch.are_deterministic_algorithms_enabled():
        facts = facts_of(graph.csr())
        if facts.shared_kind is None:
            plan.facts = facts
    if not is_captured(graph.col):
        if len(graph.plans) >= _MOST:
            graph.plans.clear()
        graph.plans[key] = plan


def folding(operand: Tensor, heads: int, width: int) -> tuple[Fold, Tensor]:
    """Return what brings tensors like this one to [rows, heads, width], and one like it so.

    Each row is contiguous afterwards. None for what is so already. Of any number of rows.
    """
    operand = operand.detach()
    if operand.size(0) < 2:  # views of one row do not have its strides
        operand = operand.new_empty_strided((2, *operand.shape[1:]), operand.stride())
    shape = (operand.size(0), heads, width)
    change: Fold = None
    if operand.shape != shape:
        try:
            operand = operand.view(shape)
            change = reshaping((heads, width), "view")
        except RuntimeError:
            change = reshaping((heads, width))
            return (lambda t: contiguous_rows(change(t))), operand.reshape(shape)
    whole = contiguous_rows(operand)
    if whole is operand:
        return change, operand
    return (lambda t: (t if change is None else change(t)).contiguous()), whole


def reshaping(trailing: Sequence[int], method: str = "reshape") -> Callable[[Tensor], Tensor]:
    """Return what brings rows to this shape, however many there are."""
    if 0 in trailing:  # what -1 stands for would not be known
        return lambda t: getattr(t, method)(t.size(0), *trailing)
    return methodcaller(method, (-1, *trailing))


def computing(
    launch: Launch, folds: Sequence[Fold], shapes: Sequence[tuple[int, ...]]
) -> Callable[..., Any]:
    """Return what computes results of these shapes.

    Args:
        launch: of the kernel.
        folds: what brings each operand into the layout of the kernel.
        shapes: of the first results; the others stay as the kernel returns them. None if the
            kernel returns all of them in their shapes.
    """
    function, listed = launch.bound(), launch.listed
    changes = [(place, fold) for place, fold in enumerate(folds) if fold is not None]
    if not (shapes or changes or listed):
        return function

    def compute(*operands: Tensor) -> Any:
        read = [*operands]
        for place, fold in changes:
            read[place] = fold(read[place])
        outs = function(read) if listed else function(*read)
        outs = [outs] if type(outs) is Tensor else list(outs)
        for at, shape in enumerate(shapes):
            # In its final shape without being a view, which could not be changed in place.
            out = outs[at] if outs[at]._base is None else outs[at].clone()
            outs[at] = out if out.shape == shape else out.resize_(shape)
        return outs[0] if len(outs) == 1 else outs

    return compute


class _Reduce(torch.autograd.Function):
    """A call as a node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, plan: OperatorPlan, graph: Graph, edges: Edges | None, *operands: Tensor
    ) -> Any:
        ctx.plan, ctx.graph, ctx.edges = plan, graph, None
        if edges is None:
            outs = plan.compute(*operands)
        else:
            outs = plan.compute(graph, edges, operands)
            ctx.edges = edges[1:]
            every = [*operands, *outs]
            ctx.save_for_backward(edges.edge_index, *map(every.__getitem__, plan.keeps))
        if plan.keeps and edges is None:
            every = [*operands, outs] if type(outs) is Tensor else [*operands, *outs]
            if plan.repeats:  # changes in place of the result are no changes of what is saved
                ctx.result, ctx.version = outs[0].detach(), outs[0]._version
                every[len(operands)] = outs[0].data
            ctx.save_for_backward(*map(every.__getitem__, plan.keeps))
        if plan.results:
            ctx.set_materialize_grads(False)
            return (outs,) if type(outs) is Tensor else tuple(outs[: plan.results])
        return outs if type(outs) is Tensor else outs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan, graph, edges = ctx.plan, ctx.graph, None
        tensors: list[Any] = [*ctx.saved_tensors, *grads] if plan.keeps or ctx.edges else [*grads]
        if ctx.edges is not None:
            edges = Edges(tensors.pop(0), *ctx.edges)
        if plan.repeats and ctx.result._version != ctx.version:
            place = len(ctx.needs_input_grad) - 3  # behind the operands
            tensors[place] = plan.compute(*tensors[:place])[0]
        gradient = None
        if not (torch.is_grad_enabled() or _modes() or _transforms() is not None):
            key: Any = [named.get()]
            for t in tensors:  # subclasses and batched tensors are not keyed
                key.append(t.stride() if type(t) in _PLAIN and not _batched(t) else t)
            key = tuple(key)
            gradient = plan.gradients.get(key) or plan.bind(graph, edges, key, tensors)
        if gradient is None:
            saved = tensors[: len(plan.keeps)]
            return (None, None, None, *plan.backward(graph, edges, saved, grads))
        tensors += gradient.constants if edges is None else (graph.counts,)
        for place, fold in gradient.folds:
            tensors[place] = fold(tensors[place])
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for function, listed, used, results in gradient.launches:
            read: Any = map(tensors.__getitem__, used)
            if edges is not None:
                outs = function(edges.edge_index, edges.sizes(), [*read])
            else:
                outs = function([*read]) if listed else function(*read)
            outs = (outs,) if type(outs) is Tensor else outs
            for (operand, fit), out in zip(results, outs, strict=True):
                out = out if fit is None else fit(out)
                if operand is None:
                    tensors.append(out)
                else:
                    found[3 + operand] = out
        names = chosen.get()
        if names is not None:
            names.update(gradient.backends)
        return tuple(found)


# Whether function transforms are active, which is what Function.apply asks, was asked before.
_apply: Any = super(torch.autograd.Function, _Reduce).apply
