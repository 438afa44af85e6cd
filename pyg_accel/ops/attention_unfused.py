"""Attention by its parts, each an operator that can be differentiated any number of times."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from pyg_accel.backends.base import Launch
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import (
    Binary,
    Formula,
    Operand,
    has_sum,
    parse,
    renumbered,
    shape_of,
)
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.ops.launch import bind_gspmm
from pyg_accel.ops.messages import message_calls
from pyg_accel.ops.softmax import edge_softmax, softmax_of

__all__ = ["bind_unfused", "extent", "unfused"]


class _Part(NamedTuple):
    """One operator; its result is an operand of the next ones.

    Attributes:
        text: formula of the message; None for the softmax of scores.
        used: indices of its operands.
        reduce: reduction of the messages.
    """

    text: str | None
    used: tuple[int, ...]
    reduce: str = "none"


@lru_cache(maxsize=1024)
def _parts(score: str, value: str, count: int) -> tuple[_Part, ...]:
    """The parts of attention of so many operands: scores, their softmax, the weighted sum."""
    calls, scores = message_calls(parse(score), count)
    weights = count + len(calls)
    weighted: Formula = Binary("mul", parse(value), Operand("e", weights))
    (weighted,), used = renumbered(weighted)
    parts = [_Part(*call) for call in calls]
    return *parts, _Part(None, (scores,)), _Part(str(weighted), used, "sum")


def unfused(
    graph: Graph, score: str, value: str, operands: Sequence[Tensor], *, edge_order: bool
) -> Tensor:
    """Compute scores, their softmax and the weighted sum of values; see :func:`.attention`."""
    heads, width = extent(score, value, shapes_of(operands))
    tensors = list(operands)
    for text, used, reduce in _parts(score, value, len(tensors)):
        inputs = [tensors[i] for i in used]
        if text is None:
            out = edge_softmax(graph, inputs[0].squeeze(-1), edge_order=edge_order)
        else:
            out = gspmm(graph, text, inputs, reduce=reduce, edge_order=edge_order)
        tensors.append(out if out.dim() == 3 else out.unsqueeze(-1))
    return tensors[-1].expand(-1, heads, width)


def bind_unfused(
    csr: CSR, score: str, value: str, operands: list[Tensor]
) -> tuple[dict[str, None], Callable[[CSR], Launch]]:
    """Return the backends of the parts, and a function that launches all on graphs of one kind.

    Args:
        csr: a graph of that kind.
        score: formula of the scores.
        value: of the values.
        operands: example operands, [rows, H, F].
    """
    heads, width = extent(score, value, shapes_of(operands))
    tensors, backends = list(operands), dict[str, None]()
    parts: list[tuple[Callable[[CSR], Launch], tuple[int, ...]]] = []
    for text, used, reduce in _parts(score, value, len(tensors)):
        inputs = [tensors[i] for i in used]
        bound: Callable[[CSR], Launch]
        if text is None:
            name, softmax = softmax_of(csr, inputs[0].squeeze(-1))
            bound = partial(_softmax_launch, softmax)
        else:
            name, bound = bind_gspmm(csr, (text,), (reduce,), inputs)
        parts.append((bound, used))
        backends[name] = None
        # Launches depend on shapes alone: nothing runs before the call itself.
        rows = csr.col.numel() if reduce == "none" else csr.num_rows
        sizes = dict(enumerate(shapes_of(inputs)))
        size = shape_of(parse(text), sizes) if text is not None else (inputs[0].size(1), 1)
        tensors.append(inputs[0].new_empty(rows, *size))

    def on(csr: CSR) -> Launch:
        launches = [(bound(csr), used) for bound, used in parts]

        def run(*inputs: Tensor) -> Tensor:
            tensors = list(inputs)
            for launch, used in launches:
                tensors.append(launch([tensors[i] for i in used])[0])
            out = tensors[-1]
            return out if out.shape[1:] == (heads, width) else out.expand(-1, heads, width)

        return Launch(run)

    return backends, on


def _softmax_launch(softmax: Callable[..., Tensor], csr: CSR) -> Launch:
    return Launch(lambda t: softmax(csr, t.squeeze(-1), None))


def extent(score: str, value: str, shapes: Shapes) -> tuple[int, int]:
    """Return (heads, width) of the result."""
    sizes = dict(enumerate(shapes))
    heads, one = shape_of(parse(score), sizes)
    if one != 1:
        raise ValueError(f"expected one score per edge and head (got {one} of {score})")
    if has_sum(parse(value)):
        raise ValueError(f"expected a value without sums over the width (got {value})")
    value_heads, width = shape_of(parse(value), sizes)
    if heads != value_heads and 1 not in (heads, value_heads):
        raise ValueError(f"scores of {heads} heads and values of {value_heads} do not broadcast")
    return (value_heads if heads == 1 else heads), width
