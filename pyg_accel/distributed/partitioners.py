"""Partitions by METIS and KaMinPar, where they are installed."""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_accel.reordering import METHODS

__all__ = ["PARTITIONERS", "method_reasons", "parts_of"]

_PARHIP = 1  # KaMinPar's binary format: nodes have weights, edges have none, numbers have 64 bits
_NEEDS = {"metis": "pymetis", "kaminpar": "kaminpar", "rcm": "scipy"}


def method_reasons(method: str) -> list[str]:
    """Return the reasons why a graph cannot be cut by a method of that name."""
    names = ("given", *METHODS, *PARTITIONERS)
    if method not in names:
        return [f"no partition '{method}'; there are {', '.join(names)}, or pass the rank of every "
                "node"]  # fmt: skip
    package = _NEEDS.get(method)
    if package is None or find_spec(package) is not None:
        return []
    extra = "partition" if method in PARTITIONERS else "reorder"
    return [f"partition='{method}' needs {package}: pip install 'pyg-accel[{extra}]'"]


def parts_of(edges: Tensor, work: Tensor, ranks: int, method: str) -> Tensor:
    """Return the rank of every node, [N].

    Args:
        edges: [2, E], in any direction.
        work: [N], the cost of every node; the ranks get about equal sums.
        ranks: number of ranks.
        method: one of :data:`PARTITIONERS`.
    """
    size = work.numel()
    if ranks == 1 or size == 0:
        return torch.zeros(size, dtype=torch.int64)
    row, col = edges[:, edges[0] != edges[1]].cpu().long()
    pairs = torch.cat([row * size + col, col * size + row]).unique()  # a row is sent once
    rowptr = torch.searchsorted(pairs, torch.arange(size + 1) * size)
    return PARTITIONERS[method](rowptr, pairs % size, work.cpu().long(), ranks)


def _metis(rowptr: Tensor, col: Tensor, work: Tensor, ranks: int) -> Tensor:
    import pymetis

    graph = pymetis.CSRAdjacency(rowptr.numpy(), col.numpy())
    _, parts = pymetis.part_graph(ranks, graph, vweights=work.numpy())
    return torch.from_numpy(np.asarray(parts, dtype=np.int64))


def _kaminpar(rowptr: Tensor, col: Tensor, work: Tensor, ranks: int) -> Tensor:
    import kaminpar

    begins = rowptr * 8 + 8 * (3 + rowptr.numel())  # in bytes
    head = torch.tensor([_PARHIP, work.numel(), col.numel()])
    with tempfile.TemporaryDirectory() as folder:  # it only reads files
        path = Path(folder) / "graph.parhip"
        torch.cat([head, begins, col, work]).numpy().tofile(path)
        graph = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP)
    program = kaminpar.KaMinPar(torch.get_num_threads(), kaminpar.default_context())
    return torch.tensor(program.compute_partition(graph, ranks, 0.03), dtype=torch.int64)


#: By the name that ``distribute(partition=...)`` knows.
PARTITIONERS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "metis": _metis,
    "kaminpar": _kaminpar,
}
