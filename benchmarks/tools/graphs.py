"""Synthetic graphs with the sizes of the graphs that papers use, and one learnable task.

The same name and seed give the same graph on every machine.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.tools.synthetic import (
    CommunityShape,
    community_edges,
    community_graph,
    mycielskian,
    rmat,
    roads,
)

Csr = tuple[Tensor, Tensor]


class RmatShape(NamedTuple):
    """Size of an R-MAT graph."""

    num_nodes: int
    num_entries: int


COMMUNITY_SHAPES = {
    "arxiv-like": CommunityShape(169_343, 2_332_486, 400, 0.7, 0.7),
    "flickr-like": CommunityShape(89_250, 989_006, 7, 0.6, 0.7),
    "yelp-like": CommunityShape(716_847, 13_954_820, 100, 0.7, 0.6),
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
    "rmat-held-1m": RmatShape(1_000_000, 24_000_000),
    "rmat-held-90k": RmatShape(90_000, 9_000_000),
    "rmat-held-12k": RmatShape(12_000, 400_000),
}
ROADS = {"roads-like": 1_441_295}  # nodes; belgium_osm's


def edge_list(csr: Csr, *, shuffled: bool = False) -> Tensor:
    """The edge_index [2, E] of a graph: sorted by target, or in no order, as it often comes."""
    rowptr, col = csr
    edges = torch.stack([col, torch.repeat_interleave(rowptr.diff())])
    if not shuffled:
        return edges
    return edges[:, torch.randperm(col.numel(), device=col.device)].contiguous()


def load(name: str, *, device: str = "cpu", seed: int = 0) -> Csr:
    """A graph by name.

    `arxiv-like`: node ids shuffled, the worst case for locality; `arxiv-like/ordered`: the nodes
    of a community next to one another; `arxiv-like@0.01`: a share of nodes, edges and communities;
    `rmat-20k`; `roads-like`; `mycielskian17`: exact, 98,303 nodes and 100,245,742 entries.
    """
    if name.startswith("mycielskian"):
        return mycielskian(int(name.removeprefix("mycielskian")), device=device)
    sized, _, variant = name.partition("/")
    base, _, share_text = sized.partition("@")
    share = float(share_text or 1)
    if base in RMAT_SHAPES:
        nodes, entries = RMAT_SHAPES[base]
        return rmat(max(16, int(nodes * share)), max(32, int(entries * share)), seed, device=device)
    if base in ROADS:
        return roads(int(ROADS[base] * share), seed=seed, device=device)
    if base not in COMMUNITY_SHAPES or variant not in ("", "ordered"):
        known = ", ".join([*COMMUNITY_SHAPES, *RMAT_SHAPES, *ROADS, "mycielskian<order>"])
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
    low, high, y = community_edges(shape, generator)
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
