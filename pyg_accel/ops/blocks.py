"""A graph in blocks of target rows: all edges of a target are in one block.

A network on edges computes E x H numbers, which a reduction over the targets consumes at once. So
it runs block by block, in the same memory. On a CPU the numbers of a block stay in the last-level
cache. On a GPU the launches of a block cost as much as a millisecond of work, so blocks are large,
and only used for networks that do not fit. The blocks of a graph are stored with it.
"""

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel.graph import Graph, for_autograd
from pyg_accel.graph.derived import derived
from pyg_accel.runtime.machine import is_capturing

__all__ = [
    "Block", "blocks_of", "edges_of_a_block", "fits_whole", "free_bytes", "padded_degrees",
]  # fmt: skip

_FEWEST = 1 << 10  # edges of a block
_PART = 16  # of the memory of a GPU, for the edges of a block
_FEW = 4  # a block with a fourth of the edges is cheaper than padding rows of other degrees


class Block(NamedTuple):
    """Some targets, with all their incoming edges.

    Attributes:
        graph: one row for each target, one column for each source node of their edges.
        rows: [rows of the graph], the target nodes.
        sources: [columns of the graph], the source nodes, each once.
        edges: [edges of the graph], places in the edge list, in the order of the graph.
        degree: largest degree of a target; 0 where targets are not ordered by degree.
    """

    graph: Graph
    rows: Tensor
    sources: Tensor
    edges: Tensor
    degree: int

    @property
    def num_rows(self) -> int:
        """Number of targets."""
        return self.graph.num_rows


def edges_of_a_block(bytes_per_edge: int, device: torch.device) -> int:
    """Return how many edges fill the last-level cache, or a part of a GPU's memory.

    Args:
        bytes_per_edge: intermediate results of an edge, with gradients if there are any.
        device: of the network.

    Returns:
        A power of two.
    """
    room = _part_of_memory(device) if device.type == "cuda" else _last_level()
    edges = room // max(bytes_per_edge, 1)
    return max(1 << max(edges.bit_length() - 1, 0), _FEWEST)


def fits_whole(size: int, device: torch.device) -> bool:
    """Return whether a network runs on all edges at once: never on a CPU.

    Args:
        size: bytes of its intermediate results.
        device: of the network.
    """
    if device.type != "cuda" or size > _part_of_memory(device):
        return False
    if is_capturing():  # cutting a graph waits for the device
        return True
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * size <= free_bytes(device) + unused


def free_bytes(device: torch.device) -> int:
    """Return free memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _part_of_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory // _PART


@lru_cache(maxsize=1)
def _last_level() -> int:
    """Bytes of the largest cache of the first processor; 8 MiB where Linux does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [8 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[-1:] in units and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def padded_degrees(degree: Tensor, fewest: int = 0) -> Tensor:
    """Round degrees up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: by less than a factor of 3 / 2.

    Args:
        degree: of every target.
        fewest: total edges from which targets of one degree are not rounded.
    """
    power = 1 << torch.arange(40, dtype=torch.int64)
    steps = torch.cat([power, power[1:] + (power[1:] >> 1)]).unique().to(degree.device)
    degree = degree.long()
    padded: Tensor = steps[torch.searchsorted(steps, degree)]
    often = torch.bincount(degree) if degree.numel() else degree
    stays = (often * torch.arange(often.numel(), device=degree.device) >= max(fewest, 1))[degree]
    return torch.where(stays | (degree == 0), degree, padded)


def blocks_of(graph: Graph, most: int, *, by_degree: bool = False) -> list[Block]:
    """Return the blocks of a graph; at least one.

    Args:
        graph: CSR by target.
        most: edges of a block. A target with more edges is a block by itself.
        by_degree: the targets of a block have the same padded degree, see
            :func:`padded_degrees`; by default they are consecutive.
    """
    key = "blocks", most, by_degree
    return derived((graph,), key, lambda: _cut(graph, most, by_degree=by_degree), lasting=True)


@for_autograd
def _cut(graph: Graph, most: int, *, by_degree: bool) -> list[Block]:
    return list(_by_degree(graph, most) if by_degree else _in_order(graph, most))


def _in_order(graph: Graph, most: int) -> Iterator[Block]:
    rowptr = graph.rowptr.cpu()
    rows = torch.arange(graph.num_rows, device=graph.device)
    cuts = _cuts(rowptr, most)
    for first, last in pairwise(cuts):
        begin, end = int(rowptr[first]), int(rowptr[last])
        entries = torch.arange(begin, end, device=graph.device)
        starts = graph.rowptr[first : last + 1] - begin
        yield _block(graph, rows[first:last], starts, entries, 0)


def _cuts(rowptr: Tensor, most: int) -> list[int]:
    """The first row of every block, and the number of rows; no block has more rows than edges."""
    num_rows, cuts = rowptr.numel() - 1, [0]
    while cuts[-1] < num_rows or len(cuts) == 1:
        first = cuts[-1]
        fits = int(torch.searchsorted(rowptr, int(rowptr[first]) + most, right=True)) - 1
        cuts.append(min(max(fits, first + 1), first + most, num_rows))
    return cuts


def _by_degree(graph: Graph, most: int) -> Iterator[Block]:
    degree = graph.degree.long()
    padded, rows = torch.sort(padded_degrees(degree, most // _FEW), stable=True)
    sizes, counts = (t.tolist() for t in torch.unique_consecutive(padded, return_counts=True))
    if not sizes:
        yield _block(graph, rows, graph.rowptr.new_zeros(1), rows, 0)
    first = 0
    for size, count in zip(sizes, counts, strict=True):
        for chosen in rows[first : first + count].split(max(most // max(size, 1), 1)):
            begins, degrees = graph.rowptr[chosen], degree[chosen]
            starts = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
            shift = torch.repeat_interleave(begins - starts[:-1], degrees)
            entries = torch.arange(shift.numel(), device=shift.device) + shift
            yield _block(graph, chosen, starts.to(graph.rowptr.dtype), entries, size)
        first += count


def _block(graph: Graph, rows: Tensor, starts: Tensor, entries: Tensor, degree: int) -> Block:
    sources, local = torch.unique(graph.col[entries], return_inverse=True)
    subgraph = Graph.trusted(
        starts.contiguous(), local.to(graph.col.dtype), None, sources.numel(), sorted=graph.sorted
    )
    edges = entries if graph.perm is None else graph.perm[entries]
    return Block(subgraph, rows, sources.long(), edges.long(), degree)
