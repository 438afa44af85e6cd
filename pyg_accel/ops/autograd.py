"""The autograd function of all operators, and the rules that state their gradients.

A :class:`Rule` states the gradient of an operator once. It plans a :class:`Gradient`, the launches
of a backward pass: kernels, or calls of operators if the pass is differentiated again or observed.
Eager calls (:mod:`.plan`) and registered operators (:mod:`.operator`) record the same node.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pyg_accel.backends.dispatch import named, prefer_backend
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.graph.facts import Facts
from pyg_accel.runtime.machine import is_captured
from pyg_accel.runtime.state import running

__all__ = [
    "NO_GRADIENT", "Fold", "Gradient", "OperatorPlan", "Result", "Rule", "apply", "apply_unchecked",
    "computed_again", "each_of",
]  # fmt: skip

_PLAIN, _SEVERAL = (Tensor, Parameter), (list, tuple)
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_batched = torch._C._functorch.is_legacy_batchedtensor

Fold = Callable[[Tensor], Tensor] | None


class Result(NamedTuple):
    """A result of a launch: the gradient of an operand, and the function that fits its shape.

    Without an operand it is an input of later launches, appended to all other tensors.
    """

    operand: int | None
    fit: Fold


class Gradient(NamedTuple):
    """A backward pass.

    Attributes:
        constants: tensors of the graph, after saved tensors and gradients of results.
        folds: (place, function) for tensors that change their layout first.
        launches: functions, whether they take a list, the places of their inputs, and their
            results. Over an edge list, they take the list and its sizes first, and degrees of
            targets follow the gradients of results.
        backends: names of the backends.
    """

    constants: tuple[Tensor, ...]
    folds: Sequence[tuple[int, Callable[[Tensor], Tensor]]]
    launches: Sequence[tuple[Callable[..., Any], bool, tuple[int, ...], tuple[Result, ...]]]
    backends: dict[str, None]


NO_GRADIENT = Gradient((), (), (), {})  # results have none


class Rule(Protocol):
    """The gradient of a kind of call."""

    def bind(self, graph: Any, tensors: list[Any]) -> Gradient | None:
        """Plan a pass of kernels for saved tensors and gradients like these; None without one.

        The graph is an edge list (:class:`~pyg_accel.graph.csr.Edges`) if it is not built.
        """

    def operators(self, graph: Any, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan a differentiable pass of operators.

        Args:
            graph: the graph, or its :class:`~.arrays.Arrays`.
            edges: the edge list of the call, if it ran on one; the rule may replace saved tensors
                by those that a call on the graph saves.
            tensors: saved tensors and gradients of results.
        """


@dataclass(slots=True, eq=False)
class OperatorPlan:
    """The execution of a kind of call on a graph.

    Attributes:
        compute: takes the operands and returns a tensor or a sequence of tensors, see
            :func:`computing`; over an edge list, takes the graph, the edges and a list of operands.
        backends: names of the backends.
        results: number of returned results, in a list; 0 for a tensor. Further results are saved
            for the gradient.
        rule: states the gradient; None if no gradient is needed.
        keeps: places of saved tensors in operands and results.
        saves: the saved operands that are features of nodes.
        repeats: the result is saved, and computed again if it has changed in place since.
        facts: of a graph on a GPU that may not be used again.
        requested: the backend that the caller named, or ``"auto"``.
        gradients: backward passes, by strides of their inputs.
    """

    compute: Callable[..., Any]
    backends: dict[str, None]
    results: int = 0
    rule: Rule | None = None
    keeps: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    repeats: bool = False
    facts: Facts | None = None
    requested: str = "auto"
    gradients: dict[Any, Gradient] = field(default_factory=dict)

    def differentiate_by(self, rule: Rule, keeps: tuple[int, ...], sides: Sequence[str]) -> None:
        """Set the rule of the gradient and its saved tensors; ``sides`` belong to the operands."""
        self.rule, self.keeps = rule, keeps
        self.saves = tuple([i for i, side in enumerate(sides) if i in keeps and side != "e"])

    def by_operators(self, graph: Any, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan a backward pass that is differentiated again, or observed."""
        assert self.rule is not None
        with self._with_requested():
            gradient = self.rule.operators(graph, edges, tensors)
        if self.requested == "auto":
            return gradient
        launches = [(partial(self._run, launch[0]), *launch[1:]) for launch in gradient.launches]
        return gradient._replace(launches=launches)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._with_requested():
            return function(*args)

    def _with_requested(self) -> AbstractContextManager[None]:
        """Prefer the backend of the forward pass, which may have run in another thread."""
        return nullcontext() if self.requested == "auto" else prefer_backend(self.requested)

    def bind(
        self, graph: Any, edges: Edges | None, key: Any, tensors: list[Tensor | None]
    ) -> Gradient | None:
        """Plan the backward pass for tensors like these; None if it goes through operators."""
        if any(isinstance(part, Tensor) for part in key):
            return None
        assert self.rule is not None
        with self._with_requested():
            gradient = self.rule.bind(graph if edges is None else edges, tensors)
        # Tensors that are allocated during a capture belong to the captured graph.
        if gradient is not None and not (edges is None and graph and is_captured(graph.col)):
            self.gradients[key] = gradient
        return gradient

    def count_use_and_check_reuse(self, graph: Graph) -> bool:
        """Count a use; return whether the graph is now in repeated use, so that a new plan pays."""
        assert self.facts is not None
        self.facts.uses += 1
        return self.facts.stays and not is_captured(graph.col)


class _Operation(torch.autograd.Function):
    """A call as a node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, plan: OperatorPlan, graph: Any, edges: Edges | None, *operands: Any
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
            every = [*operands, *outs] if type(outs) in _SEVERAL else [*operands, outs]
            if plan.repeats:  # the result may change in place: save one with another version
                ctx.result, ctx.version = outs[0].detach(), outs[0]._version
                every[len(operands)] = outs[0].data
            ctx.save_for_backward(*map(every.__getitem__, plan.keeps))
        if plan.results:
            ctx.set_materialize_grads(False)
            return tuple(outs[: plan.results]) if type(outs) in _SEVERAL else (outs,)
        return outs[0] if type(outs) in _SEVERAL else outs

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
            if any(map(_is_batch, grads)):
                return _each_gradient(lambda *one: _Operation.backward(ctx, *one), grads)
            if edges is not None:
                graph = graph.build(edges.edge_index)
            gradient, edges = plan.by_operators(graph, edges, tensors), None
        tensors += gradient.constants if edges is None else (graph.counts,)
        for place, fold in gradient.folds:
            tensors[place] = fold(tensors[place])
        operand_grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for function, listed, used, results in gradient.launches:
            read: Any = map(tensors.__getitem__, used)
            if edges is not None:
                outs = function(edges.edge_index, edges.sizes(), [*read])
            else:
                outs = function([*read]) if listed else function(*read)
            outs = outs if type(outs) in _SEVERAL else (outs,)
            for (operand, fit), out in zip(results, outs, strict=True):
                out = out if fit is None else fit(out)
                if operand is None:
                    tensors.append(out)
                else:
                    operand_grads[3 + operand] = out
        names = running.backends
        if names is not None:
            names.update(gradient.backends)
        return tuple(operand_grads)


apply: Any = _Operation.apply
# Skips the check for function transforms of ``Function.apply``: callers have made it.
apply_unchecked: Any = super(torch.autograd.Function, _Operation).apply


def computed_again(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    grads: dict[int, Tensor],
) -> list[Tensor | None]:
    """Return gradients by computing a function again; they have derivatives if these are recorded.

    Args:
        function: of a list of tensors.
        tensors: its inputs.
        needs: which of them need gradients; results have these alone.
        grads: of its results, by index.
    """
    recorded, wanted = torch.is_grad_enabled(), [i for i, need in enumerate(needs) if need]
    with torch.enable_grad():
        # Separate tensors: one may be read twice, or be computed from another.
        inputs = [t.view_as(t) if recorded else t.detach().requires_grad_(need)
                  for t, need in zip(tensors, needs, strict=True)]  # fmt: skip
        outs = function(inputs)
    used = [n for n in grads if outs[n].requires_grad]
    if not used:
        return [None] * len(wanted)
    return [*torch.autograd.grad([outs[n] for n in used], [inputs[i] for i in wanted],
                                 [grads[n] for n in used], create_graph=recorded,
                                 allow_unused=True)]  # fmt: skip


def each_of(
    function: Callable[..., Any], size: int, dims: Any, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Call a function for each item of a batch: no kernel takes one.

    Args:
        function: takes tensors, lists of tensors, and other values.
        size: of the batch.
        dims: the batch dimension of each argument; None for arguments without one.
        args: arguments for all items.

    Returns:
        The stacked results, and their batch dimensions.
    """
    flat, form = tree_flatten(args)
    places = tree_flatten(dims)[0]
    outs = []
    for item in range(size):
        item_args = [
            value if place is None else value.select(place, item).contiguous()
            for value, place in zip(flat, places, strict=True)
        ]
        outs.append(tree_flatten(function(*tree_unflatten(item_args, form))))
    stacked = [None if column[0] is None else torch.stack(column) for column in
               zip(*(values for values, _ in outs), strict=True)]  # fmt: skip
    result = tree_unflatten(stacked, outs[0][1])
    return result, tree_map(lambda value: None if value is None else 0, result)


def _is_batch(grad: Tensor | None) -> bool:
    """Whether a gradient is a batch, as for ``torch.autograd.grad(is_grads_batched=True)``.

    Batches of function transforms (``torch.func``) are handled by the dispatcher.
    """
    return grad is not None and _batched(grad)


def _each_gradient(
    differentiate: Callable[..., tuple[Any, ...]], grads: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Differentiate for each gradient of a batch."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    flat, dims, size = list[Any](grads), list[int | None]([None] * len(grads)), 0
    while not size:  # nested batches: find the innermost level of these
        for place, grad in enumerate(flat):
            if _is_batch(grad):
                whole = torch._remove_batch_dim(grad, level, 0, 0)  # [0, ...] of another level's
                if whole.size(0):
                    flat[place], dims[place], size = whole, 0, whole.size(0)
        level -= not size
    each, _ = each_of(differentiate, size, tuple(dims), tuple(flat))
    return tuple([None if g is None else torch._add_batch_dim(g, 0, level) for g in each])
