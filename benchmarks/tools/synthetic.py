"""Synthetic graphs with the structures that decide how long sparse kernels take.

Every graph is symmetric, has no self-loops, and comes as `(rowptr, col)`: int64 [N + 1] and
int64 [E], the columns of a row in rising order. The same arguments give the same graph on every
machine with the same kind of device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CommunityShape",
    "batched",
    "community_edges",
    "community_graph",
    "mycielskian",
    "rmat",
    "roads",
]

Csr = tuple[Tensor, Tensor]

RMAT_QUADRANTS = (0.57, 0.19, 0.19)  # a, b, c of Graph500; d is what is left


class CommunityShape(NamedTuple):
    """Size and structure of a degree-corrected community graph."""

    num_nodes: int
    num_entries: int  # stored entries, so twice the undirected edges
    num_communities: int
    inside: float  # share of the edges that stays inside a community
    exponent: float  # of the power law from which endpoints are drawn; 0 is uniform


def community_graph(
    shape: CommunityShape, *, ordered: bool = False, device: str = "cpu", seed: int = 0
) -> Csr:
    """Degree-corrected planted partition as `(rowptr, col)`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    low, high, _ = community_edges(shape, generator, ordered=ordered)
    return _symmetric_csr(low, high, shape.num_nodes)


def rmat(num_nodes: int, num_entries: int, seed: int = 0, *, device: str = "cpu") -> Csr:
    """R-MAT graph as `(rowptr, col)`, ids shuffled, with exactly `num_entries // 2` edges."""
    generator = torch.Generator(device=device).manual_seed(seed)
    levels, half = (num_nodes - 1).bit_length(), num_entries // 2
    if half > num_nodes * (num_nodes - 1) // 4:
        raise ValueError(f"{num_entries} entries would fill {num_nodes} nodes by more than half")
    a, b, c = RMAT_QUADRANTS
    keys = torch.empty(0, dtype=torch.int64, device=device)
    while keys.numel() < half:
        draws = int(1.25 * half)
        src = torch.zeros(draws, dtype=torch.int64, device=device)
        dst = torch.zeros_like(src)
        for _ in range(levels):
            u = torch.rand(draws, device=device, generator=generator)
            src = 2 * src + (u >= a + b)
            dst = 2 * dst + (((u >= a) & (u < a + b)) | (u >= a + b + c))
        src, dst = src * num_nodes >> levels, dst * num_nodes >> levels
        keys = torch.unique(torch.cat([keys, _edge_keys(src, dst, num_nodes)]))
    keys = _sample(keys, half, generator)
    relabel = torch.randperm(num_nodes, device=device, generator=generator)
    return _symmetric_csr(relabel[keys // num_nodes], relabel[keys % num_nodes], num_nodes)


def mycielskian(order: int, *, device: str = "cpu") -> Csr:
    """Mycielskian graph of `3 * 2 ** (order - 2) - 1` nodes; order 2 is a single edge."""
    if order < 2:
        raise ValueError(f"a Mycielskian graph has order 2 or more, not {order}")
    src, dst = torch.tensor([0], device=device), torch.tensor([1], device=device)
    nodes = 2
    for _ in range(order - 2):
        shadow = torch.arange(nodes, device=device) + nodes
        apex = torch.full_like(shadow, 2 * nodes)
        src, dst = (
            torch.cat([src, src, dst, shadow]),
            torch.cat([dst, dst + nodes, src + nodes, apex]),
        )
        nodes = 2 * nodes + 1
    return _symmetric_csr(src, dst, nodes)


def roads(num_nodes: int, kept: float = 0.65, seed: int = 0, *, device: str = "cpu") -> Csr:
    """Road-like graph as `(rowptr, col)`: a square grid in row order that lost some edges."""
    generator = torch.Generator(device=device).manual_seed(seed)
    side = max(int(num_nodes**0.5), 2)
    place = torch.arange(side * side, device=device)
    right, down = place[place % side < side - 1], place[place < side * (side - 1)]
    src, dst = torch.cat([right, down]), torch.cat([right + 1, down + side])
    keep = torch.rand(src.numel(), device=device, generator=generator) < kept
    return _symmetric_csr(src[keep], dst[keep], side * side)


def batched(
    num_graphs: int, size: int = 24, chords: float = 0.2, seed: int = 0, *, device: str = "cpu"
) -> Csr:
    """Small graphs side by side, as a batch of molecules is: rings of `size` nodes with chords."""
    generator = torch.Generator(device=device).manual_seed(seed)
    place = torch.arange(num_graphs * size, device=device)
    first = place // size * size
    ring = first + (place - first + 1) % size
    far = torch.randint(2, size - 1, place.shape, device=device, generator=generator)
    chord = first + (place - first + far) % size
    pick = torch.rand(place.shape, device=device, generator=generator) < chords
    src, dst = torch.cat([place, place[pick]]), torch.cat([ring, chord[pick]])
    keys = torch.unique(_edge_keys(src, dst, place.numel()))
    return _symmetric_csr(keys // place.numel(), keys % place.numel(), place.numel())


def community_edges(
    shape: CommunityShape, generator: torch.Generator, *, ordered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Undirected edges as (low, high) [E / 2] each, and the community of every node [N].

    The order of the draws from `generator` is part of the graph: do not reorder them.
    """
    nodes, half, device = shape.num_nodes, shape.num_entries // 2, generator.device
    draws = int(
        half * 1.25
    )  # some are self-loops or duplicates; small dense graphs fall short of half
    rank = torch.arange(nodes, device=device, dtype=torch.float64)
    weight = (rank + nodes * 0.002 + 1) ** -shape.exponent
    weight = weight[torch.randperm(nodes, device=device, generator=generator)]
    members = torch.randint(shape.num_communities, (nodes,), device=device, generator=generator)
    community = torch.sort(members)[0]
    ids = torch.arange(shape.num_communities, device=device)
    first = torch.searchsorted(community, ids)
    last = torch.searchsorted(community, ids, right=True)
    mass = torch.cat([weight.new_zeros(1), weight.cumsum(0)])

    def uniform() -> Tensor:
        return torch.rand(draws, device=device, generator=generator, dtype=torch.float64)

    def node_at(position: Tensor) -> Tensor:
        return torch.searchsorted(mass[1:], position).clamp_(max=nodes - 1)

    src = node_at(uniform() * mass[-1])
    begin, end = mass[first[community[src]]], mass[last[community[src]]]
    stays = uniform() < shape.inside
    dst = node_at(torch.where(stays, begin + uniform() * (end - begin), uniform() * mass[-1]))
    if not ordered:
        relabel = torch.randperm(nodes, device=device, generator=generator)
        src, dst = relabel[src], relabel[dst]
        community = torch.empty_like(community).scatter_(0, relabel, community)
    keys = _sample(torch.unique(_edge_keys(src, dst, nodes)), half, generator)
    return keys // nodes, keys % nodes, community


def _edge_keys(src: Tensor, dst: Tensor, nodes: int) -> Tensor:
    """One int64 per undirected edge, `low * nodes + high`; self-loops are left out."""
    keep = src != dst
    return torch.minimum(src, dst)[keep] * nodes + torch.maximum(src, dst)[keep]


def _sample(keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(keys.numel(), device=keys.device, generator=generator)
    return keys[order[:count]]


def _symmetric_csr(src: Tensor, dst: Tensor, nodes: int) -> Csr:
    """Both directions of every edge as `(rowptr, col)`."""
    keys = torch.sort(torch.cat([src * nodes + dst, dst * nodes + src]))[0]
    rowptr = keys.new_zeros(nodes + 1)
    rowptr[1:] = torch.bincount(keys // nodes, minlength=nodes).cumsum(0)
    return rowptr, keys % nodes
