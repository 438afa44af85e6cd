"""The gradient of attention: a pass over the transposed graph, and the gradients of targets.

With ``p`` the weight of an edge and ``g`` the gradient of the result, the gradient of its score is
``ds = p * (sum(g * value) - delta)``, where ``delta = sum(g * out)`` is one number per target and
head: the sum over the target's edges of ``p * sum(g * value)`` never has to be made. The pass
computes p anew from the scores and the logarithm of their sum, and adds up the gradients of source
operands. It writes ds (and p, if requested), E x heads, and the gradients of targets and edges are
sums of formulas that read them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide, dispatch_key, is_fast
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import Shapes, shapes_of
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
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.ops.arrays import BOTH_ARRAYS, NO_GRADS, Arrays
from pyg_accel.ops.attention_unfused import unfused
from pyg_accel.ops.gspmm_backward import kinds_of, kinds_of_shapes
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.steps import Step, fit, passes_of, renumber
from pyg_accel.runtime.cache import Bounded

__all__ = [
    "AttentionCall", "backward", "gradient_launch", "is_backward_fast", "setup_context",
]  # fmt: skip


@dataclass(frozen=True)
class _GradientPlan:
    """How gradients are computed.

    With n operands, operand n is the gradient of the result, n + 1 the weights of edges and n + 2
    the gradients of scores.

    Attributes:
        sources: (operand, formula) of those that are added up over sources, in the pass over the
            transposed graph and as it sees them.
        others: those of target and edge operands.
        weights: the formulas of others use the weights.
        turned: score and value, as the transposed graph sees them.
    """

    sources: tuple[tuple[int, str], ...]
    others: tuple[Step, ...]
    weights: bool
    turned: tuple[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        """Formulas and reductions of the pass, for the choice of its kernel."""
        score, value = self.turned
        formulas = tuple(formula for _, formula in self.sources)
        reduces = ("sum",) * len(formulas) + ("none",) * (bool(self.others) + self.weights)
        return {"score": score, "formula": value, "formulas": formulas, "reduces": reduces}

    @property
    def order(self) -> tuple[int, ...]:
        """The operands, in the order in which the operator returns their gradients."""
        return (*(index for index, _ in self.sources), *(step.operand for step in self.others))


@lru_cache(maxsize=1024)
def _plan(score: str, value: str, needs: tuple[bool, ...], shapes: Shapes) -> _GradientPlan:
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
    turned = (str(swap_sides(scores)), str(swap_sides(values)))
    return _GradientPlan(tuple(sources), tuple(others), weights, turned)


def is_backward_fast(spec: OpSpec, needs: tuple[bool, ...]) -> bool:
    """Return whether backends run the backward pass of a call, whatever the size of its graph."""
    plan = _plan(spec.score, spec.formula, needs, kinds_of_shapes(spec.shapes))
    return is_fast(replace(spec, op="attention_backward", **plan.facts))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep the operands, the result and the logarithms of the sums."""
    arrays, (operands, *ctx.texts) = Arrays.split(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.needs = tuple(t.requires_grad for t in operands)
    arrays.save(ctx, *operands, *output)


def backward(ctx: Any, grad_outputs: list[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of the operator's inputs: those of the operands, None for others."""
    arrays, (*operands, out, total) = Arrays.saved(ctx)
    (score, value), grad = ctx.texts, grad_outputs[0]
    grads: list[Tensor | None] = [None] * len(operands)
    if grad is not None:
        given = AttentionCall(score, value, ctx.needs, operands, out, total)
        grads = given.gradients(arrays, contiguous_rows(grad))
    return *NO_GRADS, grads, None, None


class AttentionCall(NamedTuple):
    """A call that is differentiated: its formulas, which operands need it, and its results."""

    score: str
    value: str
    needs: tuple[bool, ...]
    operands: list[Tensor]
    out: Tensor
    total: Tensor

    def gradients(self, arrays: Arrays, grad: Tensor) -> list[Tensor | None]:
        """Compute gradients by operators."""
        if torch.is_grad_enabled():  # to be differentiated again
            return self._unfused_gradients(arrays, grad)
        if arrays.rowptr_t is None:
            raise RuntimeError("the gradient of attention needs the transposed graph")
        score, value, needs, operands, out, total = self
        rest = (operands, grad, out, total, score, value, list(needs))
        found = call("attention_backward", *arrays, *rest)
        plan = _plan(score, value, needs, kinds_of(operands))
        grads: list[Tensor | None] = [None] * len(operands)
        for index, one in zip(plan.order, found, strict=True):
            grads[index] = one
        return grads

    def _unfused_gradients(self, arrays: Arrays, grad: Tensor) -> list[Tensor | None]:
        """Gradients through the parts of attention, which have derivatives of every order."""
        graph = Graph.trusted(*arrays.csr[:4], sorted=arrays.sorted)
        # Each a tensor of its own: one may be an operand twice, or be made from another.
        operands = [t.view_as(t) for t in self.operands]
        edge_order = arrays.eid is not None
        out = unfused(graph, self.score, self.value, operands, edge_order=edge_order)
        wanted = [t for t, needs in zip(operands, self.needs, strict=True) if needs]
        found = torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True)
        each = iter(found)
        return [next(each) if needs else None for needs in self.needs]


def _attention_backward(*args: Any) -> list[Tensor]:
    arrays, (operands, grad, out, total, score, value, needs) = Arrays.split(args)
    csrs = arrays.csr, arrays.transposed
    call = AttentionCall(score, value, tuple(needs), operands, out, total)
    _, run = gradient_launch(*csrs, call, grad)
    found: list[Tensor] = run(*operands, out, total, grad)
    return found


class _Bound(NamedTuple):
    """How gradients of calls of a kind are computed.

    Attributes:
        plan: their formulas.
        backend: of the pass over the transposed graph.
        launch: of the transposed graph, returns what the backend launches.
        others: of the passes of targets and edges: the tensors that they read, the operands whose
            gradients they compute, and what launches them on a graph.
    """

    plan: _GradientPlan
    backend: str
    launch: Callable[[CSR], Launch]
    others: list[tuple[tuple[int, ...], tuple[int, ...], Callable[[CSR], Launch]]]


_bound: Bounded[tuple[Any, ...], _Bound] = Bounded(4096)


def gradient_launch(
    csr: CSR, turned: CSR, call: AttentionCall, grad: Tensor
) -> tuple[tuple[int, ...], Callable[..., list[Tensor]]]:
    """Return the operands whose gradients are computed, and what computes them.

    It takes the operands, the results and the gradient of the first, all like those of this call.
    """
    operands = call.operands
    kinds = kind_of(csr, counts=False), kind_of(turned), csr.eid is None, torch.is_grad_enabled()
    facts = [(t.dtype, *t.shape[1:], t.stride(0)) for t in (*operands, call.out, grad)]
    key = (call.score, call.value, call.needs, *kinds, dispatch_key(), *facts)
    found = _bound.get(key)
    if found is None:
        found = _bound[key] = _bind(csr, turned, call, grad)
    plan, backend = found.plan, found.backend
    launch = found.launch(turned)
    go, listed = launch.bound(), launch.listed
    n, count = len(operands), len(plan.sources)
    of_others = [(used, bound(csr), results) for used, results, bound in found.others]
    shapes = [shapes_of(operands)[index] for index in plan.order]
    behind = [step.operand for step in plan.others]

    def run(*tensors: Tensor) -> list[Tensor]:
        note_choice(backend)
        outs = go([*tensors]) if listed else go(*tensors)
        grads = [*outs[:count]]
        if of_others:  # they read the gradients of scores, which come first, and weights
            made = [*tensors[:n], tensors[-1], outs[-1], outs[count]]
            others: dict[int, Tensor] = {}
            for used, launch, results in of_others:
                others |= zip(results, launch([made[i] for i in used]), strict=True)
            grads += [others[operand] for operand in behind]
        return [fit(one, shape) for one, shape in zip(grads, shapes, strict=True)]

    return plan.order, run


def _bind(csr: CSR, turned: CSR, call: AttentionCall, grad: Tensor) -> _Bound:
    operands = call.operands
    plan = _plan(call.score, call.value, call.needs, kinds_of(operands))
    spec = OpSpec.on("attention_backward", turned, grad, grad.size(1), grad.size(2),
                     shapes=shapes_of(operands), **plan.facts)  # fmt: skip
    decision, (score, value) = decide(spec), map(parse, plan.turned)
    formulas, n = [parse(text) for _, text in plan.sources], len(operands)

    def given(tensors: Sequence[Tensor]) -> AttentionGradient:
        out, total, grad = tensors[n:]
        return AttentionGradient(score, value, [*tensors[:n]], grad, out, total, formulas,
                                 bool(plan.others), plan.weights)  # fmt: skip

    kernel = decision.kernel
    if kernel.bind is not None:
        bound = kernel.bind(turned, given([*operands, call.out, call.total, grad]))
    else:

        def bound(turned: CSR) -> Launch:
            return Launch(lambda tensors: kernel.run(turned, given(tensors)), listed=True)

    by_edge = grad.new_empty(0, grad.size(1), 1)  # weights, and gradients of scores
    like = dict(enumerate([*operands, grad, by_edge, by_edge]))
    others = [
        (part.used, part.operands, part.bind(csr, [like[i] for i in part.used])[1])
        for part in passes_of(plan.others, like)
    ]
    return _Bound(plan, decision.backend.name, bound, others)


def _attention_backward_fake(*args: Any) -> list[Tensor]:
    _, (operands, _, _, _, score, value, needs) = Arrays.split(args)
    plan = _plan(score, value, tuple(needs), kinds_of(operands))
    return [torch.empty_like(operands[index]) for index in plan.order]


define(
    f"attention_backward({BOTH_ARRAYS}, Tensor[] operands, Tensor grad, Tensor out, Tensor total, "
    "str score, str value, bool[] needs) -> Tensor[]",
    _attention_backward,
    _attention_backward_fake,
)
