"""Definition of passes over the edges of an edge list."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_accel.backends.dtypes import accumulate
from pyg_accel.backends.edges import Output, Passes
from pyg_accel.backends.reference.messages import evaluate
from pyg_accel.formula import Const
from pyg_accel.graph.csr import Edges

__all__ = ["edge_passes"]


def edge_passes(edges: Edges, passes: Passes, operands: Sequence[Tensor | None]) -> list[Tensor]:
    """Evaluate formulas for every edge and reduce them over its source or its target.

    Args:
        edges: the graph.
        passes: the outputs of each pass; see :class:`~pyg_accel.backends.edges.Output`.
        operands: [rows, 1 | H, 1 | F], contiguous within a row; winners are int32; None for
            unused operands.

    Returns:
        [rows, H, F] of each returned output; 0 for rows without edges. Winners are int32 and
        number the edges of the list.
    """
    floats = [t.dtype for t in operands if t is not None and t.is_floating_point()]
    dtype = floats[0] if floats else torch.float32
    source, target = (ids.long() for ids in edges.ends())
    numbers = torch.arange(target.numel(), device=target.device)
    rows = {"u": edges.num_cols, "v": edges.num_rows, "e": target.numel()}
    if edges.loops is not None:
        stay = (source != target) | (numbers >= edges.edge_index.size(1))
        source, target, numbers = source[stay], target[stay], numbers[stay]
    place = {"u": source, "v": target, "e": numbers}
    wide = accumulate(dtype)
    values = [torch.empty(0, 1, 1, dtype=wide) if t is None else t for t in operands]
    values = [t.to(wide) if t.is_floating_point() else t for t in values]
    returned: list[Tensor] = []
    for part in passes:
        results = []
        for output in part:
            if isinstance(output.formula, Const):
                message = torch.full((target.numel(), 1, 1), output.formula.value,
                                     dtype=wide, device=target.device)  # fmt: skip
            else:
                message = evaluate(output.formula, values, place).expand(target.numel(), -1, -1)
            index, count = place[output.side], rows[output.side]
            if output.reduce == "winner":
                result = _winners(message, values[output.of], index, source, numbers)
            else:
                result = _reduced(message, output, index, count)
            results.append(result)
            if output.returned:
                exact = output.wide or output.reduce == "winner"
                shape = (count, *(output.trailing or output.shape))
                out = (result if exact else result.to(dtype)).reshape(shape)
                returned.append(out if out._base is None else out.clone())  # users may change it
        values += results
    return returned


def _reduced(message: Tensor, output: Output, index: Tensor, rows: int) -> Tensor:
    for dim, size in enumerate(output.shape, 1):
        if size == 1 != message.size(dim):
            message = message.sum(dim, keepdim=True)
    message = message.expand(-1, *output.shape)
    index = index.view(-1, 1, 1).expand_as(message)
    name = {"max": "amax", "min": "amin", "sum": "sum"}[output.reduce]
    zeros = message.new_zeros(rows, *output.shape)
    return zeros.scatter_reduce(0, index, message, name, include_self=False)


def _winners(
    message: Tensor, best: Tensor, index: Tensor, source: Tensor, numbers: Tensor
) -> Tensor:
    """Return the edge with the best message; ties go to the lowest source."""
    most = best.index_select(0, index)
    wins = (message == most) | (message.isnan() & most.isnan())
    order = source.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    none = order.numel()
    ranks = torch.where(wins, rank.view(-1, 1, 1), none)
    first = torch.full(best.shape, none, device=best.device)
    first.scatter_reduce_(0, index.view(-1, 1, 1).expand_as(ranks), ranks, "amin")
    padded = torch.cat([numbers[order], order.new_full((1,), -1)])
    return padded[first].to(torch.int32)
