"""Reductions of rows over groups: readouts, and other calls of ``scatter``.

The groups are the targets of a graph whose sources are the rows, each with one edge. The gradient
of sums and means is that of each row's group; that of maxima and minima goes to the winners, which
the kernels return.
"""

from typing import Any

import torch
from torch import Tensor

from pyg_accel.derived import derived
from pyg_accel.graph import Graph, for_autograd
from pyg_accel.ops.gspmm import gspmm

__all__ = ["groups_of", "groups_of_ptr", "reduce_groups"]


def groups_of(index: Tensor, num_groups: int) -> Graph:
    """Return the graph from rows to their groups, from the cache if it can.

    Args:
        index: [N], the group of each row.
        num_groups: number of groups.

    Raises:
        IndexError: for groups outside of their number.
    """

    def make() -> Graph:
        rows = torch.arange(index.numel(), dtype=index.dtype, device=index.device)
        return Graph.from_edge_index(torch.stack([rows, index]), (index.numel(), num_groups))

    return derived((index,), ("groups", num_groups), make)


def groups_of_ptr(ptr: Tensor, num_rows: int) -> Graph:
    """Return the graph from rows to their groups, which are neighbours.

    Args:
        ptr: [G + 1], where each group begins.
        num_rows: N.

    Raises:
        ValueError: if ptr does not ascend from 0 to N.
    """

    @for_autograd
    def make() -> Graph:
        rows = torch.arange(num_rows, dtype=ptr.dtype, device=ptr.device)
        # A copy: what is stored must not refer to the memory of its owner.
        return Graph.from_csr(ptr.clone(), rows, num_cols=num_rows)

    return derived((ptr,), ("groups that begin there", num_rows), make)


def reduce_groups(graph: Graph, src: Tensor, index: Tensor | None, reduce: str) -> Tensor:
    """Reduce rows over their groups: [G, ...], and 0 for groups without rows.

    Args:
        graph: of :func:`groups_of` or :func:`groups_of_ptr`.
        src: [N, ...].
        index: [N], the group of each row; None if the graph is by ``ptr``.
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    """
    if reduce in ("max", "min") or not (torch.is_grad_enabled() and src.requires_grad):
        out: Tensor = gspmm(graph, "u0", [src], reduce=reduce)
        return out
    if index is None:
        index = torch.repeat_interleave(graph.degree.long(), output_size=src.size(0))
    summed: Tensor = _Sum.apply(graph, src, index, reduce)  # type: ignore[no-untyped-call]
    return summed


class _Sum(torch.autograd.Function):
    """A sum or mean over groups, whose gradient is looked up."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, src: Tensor, index: Tensor, reduce: str) -> Any:
        ctx.graph, ctx.reduce = graph, reduce
        ctx.save_for_backward(index)
        return gspmm(graph, "u0", [src], reduce=reduce)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        if ctx.reduce == "mean":
            degree = ctx.graph.degree.clamp(min=1).to(grad.dtype)
            grad = grad / degree.view(-1, *(1,) * (grad.dim() - 1))
        return None, grad.index_select(0, index), None, None
