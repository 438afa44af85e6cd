"""Eager calls: one node of autograd, one plan, one launch each way.

A plan holds everything that depends on the kind of a call only: layout, kernel, saved tensors. The
first call of a kind makes it, and it is stored with the graph. A later call looks up its plan by
shapes, dtypes and flags of the operands, and launches. Calls under a compiler, a mode or a function
transform go through the registered operators instead.
"""

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import asked_for, named, variables_of_choices
from pyg_accel.graph import Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.graph.facts import facts_of
from pyg_accel.ops.autograd import Fold, OperatorPlan, apply_unchecked
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.runtime.machine import is_captured
from pyg_accel.runtime.state import running
from pyg_accel.settings import settings

__all__ = ["computing", "folding", "reshaping", "run"]

_MOST = 256  # plans of a graph
_STRIDED, _PLAIN = torch.strided, (Tensor, Parameter)
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack


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
        make: takes the graph, kind, operands and whether each needs a gradient; makes the plan.
        kind: of the call, apart from graph and operands.
        operands: tensors, in a valid call.
        by_edge: takes the graph, kind and operands; returns the plan and the edges of a call on a
            graph that is not built, or None if it must be built.

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
    inputs = running.arguments
    if plan.saves and inputs:
        owned = {i for i in plan.saves if any(t is operands[i] or t is operands[i]._base
                                              for t in inputs)}  # fmt: skip
        if owned:
            operands = [t.clone() if i in owned else t for i, t in enumerate(operands)]
            return run(graph, make, kind, operands, by_edge)
    names = running.backends
    if names is not None:
        names.update(plan.backends)
    if plan.rule is not None:
        outs = apply_unchecked(plan, graph, edges, *operands)
    else:
        outs = plan.compute(*operands) if edges is None else plan.compute(graph, edges, operands)
    if plan.results:
        return [outs] if type(outs) is Tensor else list(outs)
    return outs if type(outs) is Tensor else outs[0]


def _keep(graph: Graph, key: Any, plan: OperatorPlan) -> None:
    """Store a plan; it is made again once the graph is in repeated use."""
    if plan.rule is not None:
        plan.requested = asked_for()
    if graph.is_cuda and not torch.are_deterministic_algorithms_enabled():
        facts = facts_of(graph.csr())
        if facts.shared_kind is None:
            plan.facts = facts
    if not is_captured(graph.col):
        if len(graph.plans) >= _MOST:
            graph.plans.clear()
        graph.plans[key] = plan


def folding(operand: Tensor, heads: int, width: int) -> tuple[Fold, Tensor]:
    """Return a function that folds tensors to [rows, heads, width], and an example result.

    Rows become contiguous, whatever their number. None for tensors of that layout.
    """
    operand = operand.detach()
    if operand.size(0) < 2:  # views of one row have other strides
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
    """Return a function that reshapes any number of rows."""
    if 0 in trailing:  # -1 would be ambiguous
        return lambda t: getattr(t, method)(t.size(0), *trailing)
    return methodcaller(method, (-1, *trailing))


def computing(
    launch: Launch, folds: Sequence[Fold], shapes: Sequence[tuple[int, ...]]
) -> Callable[..., Any]:
    """Return a function that computes results of these shapes.

    Args:
        launch: of the kernel.
        folds: functions that bring each operand into the layout of the kernel.
        shapes: of the first results; others are not reshaped. None if no result is.
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
            # Reshaped without a view, which autograd would not let change in place.
            out = outs[at] if outs[at]._base is None else outs[at].clone()
            outs[at] = out if out.shape == shape else out.resize_(shape)
        return outs[0] if len(outs) == 1 else outs

    return compute
