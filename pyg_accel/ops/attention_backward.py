"""The gradient of attention: a pass over the transposed graph, and the gradients of targets.

With ``p`` the weight of an edge and ``g`` the gradient of the result, the gradient of its score is
``ds = p * (sum(g * value) - delta)``, where ``delta = sum(g * out)`` is one number per target and
head, so that no pass over the edges of a target has to compute it. The pass computes p anew from
the scores, the largest score of a target and the sum of the exponentials, and adds up the gradients
of source operands. It writes ds (and p, if requested), E x heads, and the gradients of targets and
edges are sums of formulas that read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide, is_fast
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    Sum,
    Unary,
    gradient,
    map_operands,
    operands_of,
    parse,
    shape_of,
    swap_sides,
)
from pyg_accel.graph import CSR, Graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.arrays import CSR_ARRAYS, Arrays
from pyg_accel.ops.attention_unfused import extent, unfused
from pyg_accel.ops.autograd import Gradient, Result, computed_again
from pyg_accel.ops.gspmm_backward import kinds_of_shapes
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.passes import Passes, RowRule
from pyg_accel.ops.steps import Pass, Step, passes_of

__all__ = [
    "AttentionRule", "attention_rule", "is_backward_fast", "operand_gradients", "read_by",
    "rule_of",
]  # fmt: skip


class SourcePass(NamedTuple):
    """The pass over the transposed graph: gradients of sources and scores, and weights of edges.

    With n operands, operand n is the gradient of the result, n + 1 the weights of edges and n + 2
    the gradients of scores.

    Attributes:
        score: formula of the scores.
        value: of the values.
        needs: operands with gradients.
        sources: operands with gradients from this pass.
        stores: further results: gradients of scores, then weights, if later steps read them.
        formulas: for sources and then for stored values; see
            :class:`~pyg_accel.backends.attention.AttentionGradient`.
        turned: score and value on the transposed graph.
        source: it runs on the transposed graph.
    """

    score: str
    value: str
    needs: tuple[bool, ...]
    sources: tuple[int, ...]
    stores: tuple[int, ...]
    formulas: tuple[str, ...]
    turned: tuple[str, str]
    source: bool = True

    @property
    def operands(self) -> tuple[int, ...]:
        """The computed gradients, by operand."""
        return self.sources + self.stores

    @property
    def used(self) -> tuple[int, ...]:
        """Its inputs: operands, the results, and the gradient of the first."""
        n = len(self.needs)
        return (*range(n), n + 3, n + 4, n + 5, n)

    @property
    def facts(self) -> dict[str, Any]:
        """Formulas and reductions, for the choice of a kernel."""
        score, value = self.turned
        reduces = ("sum",) * len(self.sources) + ("none",) * len(self.stores)
        return {"score": score, "formula": value, "formulas": self.formulas, "reduces": reduces}

    def sizes(self, tensors: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """Return (heads, width) of its results."""
        n = len(self.needs)
        heads, shapes = tensors[n].size(1), shapes_of([tensors[i] for i in range(n + 1)])
        sizes = dict(enumerate((*shapes, *[(heads, 1)] * 3)))
        return [(heads, shape_of(parse(text), sizes)[1]) for text in self.formulas]

    def by_operators(self, arrays: Arrays) -> Callable[[CSR], Launch]:
        """Return a function that launches the operator."""
        arguments = (self.score, self.value, list(self.needs))
        return lambda csr: Launch(
            lambda tensors: call("attention_gradients", *csr[:5], tensors, *arguments), listed=True
        )

    def bind(self, csr: CSR, tensors: list[Tensor]) -> tuple[str, Callable[[CSR], Launch]]:
        """Return the backend, and a function that launches its kernel on graphs of one kind."""
        n, grad = len(self.needs), tensors[-1]
        spec = OpSpec.on("attention_backward", csr, grad, grad.size(1), grad.size(2),
                         shapes=shapes_of(tensors[:n]), **self.facts)  # fmt: skip
        decision, (score, value) = decide(spec), map(parse, self.turned)
        formulas, count = tuple(map(parse, self.formulas)), len(self.sources)

        def problem(tensors: list[Tensor]) -> AttentionGradient:
            *results, grad = tensors[n:]
            return AttentionGradient(score, value, formulas[:count], formulas[count:], tensors[:n],
                                     grad, *results)  # fmt: skip

        kernel, name = decision.kernel, decision.backend.name
        if kernel.bind is not None:
            return name, kernel.bind(csr, problem(tensors))
        return name, lambda csr: Launch(lambda t: kernel.run(csr, problem(t)), listed=True)


@lru_cache(maxsize=1024)
def _plan(
    score: str, value: str, needs: tuple[bool, ...], shapes: Shapes
) -> tuple[SourcePass, tuple[Step, ...]]:
    """Return the pass over the transposed graph, and the steps for targets and edges."""
    n = len(shapes)
    scores, values = parse(score), parse(value)
    sizes = dict(enumerate(shapes))
    heads = max(shape_of(scores, sizes)[0], shape_of(values, sizes)[0])
    sizes[n] = (heads, shape_of(values, sizes)[1])
    sizes[n + 1] = sizes[n + 2] = (heads, 1)
    grad, weight, of_score = Operand("v", n), Operand("e", n + 1), Operand("e", n + 2)
    wanted = operand_gradients(scores, values, needs, sizes, grad, weight, of_score)
    sides = {o.index: o.side for o in (*operands_of(scores), *operands_of(values))}
    sources, others = dict[int, Formula](), []
    for index, formula in wanted.items():
        if sides[index] == "u":
            sources[index] = swap_sides(formula)
            continue
        others.append(Step(index, sides[index], formula))
    upstream, largest, inverse, delta = (Operand("u", n + i) for i in range(4))
    scores, values = swap_sides(scores), swap_sides(values)
    share = Unary("exp", Binary("sub", scores, largest))
    per_edge: dict[int, Formula] = {n + 1: Binary("mul", share, inverse)}
    inner = Binary("sub", Sum(Binary("mul", upstream, values)), delta)
    per_edge[n + 2] = Binary("mul", per_edge[n + 1], inner)
    read = {o.index for step in others for o in operands_of(step.formula)}
    stores = tuple(i for i in (n + 2, n + 1) if i in read)
    sums = [map_operands(f, lambda o: per_edge.get(o.index, o)) for f in sources.values()]
    formulas = tuple(map(str, (*sums, *map(per_edge.get, stores))))
    turned = str(scores), str(values)
    return SourcePass(score, value, needs, tuple(sources), stores, formulas, turned), tuple(others)


def operand_gradients(
    score: Formula,
    value: Formula,
    needs: tuple[bool, ...],
    sizes: dict[int, tuple[int, int]],
    grad: Formula,
    weight: Formula,
    of_score: Formula,
) -> dict[int, Formula]:
    """Return the contribution of each edge to the gradients of operands.

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
        terms: list[Formula] = [part for part in parts if part is not None]
        if sizes[index][1] == 1:  # one by one: a part with one column needs no sum
            terms = [Sum(part) if shape_of(part, sizes)[1] != 1 else part for part in terms]
        if terms:
            wanted[index] = terms[0] if len(terms) == 1 else Binary("add", *terms)
    return wanted


def is_backward_fast(spec: OpSpec, needs: tuple[bool, ...]) -> bool:
    """Return whether backends run the backward pass of a call, whatever the size of its graph."""
    part, _ = _plan(spec.score, spec.formula, needs, kinds_of_shapes(spec.shapes))
    return is_fast(replace(spec, op="attention_backward", **part.facts))


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionRule(RowRule):
    """The gradient of a fused call; ``message`` is the (heads, width) of its result.

    Attributes:
        score: formula of the scores.
        value: of the values.
    """

    score: str
    value: str

    @property
    def turns(self) -> bool:
        """Whether the pass needs the transposed graph: always."""
        return True

    def size(self, index: int) -> tuple[int, int]:
        """Return (heads, width) of an operand of the passes; (heads, 1) for a sum of scores."""
        number = index >= len(self.sides) + 4
        return (self.message[0], 1) if number else super().size(index)

    def operators(self, graph: Graph | Arrays, edges: Edges | None, tensors: list[Any]) -> Gradient:
        """Plan the pass by operators; for double backward, by the unfused ones."""
        if tensors[-1] is None or not (edges or torch.is_grad_enabled()):
            return super().operators(graph, edges, tensors)
        edge_order = self.edge_order
        if isinstance(graph, Arrays):
            edge_order = graph.eid is not None
            graph = Graph.trusted(*graph.csr[:4], sorted=graph.sorted)
        n, run = len(self.needs), partial(self._again, graph, edge_order)
        results = tuple([Result(i, None) for i in range(n) if self.needs[i]])
        return Gradient((), (), [(run, True, (*range(n), len(tensors) - 1), results)], {})

    def _again(self, graph: Graph, edge_order: bool, tensors: list[Tensor]) -> list[Tensor]:
        """Return gradients of the unfused operators, which have derivatives of every order."""
        *operands, grad = tensors

        def parts(operands: list[Tensor]) -> list[Tensor]:
            folded = [contiguous_rows(t.reshape(t.size(0), *size))
                      for t, size in zip(operands, self.shapes, strict=True)]  # fmt: skip
            return [unfused(graph, self.score, self.value, folded, edge_order=edge_order)]

        got = computed_again(parts, operands, self.needs, {0: grad})
        return [torch.zeros_like(t) if part is None else part
                for t, part in zip(compress(operands, self.needs), got, strict=True)]  # fmt: skip

    def passes(self, plan: Passes, arrays: Arrays | None, special: Pass | None) -> list[Any]:
        """Return the pass over the transposed graph, and the passes for targets and edges."""
        n, grad = len(self.sides), plan.ready[len(self.sides)]
        sources, others = _plan(self.score, self.value, self.needs, kinds_of_shapes(self.shapes))
        by_edge = grad.new_empty(0, grad.size(1), 1)  # weights, and gradients of scores
        like = plan.ready | {n + 1: by_edge, n + 2: by_edge}
        return [sources, *passes_of(others, like)]


def rule_of(
    kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> AttentionRule | None:
    """Return the rule of a kind of fused call; None if no plan serves it."""
    one_dtype = len({t.dtype for t in operands}) == 1 and operands[0].is_floating_point()
    if not one_dtype or any(not 0 < t.dim() <= 3 for t in operands):
        return None
    return _cached_rule(*kind, needs, tuple(t.shape[1:] for t in operands))


def attention_rule(
    score: str, value: str, edge_order: bool, needs: tuple[bool, ...], trailings: tuple[Any, ...]
) -> AttentionRule | None:
    """Return the rule of fused calls; None for operands that no plan serves.

    Args:
        score: formula of the scores.
        value: of the values.
        edge_order: edge operands are in the order of the edge list.
        needs: which operands need gradients.
        trailings: shape of each without its rows.
    """
    n, read = len(needs), read_by(score, value)
    if sorted(index for _, index in read) != list(range(n)):
        return None
    sides = tuple(side for side, _ in sorted(read, key=itemgetter(1)))
    shapes: Shapes = tuple((*t, 1, 1)[:2] for t in trailings)
    return AttentionRule(
        edge_order and "e" in sides, sides, trailings, shapes, needs, extent(score, value, shapes),
        tuple(range(n + 3)), (*range(n), n + 3, n + 4, n + 5, n), score=score, value=value,
    )  # fmt: skip


_cached_rule = lru_cache(maxsize=4096)(attention_rule)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def read_by(score: str, value: str) -> tuple[tuple[str, int], ...]:
    """Return the (side, index) of every operand of attention."""
    operands = [*operands_of(parse(score)), *operands_of(parse(value))]
    return tuple(dict.fromkeys((o.side, o.index) for o in operands))


def _pass_of(args: tuple[Any, ...]) -> tuple[CSR, SourcePass, list[Tensor]]:
    tensors, score, value, needs = args[5:]
    part, _ = _plan(score, value, tuple(needs), kinds_of_shapes(shapes_of(tensors[:-4])))
    return CSR(*args[:5]), part, tensors


def _gradients(*args: Any) -> list[Tensor]:
    csr, part, tensors = _pass_of(args)
    name, bound = part.bind(csr, tensors)
    note_choice(name)
    return bound(csr)(tensors)


def _gradients_fake(*args: Any) -> list[Tensor]:
    csr, part, tensors = _pass_of(args)
    n, grad = len(part.needs), tensors[-1]
    sizes = part.sizes(dict(enumerate((*tensors[:n], grad))))
    return [grad.new_empty(csr.num_rows if index < n else csr.col.size(0), *size)
            for index, size in zip(part.operands, sizes, strict=True)]  # fmt: skip


define(
    f"attention_gradients({CSR_ARRAYS}, Tensor[] tensors, str score, str value, bool[] needs) "
    "-> Tensor[]",
    _gradients,
    _gradients_fake,
)
