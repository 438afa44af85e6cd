"""``torch.ops.pyg`` for PyG's distributed samplers: sampling one hop, and merging hops.

Each partition of a graph samples a hop of its seeds; the results are merged into the order of all
seeds, and after the last hop the nodes are numbered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.pyg_lib.neighbors import ONE, Draw, Edges, draw
from pyg_accel.pyg_lib.sampler import EdgeType

__all__ = [
    "dist_neighbor_sample", "hetero_relabel_neighborhood", "merge_sampler_outputs",
    "relabel_neighborhood",
]  # fmt: skip


def dist_neighbor_sample(
    rowptr: Tensor, col: Tensor, seed: Tensor, num_neighbors: int, node_time: Tensor | None = None,
    edge_time: Tensor | None = None, seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None, csc: bool = False, replace: bool = False,
    directed: bool = True, disjoint: bool = False, temporal_strategy: str = "uniform",
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    """Sample one hop, separately for each seed.

    For the arguments see :func:`pyg_accel.pyg_lib.sampler.neighbor_sample`; neighbours, to which
    ``node_time`` belongs, may be nodes of another type than the seeds. Seeds beyond ``rowptr`` have
    no edges: PyG's parts end with the last node with edges.

    Returns:
        The seeds, followed by their neighbours seed by seed, with duplicates (if ``disjoint`` as
        [n, 2], the number of the seed first); the ids of the edges; and cumulative numbers of
        nodes, for the seeds and for the neighbours of each.

    Raises:
        ValueError: for edges between all nodes (``directed=False``), as in pyg-lib, and as
            ``neighbor_sample`` does.
    """
    if not directed:
        raise ValueError("expected 'directed' to be True: one hop has no edges between neighbours")
    absent = int(seed.max()) + 2 - rowptr.numel() if seed.numel() else 0
    if absent > 0:
        rowptr = torch.cat([rowptr, rowptr[-1:].expand(absent)])
    times = {} if node_time is None else {"end": node_time}
    size = {kind: t.numel() for kind, t in times.items()} or {"end": rowptr.numel() - 1}
    if seed_time is None and node_time is not None:
        seed_time = node_time[seed]
    graph = Edges(
        {ONE: ("end", "seed")}, {ONE: rowptr}, {ONE: col}, size | {"seed": rowptr.numel() - 1},
        {ONE: [num_neighbors]}, times, {} if edge_time is None else {ONE: edge_time},
        {} if edge_weight is None else {ONE: edge_weight},
    )  # fmt: skip
    how = Draw(rowptr.device, replace, False, True, temporal_strategy)
    out: Any = draw(graph, how, {"seed": seed}, None if seed_time is None else {"seed": seed_time})
    of, count = out.col[ONE], seed.numel()
    node = torch.cat([seed, out.node["end"][out.row[ONE]].to(seed.dtype)])
    if disjoint:
        node = torch.stack([torch.cat([torch.arange(count), of]).to(seed.dtype), node], 1)
    ends = count + torch.bincount(of, minlength=count).cumsum(0)
    return node, out.edge[ONE], [count, *ends.tolist()]


def merge_sampler_outputs(
    node_ids: Sequence[Tensor], edge_ids: Sequence[Tensor],
    cumsum_neighbors_per_node: Sequence[Sequence[int]], partition_ids: Sequence[int],
    partition_orders: Sequence[int], num_partitions: int, num_neighbors: int,
    batch: Tensor | None = None, disjoint: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:  # fmt: skip
    """Merge the samples of partitions into the order of all seeds, without the seeds.

    Args:
        node_ids: of each partition, the result of :func:`dist_neighbor_sample`, like the next two.
        edge_ids: of each partition.
        cumsum_neighbors_per_node: of each partition.
        partition_ids: the partition of every seed.
        partition_orders: the position of every seed among the seeds of its partition.
        num_partitions: not used.
        num_neighbors: not used.
        batch: [S] numbers of seeds, if ``disjoint``.
        disjoint: return also the number of the seed of every node.

    Returns:
        Nodes, edges, numbers of seeds, and the number of neighbours of every seed.
    """
    nodes, edges, counts = [], [], []
    for part, place in zip(partition_ids, partition_orders, strict=True):
        ends = cumsum_neighbors_per_node[part]
        begin, end = ends[place], ends[place + 1]
        nodes.append(node_ids[part][begin:end])
        edges.append(edge_ids[part][begin - ends[0] : end - ends[0]])
        counts.append(int(end - begin))
    of = batch.repeat_interleave(torch.tensor(counts)) if disjoint and batch is not None else None
    return torch.cat(nodes), torch.cat(edges), of, counts


def relabel_neighborhood(
    seed: Tensor, sampled_nodes_with_duplicates: Tensor,
    num_sampled_neighbors_per_node: Sequence[int], num_nodes: int, batch: Tensor | None = None,
    csc: bool = False, disjoint: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Number the seeds and then other nodes, in the order of their first appearance.

    Args:
        seed: [S].
        sampled_nodes_with_duplicates: [n], the neighbours of one node after another.
        num_sampled_neighbors_per_node: number of neighbours of each.
        num_nodes: not used.
        batch: [n] numbers of seeds, if ``disjoint``.
        csc: return columns first.
        disjoint: nodes of different seeds are different.

    Returns:
        Rows (the nodes) and columns (their neighbours) of the edges.
    """
    col = _numbered(seed, sampled_nodes_with_duplicates, batch if disjoint else None, 0)
    row = torch.repeat_interleave(_integers(num_sampled_neighbors_per_node)).to(col.dtype)
    return (col, row) if csc else (row, col)


def hetero_relabel_neighborhood(
    node_types: Sequence[str], edge_types: Sequence[EdgeType], seed_dict: Mapping[str, Tensor],
    sampled_nodes_with_duplicates_dict: Mapping[str, Tensor],
    num_sampled_neighbors_per_node_dict: Mapping[str, Sequence[Sequence[int]]],
    num_nodes_dict: Mapping[str, int], batch_dict: Mapping[str, Tensor] | None = None,
    csc: bool = False, disjoint: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Number nodes as :func:`relabel_neighborhood` does, by type.

    Neighbours, and their numbers per node, are ordered by hop, then by type of edges.
    """
    number, began = {}, 0
    for node_type in dict.fromkeys([*seed_dict, *node_types]):  # numbers of seeds go on by type
        nodes = sampled_nodes_with_duplicates_dict[node_type]
        seed = seed_dict.get(node_type, nodes[:0])
        batch = batch_dict[node_type] if disjoint and batch_dict is not None else None
        number[node_type], began = _numbered(seed, nodes, batch, began), began + seed.numel()
    seen = {k: seed_dict[k].numel() if k in seed_dict else 0 for k in node_types}
    before, used = dict.fromkeys(node_types, 0), dict.fromkeys(node_types, 0)
    rows: dict[str, list[Tensor]] = {"__".join(kind): [] for kind in edge_types}
    cols: dict[str, list[Tensor]] = {"__".join(kind): [] for kind in edge_types}
    for hop in range(len(num_sampled_neighbors_per_node_dict["__".join(edge_types[0])])):
        reached = dict(seen)
        for kind in edge_types:
            name, (of, to) = "__".join(kind), (kind[-1], kind[0]) if csc else (kind[0], kind[-1])
            row = torch.repeat_interleave(_integers(num_sampled_neighbors_per_node_dict[name][hop]))
            col = number[to][used[to] : used[to] + row.numel()]
            used[to] += row.numel()
            if col.numel():
                reached[to] = max(reached[to], int(col.max()) + 1)
            rows[name].append((row + before[of]).to(col.dtype))
            cols[name].append(col)
        before, seen = seen, reached  # nodes of the next hop
    row_dict, col_dict = ({k: torch.cat(t) for k, t in each.items()} for each in (rows, cols))
    return (col_dict, row_dict) if csc else (row_dict, col_dict)


def _integers(counts: Sequence[int]) -> Tensor:
    return torch.tensor([int(count) for count in counts], dtype=torch.int64)


def _numbered(seed: Tensor, nodes: Tensor, batch: Tensor | None, began: int) -> Tensor:
    """Number nodes by their first appearance after the seeds; ``began`` is the first subgraph.

    Nodes of different subgraphs are different.
    """
    key = torch.cat([seed, nodes]).long()
    if batch is not None:
        of_seeds = torch.arange(began, began + seed.numel())
        key += torch.cat([of_seeds, batch]) * (int(key.max()) + 1 if key.numel() else 0)
    distinct, place = key.unique(return_inverse=True)
    at = torch.arange(key.numel())
    first = torch.full_like(distinct, key.numel()).scatter_reduce_(0, place, at, "amin")
    return first.argsort().argsort()[place[seed.numel() :]].to(nodes.dtype)
