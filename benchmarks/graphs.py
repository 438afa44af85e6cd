"""Synthetic graphs with the sizes of the graphs that papers use, and one learnable task.

Every graph is symmetric, has no self-loops, and comes as `(rowptr, col)`: int64 [N + 1] and
int64 [E], the columns of a row in rising order. The same name and seed give the same graph on
every machine.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

Csr = tuple[Tensor, Tensor]


class CommunityShape(NamedTuple):
    """Size and structure of a degree-corrected community graph."""

    num_nodes: int
    num_entries: int  # stored entries, so twice the undirected edges
    num_communities: int
    inside: float  # share of the edges that stays inside a community
    exponent: float  # of the power law from which endpoints are drawn; 0 is uniform


class RmatShape(NamedTuple):
    """Size of an R-MAT graph."""

    num_nodes: int
    num_entries: int


COMMUNITY_SHAPES = {
    "arxiv-like": CommunityShape(169_343, 2_332_486, 400, 0.7, 0.7),
    "amazon0505-like": CommunityShape(410_236, 4_878_874, 8_000, 0.8, 0.3),
    "molecules-like": CommunityShape(1_889_542, 3_946_402, 75_000, 1.0, 0.01),
    "proteins-like": CommunityShape(132_534, 79_122_504, 112, 0.6, 0.5),
    "reddit-like": CommunityShape(232_965, 114_615_892, 41, 0.7, 0.6),
    "products-like": CommunityShape(2_449_029, 123_718_280, 5_000, 0.8, 0.5),
}
RMAT_SHAPES = {
    "rmat-169k": RmatShape(169_343, 2_230_000),
    "rmat-20k": RmatShape(20_000, 1_540_000),
    "rmat-2.7k": RmatShape(2_700, 9_900),
}
RMAT_QUADRANTS = (0.57, 0.19, 0.19)  # a, b, c of Graph500; d is what is left


def load(name: str, *, device: str = "cpu", seed: int = 0) -> Csr:
    """A graph by name.

    `arxiv-like`: node ids shuffled, the worst case for locality; `arxiv-like/ordered`: the nodes
    of a community next to one another; `arxiv-like@0.01`: a share of nodes, edges and communities;
    `rmat-20k`; `mycielskian17`: exact, 98,303 nodes and 100,245,742 entries.
    """
    if name.startswith("mycielskian"):
        return mycielskian(int(name.removeprefix("mycielskian")), device=device)
    sized, _, variant = name.partition("/")
    base, _, share_text = sized.partition("@")
    share = float(share_text or 1)
    if base in RMAT_SHAPES:
        nodes, entries = RMAT_SHAPES[base]
        return rmat(max(16, int(nodes * share)), max(32, int(entries * share)), seed, device=device)
    if base not in COMMUNITY_SHAPES or variant not in ("", "ordered"):
        known = ", ".join([*COMMUNITY_SHAPES, *RMAT_SHAPES, "mycielskian<order>"])
        raise ValueError(
            f"no graph is called {name!r}; known: {known} (and NAME/ordered, NAME@0.01)"
        )
    whole = COMMUNITY_SHAPES[base]
    shape = whole._replace(
        num_nodes=max(16, int(whole.num_nodes * share)),
        num_entries=max(32, int(whole.num_entries * share)),
        num_communities=max(2, int(whole.num_communities * share)),
    )
    return community_graph(shape, ordered=variant == "ordered", device=device, seed=seed)


def community_graph(
    shape: CommunityShape, *, ordered: bool = False, device: str = "cpu", seed: int = 0
) -> Csr:
    """Degree-corrected planted partition as `(rowptr, col)`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    low, high, _ = _community_edges(shape, generator, ordered=ordered)
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


def community_task(
    num_nodes: int = 100_000,
    num_edges: int = 3_000_000,
    num_features: int = 128,
    num_classes: int = 16,
    seed: int = 0,
    *,
    inside: float = 0.5,
    signal: float = 3.0,
    label_noise: float = 0.1,
) -> Data:
    """Node classification where the class is the community and one node alone says little.

    A share `inside` of the edges is drawn inside a class, and the features are unit noise around
    a class centre of length about `signal`, so a model has to average over neighbours. A share
    `label_noise` of the labels, in every split, is drawn at random: that caps the accuracy at
    about `1 - label_noise`, whatever the model.

    Returns x float32 [N, F], y int64 [N], edge_index int64 [2, E] in random order with both
    directions of every edge, and train, val and test masks bool [N] (30, 20 and 50%).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = CommunityShape(num_nodes, num_edges, num_classes, inside, exponent=0.5)
    low, high, y = _community_edges(shape, generator)
    edge_index = torch.stack([torch.cat([low, high]), torch.cat([high, low])])
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=generator)]
    centres = torch.randn(num_classes, num_features, generator=generator) * num_features**-0.5
    x = signal * centres[y] + torch.randn(num_nodes, num_features, generator=generator)
    random_label = torch.randint(num_classes, (num_nodes,), generator=generator)
    flipped = torch.rand(num_nodes, generator=generator) < label_noise
    split = torch.rand(num_nodes, generator=generator)
    return Data(
        x=x,
        y=torch.where(flipped, random_label, y),
        edge_index=edge_index.contiguous(),
        train_mask=split < 0.3,
        val_mask=(split >= 0.3) & (split < 0.5),
        test_mask=split >= 0.5,
    )


def _community_edges(
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
