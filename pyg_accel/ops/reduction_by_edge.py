"""Plans of :func:`.gspmm` on graphs that have no CSR form."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyg_accel.backends.edges import Output, Passes
from pyg_accel.formula import Binary, Const, Formula, Operand, parse, times, without_narrow_sums
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.by_edge import EdgePlan, EdgeRule, Sizes, plan_passes
from pyg_accel.ops.gspmm_backward import kinds_of_shapes, operand_gradients
from pyg_accel.ops.reduction import EXTREMES, Reduction, rule_of

__all__ = ["edge_plan_of"]


def edge_plan_of(
    edges: Edges, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> EdgePlan | None:
    """Return the plan of a kind of call; None if it needs the rows of a graph.

    Args:
        edges: the graph.
        kind: formula, reductions, whether edge operands are in the order of the edge list, and
            whether a call returns a tensor.
        operands: by index.
        needs: which of them need gradients.
    """
    rule, (_, reduces, _, single) = rule_of(kind, operands, needs), kind
    if rule is None or "prod" in reduces:
        return None
    return plan_passes(
        edges, EdgeRule(rule, _gradients), _forward(rule), operands,
        results=0 if single else len(reduces), counts="mean" in reduces,
        numbered="none" in reduces,
    )  # fmt: skip


def _share(index: int) -> Formula:
    """Return 1 / degree of the target, from the operand with the degrees."""
    return Binary("div", Const(1.0), Operand("v", index))


def _forward(rule: Reduction) -> Passes:
    """The passes of a call: all reductions, then the winners of maxima and minima."""
    n = len(rule.sides)
    formula = without_narrow_sums(parse(rule.text), dict(enumerate(rule.shapes)))
    first, winners = [], []
    results = n + ("mean" in rule.reduces)
    for r, reduce in enumerate(rule.reduces):
        message = formula
        if reduce == "mean":
            message = times(formula, _share(n))
        elif reduce == "sqsum":
            message = Binary("mul", formula, formula)
        extreme = reduce in EXTREMES
        side = "e" if reduce == "none" else "v"
        first.append(Output(message, side, rule.message, reduce if extreme else "sum",
                            trailing=tuple(rule.trailing)))  # fmt: skip
        if extreme and rule.want_arg:
            winners.append(Output(formula, "v", rule.message, "winner", of=results + r))
    return (tuple(first), tuple(winners)) if winners else (tuple(first),)


def _gradients(rule: Reduction, sizes: Sizes, degrees: int) -> tuple[Passes, list[int]]:
    """The pass of all gradients, sums over edges."""
    n, kinds = len(rule.sides), dict(enumerate(kinds_of_shapes(rule.shapes))) | {degrees: (1, 1)}
    grads = tuple([n + 2 * r in sizes for r in range(len(rule.reduces))])
    wanted = operand_gradients(rule.text, rule.reduces, rule.needs, grads, kinds, _share(degrees))
    return (tuple([EdgeRule.output(rule, i, f, sizes) for i, f in wanted.items()]),), [*wanted]
