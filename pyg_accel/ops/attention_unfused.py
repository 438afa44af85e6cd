"""Attention by its parts, each an operator that can be differentiated any number of times."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.base import Launch
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
from pyg_accel.ops.launch import launch_of
from pyg_accel.ops.messages import message_calls, messages
from pyg_accel.ops.softmax import edge_softmax
from pyg_accel.ops.steps import renumber

__all__ = ["extent", "unfused", "unfused_launch"]


def unfused(
    graph: Graph, score: str, value: str, operands: Sequence[Tensor], *, edge_order: bool
) -> Tensor:
    """Compute scores, their softmax and the weighted sum of values; see :func:`.attention`."""
    heads, width = extent(score, value, shapes_of(operands))
    scores = messages(graph, parse(score), operands, edge_order=edge_order)
    weights = edge_softmax(graph, scores.squeeze(-1), edge_order=edge_order)
    weighted, used = _weighted(value, len(operands))
    given = [*operands, weights.unsqueeze(-1)]
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


def unfused_launch(
    graph: Graph, score: str, value: str, operands: Sequence[Tensor], *, edge_order: bool
) -> tuple[dict[str, None], Launch]:
    """Return the backends of the parts, and their launches as one that has no gradient."""
    heads, width = extent(score, value, shapes_of(operands))
    csr, tensors = graph.csr(edge_order=edge_order), list(operands)
    backends: dict[str, None] = {}
    launches: list[tuple[Launch, tuple[int, ...]]] = []

    def add(name: str, launch: Launch, used: tuple[int, ...]) -> None:
        launches.append((launch, used))
        backends[name] = None
        tensors.append(launch([tensors[i] for i in used])[0])

    calls, last = message_calls(parse(score), len(tensors))
    for text, used, _ in calls:
        add(*launch_of(csr, text, ("none",), [tensors[i] for i in used], want_arg=False), used)
    scores = tensors[last]
    softmax = choose(OpSpec.on("edge_softmax", csr, scores, scores.size(1), 1))
    normalise = Launch(lambda t: softmax.kernel.run(csr, t.squeeze(-1), None))
    add(softmax.backend.name, normalise, (last,))
    weighted, used = _weighted(value, len(tensors) - 1)
    add(*launch_of(csr, weighted, ("sum",), [tensors[i] for i in used], want_arg=False), used)
    whole = tensors[-1].shape[1:] == (heads, width)

    def launch(*given: Tensor) -> list[Tensor]:
        tensors = list(given)
        for (function, before, after, listed), used in launches:
            read: Any = map(tensors.__getitem__, used)
            outs = function(*before, *([list(read)] if listed else read), *after)
            out = outs if type(outs) is Tensor else outs[0]
            tensors.append(out if out.dim() == 3 else out.unsqueeze(-1))
        return [tensors[-1] if whole else tensors[-1].expand(-1, heads, width)]

    return backends, Launch(launch)


def _weighted(value: str, weights: int) -> tuple[str, tuple[int, ...]]:
    """The values times the weights of edges, and the operands that they read."""
    formula: Formula = Binary("mul", parse(value), Operand("e", weights))
    used = tuple(dict.fromkeys(o.index for o in operands_of(formula)))
    return str(map_operands(formula, partial(renumber, used))), used
