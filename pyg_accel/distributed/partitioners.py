"""Partitions by METIS, where it is installed."""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from pyg_accel.reordering import METHODS

__all__ = ["method_reasons", "metis_parts"]

_NEEDS = {"metis": ("pymetis", "partition"), "rcm": ("scipy", "reorder")}  # packages and extras


def method_reasons(method: str) -> list[str]:
    """Return the reasons why a graph cannot be cut by a method."""
    names = ("given", *METHODS, "metis")
    if method not in names:
        return [f"no partition '{method}'; there are {', '.join(names)}, or pass the rank of every "
                "node"]  # fmt: skip
    package, extra = _NEEDS.get(method, ("", ""))
    if not package or find_spec(package) is not None:
        return []
    return [f"partition='{method}' needs {package}: pip install 'pyg-accel[{extra}]'"]


def metis_parts(edges: Tensor, work: Tensor, ranks: int) -> Tensor:
    """Return the rank of every node, [N].

    Args:
        edges: [2, E], in any direction.
        work: [N], the cost of every node; the ranks get about equal sums.
        ranks: number of ranks.
    """
    size = work.numel()
    if ranks == 1 or size == 0:
        return torch.zeros(size, dtype=torch.int64)
    import pymetis

    row, col = edges[:, edges[0] != edges[1]].cpu().long()
    pairs = torch.cat([row * size + col, col * size + row]).unique()  # a row is sent once
    rowptr = torch.searchsorted(pairs, torch.arange(size + 1) * size)
    graph = pymetis.CSRAdjacency(rowptr.numpy(), (pairs % size).numpy())
    _, parts = pymetis.part_graph(ranks, graph, vweights=work.cpu().long().numpy())
    return torch.from_numpy(np.asarray(parts, dtype=np.int64))
