"""Attention by its parts, each an operator that can be differentiated any number of times."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    has_sum,
    map_operands,
    operands_of,
    parse,
    shape_of,
)
from pyg_accel.graph import Graph
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.ops.messages import messages
from pyg_accel.ops.softmax import edge_softmax
from pyg_accel.ops.steps import renumber

__all__ = ["extent", "unfused"]


def unfused(
    graph: Graph, score: str, value: str, operands: Sequence[Tensor], *, edge_order: bool
) -> Tensor:
    """Compute scores, their softmax and the weighted sum of values; see :func:`.attention`."""
    heads, width = extent(score, value, shapes_of(operands))
    scores = messages(graph, parse(score), operands, edge_order=edge_order)
    weights = edge_softmax(graph, scores.squeeze(-1), edge_order=edge_order)
    formula = parse(value)
    weighted: Formula = Binary("mul", formula, Operand("e", len(operands)))
    used = tuple(dict.fromkeys(o.index for o in operands_of(weighted)))
    given = [*operands, weights.unsqueeze(-1)]
    weighted = map_operands(weighted, partial(renumber, used))
    out: Tensor = gspmm(graph, weighted, [given[i] for i in used], edge_order=edge_order)
    return out.expand(-1, heads, width)


def extent(score: str, value: str, shapes: Shapes) -> tuple[int, int]:
    """Return (heads, width) of the result."""
    sizes = dict(enumerate(shapes))
    heads, one = shape_of(parse(score), sizes)
    if one != 1:
        raise ValueError(f"expected one score per edge and head (got {one} of {score})")
    if has_sum(parse(value)):
        raise ValueError(f"expected a value without sums over the width (got {value})")
    own, width = shape_of(parse(value), sizes)
    if heads != own and 1 not in (heads, own):
        raise ValueError(f"scores of {heads} heads and values of {own} do not broadcast")
    return (own if heads == 1 else heads), width
