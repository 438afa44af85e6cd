"""Aggregation over many relations at once: their graphs stacked, and one matrix each."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph import Graph
from pyg_accel.ops.segment_matmul import segment_matmul
from pyg_accel.ops.spmm import spmm

__all__ = ["Relations", "relational_spmm", "stack_relations"]


class Relations(NamedTuple):
    """The graphs of all relations, with a row for each target that a relation has edges to.

    Attributes:
        into: from source nodes to the P pairs of a relation and a target, by relation.
        out: from the pairs to the target nodes.
        ptr: [R + 1], where the pairs of every relation begin; on the CPU.
    """

    into: Graph
    out: Graph
    ptr: Tensor


def stack_relations(
    source: Tensor, target: Tensor, relation: Tensor, sizes: tuple[int, int, int]
) -> Relations:
    """Stack the graphs of relations.

    Args:
        source: [E].
        target: [E].
        relation: [E].
        sizes: numbers of source nodes, target nodes and relations.

    Raises:
        IndexError: for ids outside of their range.
    """
    sources, targets, relations = sizes
    for name, ids, most in (("target", target, targets), ("relation", relation, relations)):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < most:
            raise IndexError(f"found {name} ids outside of [0, {most})")
    stride = max(targets, 1)
    pairs, pair = torch.unique(relation.long() * stride + target, return_inverse=True)
    ids = torch.arange(pairs.numel(), device=pairs.device)
    starts = torch.arange(relations + 1, device=pairs.device) * stride
    return Relations(
        Graph.from_edge_index(torch.stack([source.long(), pair]), (sources, pairs.numel())),
        Graph.from_edge_index(torch.stack([ids, pairs % stride]), (pairs.numel(), targets)),
        torch.searchsorted(pairs, starts).cpu(),
    )


def relational_spmm(
    relations: Relations, x: Tensor, weight: Tensor, *, reduce: str = "sum"
) -> Tensor:
    """Aggregate over the edges of each relation, multiply by its matrix, sum over relations.

    Takes P x F memory for P pairs of a relation and a target with edges, at most as many as edges.

    Args:
        relations: of :func:`stack_relations`.
        x: [num sources, F].
        weight: [R, F, H], or [R, B, F / B, H / B] for blocks on a diagonal.
        reduce: over the edges of a relation, as in :func:`~pyg_accel.ops.spmm`.

    Returns:
        [num targets, H].
    """
    rows = spmm(relations.into, x, reduce=reduce)
    if weight.dim() == 3:
        rows = segment_matmul(rows, relations.ptr, weight)
    else:
        parts = zip(rows.chunk(weight.size(1), dim=1), weight.unbind(1), strict=True)
        rows = torch.cat([segment_matmul(part, relations.ptr, w) for part, w in parts], dim=1)
    summed: Tensor = spmm(relations.out, rows)
    return summed
