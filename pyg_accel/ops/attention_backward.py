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
from operator import methodcaller
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
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.arrays import BOTH_ARRAYS, Arrays
from pyg_accel.ops.attention_unfused import differentiated
from pyg_accel.ops.autograd import NO_GRADIENT, Fold, Gradient, Result
from pyg_accel.ops.gspmm_backward import kinds_of_shapes
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.plan import folding, laying
from pyg_accel.ops.reduction import transposed_of
from pyg_accel.ops.steps import Step, fit, passes_of, renumber
from pyg_accel.runtime.cache import Bounded

__all__ = ["AttentionRule", "gradient_launch", "is_backward_fast", "operand_gradients"]


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
    wanted = operand_gradients(scores, values, needs, sizes, grad, weight, of_score)
    sides = {o.index: o.side for o in (*operands_of(scores), *operands_of(values))}
    sources, others, weights = [], [], False
    for index, formula in wanted.items():
        if sides[index] == "u":
            sources.append((index, str(swap_sides(formula))))
            continue
        used = tuple(dict.fromkeys(o.index for o in operands_of(formula)))
        weights = weights or n + 1 in used
        plain = map_operands(formula, partial(renumber, used))
        others.append(Step(index, sides[index], plain, used))
    turned = (str(swap_sides(scores)), str(swap_sides(values)))
    return _GradientPlan(tuple(sources), tuple(others), weights, turned)


def operand_gradients(
    score: Formula,
    value: Formula,
    needs: tuple[bool, ...],
    sizes: dict[int, tuple[int, int]],
    grad: Formula,
    weight: Formula,
    of_score: Formula,
) -> dict[int, Formula]:
    """Return what each edge adds to the gradients of operands.

    Args:
        score: of the edge.
        value: of the edge.
        needs: which operands need gradients.
        sizes: (heads, width) of the operands, as far as formulas care.
        grad: gradient of the result.
        weight: of the edge, the softmax of its score.
        of_score: gradient of the score.
    """
    wanted: dict[int, Formula] = {}
    for index in dict.fromkeys(o.index for o in (*operands_of(score), *operands_of(value))):
        if not needs[index]:
            continue
        parts = [
            gradient(value, index, Binary("mul", grad, weight), sizes),
            gradient(score, index, of_score, sizes),
        ]
        found: list[Formula] = [part for part in parts if part is not None]
        if sizes[index][1] == 1:  # each by itself: what has one column is not to be added up again
            found = [Sum(part) if shape_of(part, sizes)[1] != 1 else part for part in found]
        if found:
            wanted[index] = found[0] if len(found) == 1 else Binary("add", *found)
    return wanted


def is_backward_fast(spec: OpSpec, needs: tuple[bool, ...]) -> bool:
    """Return whether backends run the backward pass of a call, whatever the size of its graph."""
    plan = _plan(spec.score, spec.formula, needs, kinds_of_shapes(spec.shapes))
    return is_fast(replace(spec, op="attention_backward", **plan.facts))


class AttentionRule(NamedTuple):
    """How calls are differentiated that are one operator.

    Attributes:
        score: formula of the scores.
        value: of the values.
        edge_order: edge operands are in the order of the edge list.
        needs: which operands need gradients.
        sizes: (heads, width) of each.
        shapes: of each.
    """

    score: str
    value: str
    edge_order: bool
    needs: tuple[bool, ...]
    sizes: Shapes
    shapes: tuple[torch.Size, ...]

    def bind(self, graph: Graph | Arrays, tensors: list[Any]) -> Gradient | None:
        """Plan the pass of kernels for saved tensors and gradients like these."""
        if isinstance(graph, Arrays):
            return None
        turned = transposed_of(graph, edge_order=self.edge_order)
        csr = graph.csr(edge_order=self.edge_order)
        return self._gradient(folding, tensors, lambda ready: gradient_launch(
            csr, turned, self.score, self.value, self.needs, ready))  # fmt: skip

    def operators(self, graph: Graph | Arrays, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass of operators: of the parts, if it is differentiated again."""
        return self._gradient(laying, tensors, lambda _: self._operator(graph))

    def _operator(
        self, graph: Graph | Arrays
    ) -> tuple[tuple[int, ...], Callable[..., list[Tensor]]]:
        score, value, edge_order, needs = self[:4]
        if torch.is_grad_enabled():
            if isinstance(graph, Arrays):
                edge_order = graph.eid is not None
                graph = Graph.trusted(*graph.csr[:4], sorted=graph.sorted)
            return differentiated(graph, score, value, needs, edge_order=edge_order)
        arrays = Arrays.of(graph, edge_order=edge_order, transposed=True)
        if arrays.rowptr_t is None:
            raise RuntimeError("the gradient of attention needs the transposed graph")

        def run(*tensors: Tensor) -> Any:
            *operands, out, total, grad = tensors
            rest = (operands, grad, out, total, score, value, list(needs))
            return call("attention_backward", *arrays, *rest)

        return _plan(score, value, needs, kinds_of_shapes(self.sizes)).order, run

    def _gradient(
        self,
        lay: Callable[..., tuple[Fold, Tensor]],
        tensors: list[Any],
        launch_of: Callable[[list[Tensor]], tuple[tuple[int, ...], Callable[..., Any]]],
    ) -> Gradient:
        grad = tensors[-1]
        if grad is None:
            return NO_GRADIENT
        folds, ready = [], [*tensors]
        extent = tuple(grad.shape[1:])
        for place, size in zip((*range(len(tensors) - 2), -1), (*self.sizes, extent, extent),
                               strict=True):  # fmt: skip
            fold, ready[place] = lay(tensors[place], *size)
            if fold is not None:
                folds.append((place, fold))
        order, launch = launch_of(ready)
        results = tuple(Result(i, methodcaller("reshape", self.shapes[i])) for i in order)
        return Gradient((), folds, [(launch, False, tuple(range(len(tensors))), results)], {})


def _attention_backward(*args: Any) -> list[Tensor]:
    arrays, (operands, grad, out, total, score, value, needs) = Arrays.split(args)
    tensors = [*operands, out, total, grad]
    csrs = arrays.csr, arrays.transposed
    found: list[Tensor] = gradient_launch(*csrs, score, value, tuple(needs), tensors)[1](*tensors)
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
    csr: CSR,
    turned: CSR,
    score: str,
    value: str,
    needs: tuple[bool, ...],
    tensors: list[Tensor],
) -> tuple[tuple[int, ...], Callable[..., list[Tensor]]]:
    """Return the operands whose gradients are computed, and what computes them.

    It takes the operands, both results and the gradient of the first, like ``tensors``.
    """
    operands = tensors[:-3]
    kinds = kind_of(csr, counts=False), kind_of(turned), csr.eid is None, torch.is_grad_enabled()
    facts = [(t.dtype, *t.shape[1:], t.stride(0)) for t in tensors if t.dim() == 3]
    key = (score, value, needs, *kinds, dispatch_key(), *facts)
    found = _bound.get(key)
    if found is None:
        plan = _plan(score, value, needs, kinds_of_shapes(shapes_of(operands)))
        found = _bound[key] = _bind(csr, turned, plan, tensors)
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


def _bind(csr: CSR, turned: CSR, plan: _GradientPlan, tensors: list[Tensor]) -> _Bound:
    *operands, _, _, grad = tensors
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
        bound = kernel.bind(turned, given(tensors))
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
    plan = _plan(score, value, tuple(needs), kinds_of_shapes(shapes_of(operands)))
    return [torch.empty_like(operands[index]) for index in plan.order]


define(
    f"attention_backward({BOTH_ARRAYS}, Tensor[] operands, Tensor grad, Tensor out, Tensor total, "
    "str score, str value, bool[] needs) -> Tensor[]",
    _attention_backward,
    _attention_backward_fake,
)
