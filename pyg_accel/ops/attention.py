"""Attention: scores, softmax over a target's edges and the weighted sum, as one operator.

``pyg_accel::attention`` saves two numbers per target and head beside the result: no tensor of
E x heads is written. Its gradient is in :mod:`.attention_backward`. Where no backend has
the operator, :func:`attention` runs its parts.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide, dispatch_key, is_fast
from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import Formula, parse
from pyg_accel.graph import CSR, Graph, check_graph
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.ops.arrays import ARRAYS, Arrays, csr_and_arguments
from pyg_accel.ops.attention_backward import attention_rule, is_backward_fast, read_by, rule_of
from pyg_accel.ops.attention_by_edge import attention_plan_of
from pyg_accel.ops.attention_unfused import bind_unfused, extent, unfused
from pyg_accel.ops.autograd import OperatorPlan
from pyg_accel.ops.by_edge import plan_by_edge
from pyg_accel.ops.gspmm import check_operands
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import Recorded, call, define
from pyg_accel.ops.plan import computing, folding, run
from pyg_accel.runtime.cache import Bounded
from pyg_accel.runtime.checks import shown

__all__ = ["attention"]


def attention(
    graph: Graph,
    score: Formula | str,
    value: Formula | str,
    operands: Sequence[Tensor],
    *,
    edge_order: bool = False,
) -> Tensor:
    """Sum up the values that reach each target, weighted by the softmax of their scores.

    ``out[i] = sum_j softmax_j(score_ij) * value_ij``, head by head. Dropout of the weights is a
    factor of the values: ``"mul(u0,e2)"`` with a mask for e2.

    Args:
        graph: the graph.
        score: one number per edge and head, e.g. ``"leaky_relu(add(u1,v2),0.2)"`` or
            ``"sum(mul(u0,v1))"``. See :mod:`pyg_accel.formula`.
        value: what is added up, e.g. ``"u0"``.
        operands: of both formulas, by operand index: [rows, H, F], [rows, H] (one number per
            head) or [rows]; H and F may be 1 and broadcast.
        edge_order: edge operands are in the order of the edge list that the graph was built from;
            by default in CSR order.

    Returns:
        [num_rows, H, F]; targets without edges get 0.

    Raises:
        ValueError: for operands that do not fit the graph or one another, or scores of more than
            one number per edge and head.
        BackendNotSupported: if no backend can run it.
    """
    score, value = str(score), str(value)
    if isinstance(operands, (list, tuple)):
        out: Tensor | None = run(graph, _make_plan, (score, value, edge_order), operands, _by_edge)
        if out is not None:
            return out
    check_graph(graph)
    if not isinstance(operands, (list, tuple)) or not all(isinstance(t, Tensor) for t in operands):
        raise ValueError(f"expected 'operands' to be a list of tensors (got {shown(operands)})")
    read = read_by(score, value)
    what = f"the score {score} and the value {value}"
    dtype = check_operands(graph, what, read, operands)
    for t in operands:
        if t.dim() > 3:
            raise ValueError(f"expected operands [rows, H, F] (got shape {list(t.shape)})")
    folded = [contiguous_rows(_folded(t.to(dtype))) for t in operands]
    # Without edge operands, the order of the CSR is cheaper: edges of a row are neighbours.
    edge_order = edge_order and ("e" in dict(read) or graph.in_edge_order)
    needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in folded)
    shapes = tuple((int(h), int(f)) for h, f in shapes_of(folded))
    if not _is_fused(graph.device.type, dtype, score, value, shapes, needs):
        return unfused(graph, score, value, folded, edge_order=edge_order)
    arrays = Arrays.of(graph, edge_order=edge_order, transposed=any(needs))
    result: Tensor = call("attention", *arrays, folded, score, value)[0]
    return result


_by_edge = partial(plan_by_edge, make=attention_plan_of)


def _is_fused(
    device: str,
    dtype: torch.dtype,
    score: str,
    value: str,
    shapes: Shapes,
    needs: tuple[bool, ...],
) -> bool:
    """Whether backends run a call and its gradient as one operator."""
    sized = OpSpec.of_any_size("attention", device, dtype, *extent(score, value, shapes),
                               score=score, formula=value, shapes=shapes)  # fmt: skip
    recorded = any(needs)
    return is_fast(sized, recorded=recorded) and (not recorded or is_backward_fast(sized, needs))


def _make_plan(
    graph: Graph, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> OperatorPlan | None:
    score, value, _ = kind
    rule = rule_of(kind, operands, needs)
    if rule is None or not rule.fits(graph, operands):
        return None
    edge_order, sizes = rule.edge_order, rule.shapes
    folds, folded = zip(*map(folding, operands, *zip(*sizes, strict=True)), strict=True)
    csr, shape = graph.csr(edge_order=edge_order), (graph.num_rows, *rule.message)
    facts = (graph.device.type, folded[0].dtype, score, value, sizes, needs)
    fused, recorded = _cached_is_fused(dispatch_key(), *facts), any(needs)
    if fused or not recorded:
        names, launch = _launch(csr, score, value, list(folded), fused=fused)
        plan = OperatorPlan(computing(launch, folds, (shape,)), names)
        if recorded:
            plan.differentiate_by(rule, rule.keeps, rule.sides)
            plan.repeats = True
        return plan
    whole = weakref.ref(graph)  # the graph owns the plan

    def parts(*tensors: Tensor) -> list[Tensor]:
        graph = whole()
        assert graph is not None
        return [unfused(graph, score, value, tensors, edge_order=edge_order)]

    return OperatorPlan(computing(Launch(parts), folds, (shape,)), {})


@lru_cache(maxsize=4096)
def _cached_is_fused(_situation: object, *facts: Any) -> bool:
    return _is_fused(*facts)


def _folded(operand: Tensor) -> Tensor:
    while operand.dim() < 3:
        operand = operand.unsqueeze(-1)
    return operand


_bound: Bounded[tuple[Any, ...], tuple[dict[str, None], Callable[[CSR], Launch]]] = Bounded(4096)


def _launch(
    csr: CSR, score: str, value: str, operands: list[Tensor], *, fused: bool = True
) -> tuple[dict[str, None], Launch]:
    """Return the backends of a call, and its launch on a graph."""
    kind = kind_of(csr)
    facts = [(t.dtype, *t.shape[1:], t.stride(0)) for t in operands]
    key = (score, value, fused, kind, csr.eid is None, dispatch_key(), *facts)
    entry = _bound.get(key)
    if entry is None and not fused:
        entry = _bound[key] = bind_unfused(csr, score, value, operands)
    elif entry is None:
        shapes = shapes_of(operands)
        spec = OpSpec.on("attention", csr, operands[0], *extent(score, value, shapes), score=score,
                         formula=value, shapes=shapes, sharing=kind.sharing)  # fmt: skip
        decision, formulas = decide(spec), (parse(score), parse(value))
        bound = decision.kernel.bound(csr, formulas, operands)
        entry = _bound[key] = {decision.backend.name: None}, bound
    return entry[0], entry[1](csr)


def _attention(*args: Any) -> list[Tensor]:
    csr, (operands, score, value) = csr_and_arguments(args)
    (name, *_), launch = _launch(csr, score, value, operands)
    note_choice(name)
    run = launch.bound()
    outs: list[Tensor] = run(operands) if launch.listed else run(*operands)
    return outs


def _attention_fake(*args: Any) -> list[Tensor]:
    csr, (operands, score, value) = csr_and_arguments(args)
    heads, width = extent(score, value, shapes_of(operands))
    rows, like = csr.num_rows, operands[0]
    numbers = [like.new_empty(rows, heads, dtype=accumulate(like.dtype)) for _ in range(2)]
    return [like.new_empty(rows, heads, width), *numbers]


def _record(*args: Any) -> Recorded:
    arrays, (operands, score, value) = Arrays.split(args)
    needs, shapes = zip(*[(t.requires_grad, t.shape[1:]) for t in operands], strict=True)
    rule = attention_rule(score, value, True, needs, shapes)
    assert rule is not None
    return Recorded(rule, rule.keeps, arrays, 1)


define(
    f"attention({ARRAYS}, Tensor[] operands, str score, str value) -> Tensor[]",
    _attention,
    _attention_fake,
    _record,
)
