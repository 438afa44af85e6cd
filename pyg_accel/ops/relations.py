"""Aggregation over many relations at once: their graphs stacked, and one matrix each."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph import Graph
from pyg_accel.graph.derived import derived
from pyg_accel.ops.segment_matmul import segment_matmul
from pyg_accel.ops.spmm import spmm

__all__ = [
    "Pairs",
    "Relations",
    "graph_of_pairs",
    "multiply_pairs",
    "pairs_of",
    "relational_spmm",
    "stack_relations",
]


_FEW = 8  # possible pairs of a relation and a node, per edge


class Relations(NamedTuple):
    """The graphs of all relations, with a row for each pair of a relation and a target.

    Attributes:
        into: from source nodes to the P pairs with edges, by relation.
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
    nodes, ptr, pair = _pairs(target, relation, targets, relations)
    return Relations(
        Graph.from_edge_index(torch.stack([source.long(), pair]), (sources, nodes.numel())),
        Graph.from_edge_index(_own_edges(nodes).flip(0), (nodes.numel(), targets)),
        ptr,
    )


class Pairs(NamedTuple):
    """The P pairs of a relation and a node at one end of its edges, by relation.

    Attributes:
        node: a graph with one edge into each of P rows, from its node.
        ptr: [R + 1], where the pairs of every relation begin; on the CPU.
        nodes: [P], their nodes; a recording reads P from it.
        pair: [E], the pair of every edge.
    """

    node: Graph
    ptr: Tensor
    nodes: Tensor
    pair: Tensor


def pairs_of(edge_index: Tensor, row: int, relation: Tensor, nodes: int, relations: int) -> Pairs:
    """Return the pairs of relations and nodes of edges, stored with the edges.

    Args:
        edge_index: [2, E].
        row: of edge_index, with the nodes.
        relation: [E].
        nodes: number of nodes.
        relations: number of relations.

    Raises:
        IndexError: for ids outside of their range.
    """
    end = edge_index[row]

    def make() -> Pairs:
        ids, ptr, pair = _pairs(end, relation, nodes, relations)
        graph = Graph.from_edge_index(_own_edges(ids), (nodes, ids.numel()))
        return Pairs(graph, ptr, ids, pair)

    return derived((end, relation), ("pairs", nodes, relations), make)


def graph_of_pairs(pairs: Pairs, edge_index: Tensor, row: int, nodes: int) -> Graph:
    """Return the graph from pairs to the nodes at one end of edges, stored with the edges.

    Args:
        pairs: of :func:`pairs_of`.
        edge_index: [2, E].
        row: of edge_index, with the targets.
        nodes: number of targets.
    """
    ends, size = edge_index[row], (pairs.node.num_rows, nodes)

    def make() -> Graph:
        return Graph.from_edge_index(torch.stack([pairs.pair, ends.long()]), size)

    return derived((pairs.pair, ends), ("graph of pairs", size), make)


def multiply_pairs(pairs: Pairs, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the features of the node of each pair by the matrices of its relation.

    Args:
        pairs: of :func:`pairs_of`.
        x: [N, B, K].
        weight: [R, B, K, M].

    Returns:
        [P, B, M].
    """
    blocks = [segment_matmul(spmm(pairs.node, x[:, b]), pairs.ptr, weight[:, b])
              for b in range(weight.size(1))]  # fmt: skip
    return torch.stack(blocks, 1) if len(blocks) > 1 else blocks[0].unsqueeze(1)


def _pairs(
    ends: Tensor, relation: Tensor, nodes: int, relations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes of all pairs by relation, the bounds of relations, and the pair of each edge."""
    for name, ids, most in (("node", ends, nodes), ("relation", relation, relations)):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < most:
            raise IndexError(f"found {name} ids outside of [0, {most})")
    stride = max(nodes, 1)
    keys = relation.long() * stride + ends
    if relations * stride <= _FEW * keys.numel():  # marking pairs is cheaper than sorting
        marks = keys.new_zeros(relations * stride).index_fill_(0, keys, 1)
        pairs, pair = marks.nonzero().view(-1), (marks.cumsum(0) - 1).index_select(0, keys)
    else:
        pairs, pair = torch.unique(keys, return_inverse=True)
    starts = torch.arange(relations + 1, device=pairs.device) * stride
    return pairs % stride, torch.searchsorted(pairs, starts).cpu(), pair


def _own_edges(nodes: Tensor) -> Tensor:
    """An edge_index with an edge from each node to the row of its position."""
    return torch.stack([nodes, torch.arange(nodes.numel(), device=nodes.device)])


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
