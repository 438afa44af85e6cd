"""``pyg_lib.partition``: METIS, by pymetis."""

from importlib.util import find_spec

import torch
from torch import Tensor

from pyg_accel.reordering.community import community_order

__all__ = ["metis"]


def metis(
    rowptr: Tensor, col: Tensor, num_partitions: int, node_weight: Tensor | None = None,
    edge_weight: Tensor | None = None, recursive: bool = False,
) -> Tensor:  # fmt: skip
    """Cut a graph into parts of about equal weight, with few edges between them.

    With pymetis, METIS cuts it. Otherwise nodes are sorted by communities (Louvain) and cut into
    ranges: more edges are cut, and weights of edges do not count.

    Args:
        rowptr: [N + 1].
        col: [E], with every edge in both directions.
        num_partitions: number of parts.
        node_weight: [N] integers.
        edge_weight: [E] integers.
        recursive: bisect, instead of cutting into all parts at once.

    Returns:
        [N], the part of every node.

    Raises:
        ValueError: for fewer than one part.
    """
    if num_partitions < 1:
        raise ValueError(f"expected 'num_partitions' to be at least 1 (got {num_partitions})")
    size = rowptr.numel() - 1
    if num_partitions == 1 or size == 0:
        return torch.zeros_like(rowptr[:-1])
    if find_spec("pymetis") is not None:
        import pymetis

        nodes, edges = (None if t is None else t.tolist() for t in (node_weight, edge_weight))
        graph = pymetis.CSRAdjacency(rowptr.cpu().numpy(), col.cpu().numpy())
        _, parts = pymetis.part_graph(num_partitions, graph, vweights=nodes, eweights=edges,
                                      recursive=recursive)  # fmt: skip
        return torch.as_tensor(parts).to(rowptr)
    row, col = torch.repeat_interleave(rowptr.cpu().long().diff()), col.cpu().long()
    row, col = row[row != col], col[row != col]
    pairs = torch.cat([row * size + col, col * size + row]).unique()
    begins = torch.searchsorted(pairs, torch.arange(size + 1) * size)
    order = community_order(begins, pairs % size)
    work = torch.ones(size) if node_weight is None else node_weight.cpu().double()[order]
    total = work.double().cumsum(0)
    middle = (total - work / 2) / total[-1].clamp(min=1e-300)
    part = (middle * num_partitions).long().clamp(0, num_partitions - 1)
    return torch.empty_like(part).index_copy_(0, order, part).to(rowptr)
