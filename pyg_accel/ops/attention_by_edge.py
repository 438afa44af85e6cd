"""Plans of :func:`.attention` on graphs that have no CSR form.

Forward: the largest score of each target; the exponentials of scores and their sums; the weighted
sum of values. Backward: the gradient of the weights, its sum over each target, and the gradients of
the values; then the gradients of the operands of scores.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pyg_accel.backends.edges import Output, Passes
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    Sum,
    Unary,
    operands_of,
    parse,
    without_narrow_sums,
)
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.attention_backward import AttentionRule, operand_gradients, rule_of
from pyg_accel.ops.by_edge import EdgePlan, EdgeRule, Sizes, plan_passes
from pyg_accel.ops.gspmm_backward import kinds_of_shapes

__all__ = ["attention_plan_of"]


def attention_plan_of(
    edges: Edges, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> EdgePlan | None:
    """Return the plan of a kind of call; None if it needs the rows of a graph.

    Args:
        edges: the graph.
        kind: formulas of scores and values, and whether edge operands are in the order of the edge
            list.
        operands: of both, by index.
        needs: which of them need gradients.
    """
    rule = rule_of(kind, operands, needs)
    if rule is None:
        return None
    n, shapes, (heads, width) = len(operands), dict(enumerate(rule.shapes)), rule.message
    scores, values = (without_narrow_sums(parse(text), shapes) for text in kind[:2])
    share = Unary("exp", Binary("sub", scores, Operand("v", n)))
    weight = Binary("div", Operand("e", n + 1), Operand("v", n + 2))
    recorded = any(needs)
    passes = (
        (Output(scores, "v", (heads, 1), "max", returned=False),),
        (Output(share, "e", (heads, 1), wide=True, returned=recorded),
         Output(share, "v", (heads, 1), wide=True, returned=recorded)),
        (Output(Binary("mul", values, weight), "v", (heads, width)),),
    )  # fmt: skip
    rule = replace(rule, keeps=(*range(n), n + 1, n + 2), indices=(*range(n), n + 4, n + 5, n))
    return plan_passes(edges, EdgeRule(rule, _gradients), passes, operands, last=True)


def _gradients(rule: AttentionRule, sizes: Sizes, degrees: int) -> tuple[Passes, list[int]]:
    """The passes of the gradients: operands of values alone, then operands of scores."""
    n, number = len(rule.sides), (rule.message[0], 1)
    grad, total, share = Operand("v", n), Operand("v", n + 4), Operand("e", n + 5)
    of_weight, sums = Operand("e", degrees + 1), Operand("v", degrees + 2)
    sizes = sizes | {of_weight.index: number, sums.index: number}
    kinds = dict(zip(sizes, kinds_of_shapes([*sizes.values()]), strict=True))
    score, value = (without_narrow_sums(parse(t), sizes) for t in (rule.score, rule.value))
    weight = Binary("div", share, total)
    inner: Formula = Binary("mul", grad, value)
    inner = Binary("mul", weight, inner if rule.message[1] == 1 else Sum(inner))
    of_score = Binary("sub", of_weight, Binary("mul", weight, sums))
    gradients = operand_gradients(score, value, rule.needs, kinds, grad, weight, of_score)
    first = [Output(inner, side, number, wide=True, returned=False) for side in "ev"]
    passes = [first, list[Output]()]
    order: list[list[int]] = [[], []]
    for i, formula in gradients.items():
        late = any(o.index == of_weight.index for o in operands_of(formula))
        if isinstance(formula, Sum) and rule.shapes[i][1] == 1:  # which the output is anyway
            formula = formula.arg
        passes[late].append(EdgeRule.output(rule, i, formula, kinds))
        order[late].append(i)
    return tuple([tuple(part) for part in passes if part]), [*order[0], *order[1]]
