"""The gradient of attention: one pass over the transposed graph, then formulas as any other.

With ``p`` the weight of an edge and ``g`` the gradient of the result, the gradient of its score is
``ds = p * (sum(g * value) - delta)``, where ``delta = sum(g * out)`` is one number a target and
head: the sum over the target's edges of ``p * sum(g * value)`` never has to be made. So the pass
computes p anew from the scores and the logarithm of their sum, adds up the gradients of source
operands, and leaves ds (and p, if somebody asks) behind, E x heads. Other operands' gradients are
sums of formulas that read them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    Sum,
    gradient,
    map_operands,
    operands_of,
    parse,
    shape_of,
    swap_sides,
)
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.attention_parts import unfused
from pyg_accel.ops.gspmm_backward import kinds_of
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.steps import Step, fit, renumber, run_steps, shapes_of

__all__ = ["backward", "backward_spec", "setup_context"]

Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Plan:
    """How gradients are computed.

    With n operands, operand n is the gradient of the result, n + 1 the weights of edges and n + 2
    the gradients of scores.

    Attributes:
        sources: (operand, formula) of those that are added up over sources, in the pass over the
            transposed graph and as it sees them.
        others: those of target and edge operands.
        weights: the formulas of others use the weights.
    """

    sources: tuple[tuple[int, str], ...]
    others: tuple[Step, ...]
    weights: bool


@lru_cache(maxsize=1024)
def _plan(score: str, value: str, needs: tuple[bool, ...], shapes: Shapes) -> _Plan:
    n = len(shapes)
    scores, values = parse(score), parse(value)
    sizes = dict(enumerate(shapes))
    heads = max(shape_of(scores, sizes)[0], shape_of(values, sizes)[0])
    sizes[n] = (heads, shape_of(values, sizes)[1])
    sizes[n + 1] = sizes[n + 2] = (heads, 1)
    grad, weight, of_score = Operand("v", n), Operand("e", n + 1), Operand("e", n + 2)
    sources, others, weights = [], [], False
    sides = {o.index: o.side for o in (*operands_of(scores), *operands_of(values))}
    for index, side in sides.items():
        if not needs[index]:
            continue
        parts = [
            gradient(values, index, Binary("mul", grad, weight), sizes),
            gradient(scores, index, of_score, sizes),
        ]
        found: list[Formula] = [part for part in parts if part is not None]
        if not found:
            continue
        if sizes[index][1] == 1:  # each by itself: what has one column is not to be added up again
            found = [Sum(part) if shape_of(part, sizes)[1] != 1 else part for part in found]
        wanted = found[0] if len(found) == 1 else Binary("add", *found)
        if side == "u":
            sources.append((index, str(swap_sides(wanted))))
            continue
        used = tuple(dict.fromkeys(o.index for o in operands_of(wanted)))
        weights = weights or n + 1 in used
        others.append(Step(index, side, map_operands(wanted, partial(renumber, used)), used))
    return _Plan(tuple(sources), tuple(others), weights)


def backward_spec(spec: OpSpec, needs: tuple[bool, ...]) -> OpSpec:
    """Return the facts of the backward pass of a call, but for the size of its graph."""
    kinds = tuple((1 if h == 1 else 2, 1 if f == 1 else 2) for h, f in spec.shapes)
    plan = _plan(spec.score, spec.formula, needs, kinds)
    score, value = (str(swap_sides(parse(text))) for text in (spec.score, spec.formula))
    return replace(spec, op="attention_backward", formula=value, score=score,
                   formulas=tuple(formula for _, formula in plan.sources))  # fmt: skip


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep the operands, the result and the logarithms of the sums."""
    rowptr, col, eid, rowptr_t, col_t, eid_t, num_cols, sorted_, operands, score, value = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.needs = tuple(t.requires_grad for t in operands)
    ctx.facts = (num_cols, sorted_, score, value)
    ctx.num_operands = len(operands)
    ctx.save_for_backward(rowptr, col, eid, rowptr_t, col_t, eid_t, *operands, *output)


def backward(ctx: Any, grad_outputs: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the operator's inputs: those of the operands, None for others."""
    saved = list(ctx.saved_tensors)
    arrays, operands = saved[:6], saved[6 : 6 + ctx.num_operands]
    out, total = saved[6 + ctx.num_operands :]
    num_cols, sorted_, score, value = ctx.facts
    grad = grad_outputs[0]
    grads: list[Tensor | None] = [None] * len(operands)
    if grad is None:
        return (None,) * 8 + (grads, None, None)
    if torch.is_grad_enabled():  # to be differentiated again
        return (None,) * 8 + (_unfused_gradients(ctx, arrays, operands, grad), None, None)
    if arrays[3] is None:
        raise RuntimeError("the gradient of attention needs the transposed graph")
    shapes = shapes_of(operands)
    plan = _plan(score, value, ctx.needs, kinds_of(operands))
    grad = contiguous_rows(grad)
    rows = arrays[0].size(0) - 1
    found = call(
        "attention_backward",
        *arrays[3:],
        rows,
        operands,
        grad,
        out,
        total,
        str(swap_sides(parse(score))),
        str(swap_sides(parse(value))),
        [formula for _, formula in plan.sources],
        bool(plan.others),
        plan.weights,
    )
    for (index, _), one in zip(plan.sources, found, strict=False):
        grads[index] = fit(one, shapes[index])
    left = found[len(plan.sources) :]
    made = dict(enumerate([*operands, grad, left[1] if plan.weights else None, *left[:1]]))
    transposed = (*arrays[3:], *arrays[:3], rows, True)
    done = run_steps(plan.others, made, (*arrays, num_cols, sorted_), transposed)
    for index, one in done.items():
        grads[index] = fit(one, shapes[index])
    return (None,) * 8 + (grads, None, None)


def _unfused_gradients(
    ctx: Any, arrays: list[Any], operands: list[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """Gradients through the parts of attention, which have derivatives of every order."""
    num_cols, sorted_, score, value = ctx.facts
    rowptr, col, eid = arrays[:3]
    graph = Graph(rowptr, col, eid, num_cols, sorted=sorted_)
    out = unfused(graph, score, value, operands, edge_order=eid is not None)
    wanted = [t for t, needs in zip(operands, ctx.needs, strict=True) if needs]
    found = torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True)
    each = iter(found)
    return [next(each) if needs else None for needs in ctx.needs]


def _attention_backward(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    num_cols: int,
    operands: list[Tensor],
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    score: str,
    value: str,
    gradients: list[str],
    want_scores: bool,
    want_weights: bool,
) -> list[Tensor]:
    csr = CSR(rowptr, col, eid, num_cols, True)
    spec = OpSpec("attention_backward", rowptr.device.type, grad.dtype, rowptr.dtype, csr.num_rows,
                  num_cols, col.numel(), grad.size(1), grad.size(2), value,
                  shapes=shapes_of(operands), score=score,
                  formulas=tuple(gradients))  # fmt: skip
    formulas = [parse(text) for text in gradients]
    given = AttentionGradient(
        parse(score), parse(value), operands, grad, out, total, formulas, want_scores, want_weights
    )
    return choose(spec).backend.attention_backward(csr, given)


def _attention_backward_fake(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    num_cols: int,
    operands: list[Tensor],
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    score: str,
    value: str,
    gradients: list[str],
    want_scores: bool,
    want_weights: bool,
) -> list[Tensor]:
    heads = grad.size(1)
    sizes = dict(enumerate((*shapes_of(operands), (heads, grad.size(2)), (heads, 1), (heads, 1))))
    rows, edges = rowptr.size(0) - 1, col.size(0)
    outs = [grad.new_empty(rows, heads, shape_of(parse(text), sizes)[1]) for text in gradients]
    return outs + [grad.new_empty(edges, heads, 1) for want in (want_scores, want_weights) if want]


define(
    "attention_backward(Tensor rowptr, Tensor col, Tensor? eid, SymInt num_cols, "
    "Tensor[] operands, Tensor grad, Tensor out, Tensor total, str score, str value, "
    "str[] gradients, bool want_scores, bool want_weights) -> Tensor[]",
    _attention_backward,
    _attention_backward_fake,
)
