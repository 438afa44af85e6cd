"""``pyg_lib.sampler``: samples of neighbours and walks, by the kernels of the neighbour loaders."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph.csr import entries_of_rows
from pyg_accel.pyg_lib.neighbors import ONE, Draw, Edges, draw
from pyg_accel.pyg_lib.ops.cluster import native
from pyg_accel.runtime.native import library_of

__all__ = ["hetero_neighbor_sample", "neighbor_sample", "random_walk", "subgraph"]

EdgeType = tuple[str, str, str]


def neighbor_sample(
    rowptr: Tensor, col: Tensor, seed: Tensor, num_neighbors: Sequence[int],
    node_time: Tensor | None = None, edge_time: Tensor | None = None,
    seed_time: Tensor | None = None, edge_weight: Tensor | None = None, csc: bool = False,
    replace: bool = False, directed: bool = True, disjoint: bool = False,
    temporal_strategy: str = "uniform", return_edge_id: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[int], list[int]]:  # fmt: skip
    """Sample neighbours of nodes hop by hop, on the device of the graph.

    The distribution equals pyg-lib's, the random numbers differ.

    Args:
        rowptr: [N + 1], int32 or int64.
        col: [E], of the same dtype.
        seed: [S] nodes.
        num_neighbors: of each node in every hop; -1 for all.
        node_time: [N] int64; no node later than its seed is sampled. Needs ``disjoint``.
        edge_time: [E] int64, instead of ``node_time``.
        seed_time: [S] int64; by default the times of the nodes.
        edge_weight: [E], relative probability of each edge.
        csc: rows are targets; swaps rows and columns of the result.
        replace: draw with replacement.
        directed: if False, return all edges between the sampled nodes.
        disjoint: a subgraph for each seed; nodes are then [n, 2], the number of the seed first.
        temporal_strategy: ``"uniform"``, or ``"last"`` for the latest neighbours.
        return_edge_id: return also the ids of edges.

    Returns:
        Rows and columns of the edges, the nodes, the ids of edges, and the numbers of nodes and
        edges that each hop added (empty lists if not ``directed``).

    Raises:
        ValueError: names the argument, or what is wrong with the graph.
    """
    graph = Edges.of_one_type(
        rowptr, col, rowptr.numel() - 1, num_neighbors, node_time, edge_time, edge_weight
    )
    how = Draw(rowptr.device, replace, not directed, disjoint, temporal_strategy, not csc)
    out = draw(graph, how, {ONE: seed}, None if seed_time is None else {ONE: seed_time})
    row, col, node = (_only(t) for t in (out.row, out.col, _nodes(out)))
    edge = _only(out.edge) if return_edge_id else None
    return (
        row, col, node, edge,
        _only(out.num_sampled_nodes) or [], _only(out.num_sampled_edges) or [],
    )  # fmt: skip


def _only(by_type: Any) -> Any:
    return None if by_type is None else by_type[ONE]


def _nodes(out: Any) -> dict[Any, Tensor]:
    """Return nodes by type, with the numbers of their seeds for disjoint subgraphs."""
    if out.batch is None:
        return dict(out.node)
    return {k: torch.stack([out.batch[k], node], 1) for k, node in out.node.items()}


def relation_neighbor_sample(
    node_types: Sequence[str], edge_types: Sequence[EdgeType], rowptr: Mapping[str, Tensor],
    col: Mapping[str, Tensor], seed: Mapping[str, Tensor],
    num_neighbors: Mapping[str, Sequence[int]], node_time: Mapping[str, Tensor] | None = None,
    edge_time: Mapping[str, Tensor] | None = None, seed_time: Mapping[str, Tensor] | None = None,
    edge_weight: Mapping[str, Tensor] | None = None, csc: bool = False, replace: bool = False,
    directed: bool = True, disjoint: bool = False, temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Sample as ``torch.ops.pyg.hetero_neighbor_sample`` does.

    Arguments as for :func:`neighbor_sample` by type; types of edges are three names joined by
    ``__``.
    """
    of_rows = -1 if csc else 0
    ends = {"__".join(kind): (kind[-1 - of_rows], kind[of_rows]) for kind in edge_types}
    size = dict.fromkeys(node_types, 0)
    for relation, (_, target) in ends.items():
        size[target] = max(size[target], rowptr[relation].numel() - 1)
    for relation, (source, _) in ends.items():  # a type that is no target
        if size[source] == 0 and col[relation].numel():
            size[source] = int(col[relation].max()) + 1
    for kind, ids in seed.items():
        if size.get(kind) == 0 and ids.numel():
            size[kind] = int(ids.max()) + 1
    for kind, times in (node_time or {}).items():
        size[kind] = times.numel()
    graph = Edges(
        ends, rowptr, col, size, num_neighbors, node_time or {}, edge_time or {}, edge_weight or {}
    )
    device = next((t.device for t in rowptr.values()), torch.device("cpu"))
    how = Draw(device, replace, not directed, disjoint, temporal_strategy, not csc)
    out = draw(graph, how, seed, seed_time)
    edge = out.edge if return_edge_id else None
    counts = out.num_sampled_nodes or {}, out.num_sampled_edges or {}
    return (out.row, out.col, _nodes(out), edge, *counts)


def hetero_neighbor_sample(
    rowptr_dict: Mapping[EdgeType, Tensor], col_dict: Mapping[EdgeType, Tensor],
    seed_dict: Mapping[str, Tensor], num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    node_time_dict: Mapping[str, Tensor] | None = None,
    edge_time_dict: Mapping[EdgeType, Tensor] | None = None,
    seed_time_dict: Mapping[str, Tensor] | None = None,
    edge_weight_dict: Mapping[EdgeType, Tensor] | None = None, csc: bool = False,
    replace: bool = False, directed: bool = True, disjoint: bool = False,
    temporal_strategy: str = "uniform", return_edge_id: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Sample as :func:`neighbor_sample` does, in a graph with types of nodes and of edges.

    All arguments and results but for flags are dictionaries by type.
    """
    names = {"__".join(kind): kind for kind in rowptr_dict}
    types = dict.fromkeys(end for kind in rowptr_dict for end in (kind[0], kind[-1]))

    def named(by_type: Mapping[EdgeType, Any] | None) -> dict[str, Any] | None:
        return None if by_type is None else {"__".join(k): value for k, value in by_type.items()}

    out = relation_neighbor_sample(
        list(types), list(rowptr_dict), named(rowptr_dict) or {}, named(col_dict) or {}, seed_dict,
        named(num_neighbors_dict) or {}, node_time_dict, named(edge_time_dict), seed_time_dict,
        named(edge_weight_dict), csc, replace, directed, disjoint, temporal_strategy,
        return_edge_id,
    )  # fmt: skip

    def typed(by_name: Any) -> Any:
        return None if by_name is None else {names[k]: value for k, value in by_name.items()}

    row, col, node, edge, num_nodes, num_edges = out
    return typed(row), typed(col), node, typed(edge), num_nodes, typed(num_edges)


def subgraph(
    rowptr: Tensor, col: Tensor, nodes: Tensor, return_edge_id: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the edges between some nodes.

    Args:
        rowptr: [N + 1].
        col: [E].
        nodes: [n], each once.
        return_edge_id: return also the ids of edges.

    Returns:
        The CSR matrix of the subgraph, in the order of ``nodes`` and of the edges of each, and the
        ids of its edges.
    """
    row, edge = entries_of_rows(rowptr, nodes)
    place = torch.full((rowptr.numel() - 1,), -1, dtype=col.dtype, device=col.device)
    place[nodes] = torch.arange(nodes.numel(), dtype=col.dtype, device=col.device)
    inner = place[col[edge]]
    inside = inner >= 0
    count = torch.bincount(row[inside], minlength=nodes.numel())
    ends = torch.cat([count.new_zeros(1), count.cumsum(0)]).to(rowptr.dtype)
    return ends, inner[inside], edge[inside].to(col.dtype) if return_edge_id else None


def random_walk(
    rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float = 1.0, q: float = 1.0
) -> Tensor:
    """Walk along edges, as node2vec does: https://arxiv.org/abs/1607.00653.

    A walk stays on a node without edges. pyg-lib has only ``p = q = 1``.

    Args:
        rowptr: [N + 1], int32 or int64.
        col: [E].
        seed: [S] nodes where walks begin.
        walk_length: number of steps.
        p: inverse weight of going back, relative to a neighbour of the previous node.
        q: inverse weight of going elsewhere.

    Returns:
        [S, walk_length + 1] nodes.

    Raises:
        ValueError: for ids of nodes that do not exist, or ``p`` or ``q`` that is not positive.
    """
    for name, value in (("p", p), ("q", q)):
        if not 0 < value < math.inf:
            raise ValueError(f"expected '{name}' to be positive and finite (got {value})")
    if walk_length < 0:
        raise ValueError(f"expected 'walk_length' of at least 0 (got {walk_length})")
    seed = seed.to(rowptr.dtype).contiguous()
    if not seed.is_cuda and seed.numel():
        least, most = map(int, seed.aminmax())
        if least < 0 or most >= rowptr.numel() - 1:
            raise ValueError("expected 'seed' to hold ids of nodes that exist")
    library = library_of(rowptr.device)
    if library is not None and not rowptr.is_cuda:
        start = int(torch.empty((), dtype=torch.int64).random_())
        graph = rowptr.contiguous(), col.to(rowptr.dtype).contiguous()
        return native(library.random_walk, *graph, seed, walk_length, p, q, start)
    return walk(rowptr, col, seed, walk_length, p, q)


def walk(rowptr: Tensor, col: Tensor, seed: Tensor, walk_length: int, p: float, q: float) -> Tensor:
    """Walk by torch's operators, all walks at once; used on GPUs."""
    most = max(1 / p, 1.0, 1 / q)
    accept = torch.tensor([1 / p / most, 1 / most, 1 / q / most], device=seed.device)
    keys = None
    if p != 1 or q != 1:  # sorted edges, for searches
        size = rowptr.numel() - 1
        row = torch.repeat_interleave(rowptr.diff().long())
        keys = (row * size + col).sort().values
    steps = [seed]
    if col.numel() == 0:
        return seed.view(-1, 1).expand(-1, walk_length + 1).contiguous()
    for step in range(walk_length):
        here = steps[-1].long()
        begin, degree = rowptr[here], rowptr[here + 1] - rowptr[here]
        following, waits = steps[-1].clone(), degree > 0
        while True:
            place = (
                torch.rand(here.shape, device=here.device, dtype=torch.float64) * degree
            ).long()
            drawn = col[(begin + place.minimum(degree - 1)).clamp(min=0, max=col.numel() - 1)]
            taken = waits
            if keys is not None and step > 0:
                before = steps[-2].long()
                key = drawn.long() * size + before
                at = torch.searchsorted(keys, key).clamp(max=keys.numel() - 1)
                kind = torch.where(drawn == before, 0, torch.where(keys[at] == key, 1, 2))
                taken = waits & (torch.rand(here.shape, device=here.device) < accept[kind])
            following = torch.where(taken, drawn, following)
            waits = waits & ~taken
            if keys is None or step == 0 or not bool(waits.any()):
                break
        steps.append(following)
    return torch.stack(steps, 1)
