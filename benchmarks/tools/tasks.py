"""Data of the applications: real where its files are there, generated at the paper's sizes if not.

`load(name)` knows these; `name@0.1` is a tenth of a generated one:

    facebook-pages   real: pages that like one another; the class is the kind of page
    cornell5         real: students and their friendships; gender from the other attributes
    douban           real: ratings of films
    pubmed-like      a citation graph: 19,717 nodes, 88,648 edges, 500 features, 3 classes
    products-like    ogbn-products: 2,449,029 nodes, 123,718,280 edges, 100 features, 47 classes
    bgs-like         a typed graph: 333,845 nodes, 1,832,398 edges of 103 relations and inverses
    ml-1m-like       MovieLens-1M: 6,040 users, 3,706 films, 1,000,209 ratings from 1 to 5
    molecules-like   Tox21: 7,831 molecules of 18.6 atoms, 74 features an atom, 12 targets each
    block-models     64 random graphs of 1,000 nodes and two communities, as one batch

Real files are read from the folder that PYG_ACCEL_DATA names (`datasets.py`).
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import degree

from benchmarks.tools import datasets, graphs

RELATIONS = 103  # of BGS, without their inverses


def load(name: str, root: str | Path | None = None) -> Data:
    """A task by name."""
    base, _, share = name.partition("@")
    if base in REAL:
        folder = root or os.environ.get("PYG_ACCEL_DATA")
        if folder is None:
            raise FileNotFoundError(f"{base} is read from files: PYG_ACCEL_DATA names their folder")
        return REAL[base](folder)
    if base not in GENERATED:
        raise ValueError(f"no task is called {name!r}; known: {', '.join([*REAL, *GENERATED])}")
    return GENERATED[base](float(share or 1))


def first(*names: str) -> str:
    """The first of these that can be had here."""
    for name in names:
        if name.partition("@")[0] in GENERATED or os.environ.get("PYG_ACCEL_DATA"):
            return name
    raise FileNotFoundError(f"PYG_ACCEL_DATA names no folder, and {', '.join(names)} are files")


def batches(data: Batch, size: int | None) -> Iterable[Batch]:
    """The training graphs of a batch of graphs, all at once where there is no size."""
    graphs = data.index_select(data.train_mask)
    return DataLoader(graphs, size, shuffle=True) if size else [Batch.from_data_list(graphs)]


def cornell5(root: str | Path) -> Data:
    """Friends of a college: gender (two classes, unknown ones in no split) from year, dorm, ..."""
    edge_index, num_nodes = datasets.load_cornell5(root)
    with np.load(Path(root) / "cornell5_attributes.npz") as stored:
        gender = torch.from_numpy(stored["gender"].astype(np.int64))
        columns = [
            torch.from_numpy(np.unique(stored[name], return_inverse=True)[1])
            for name in ("status", "major", "second_major", "dorm", "year")
        ]
    x = torch.cat([torch.nn.functional.one_hot(column) for column in columns], dim=1).float()
    split = torch.rand(num_nodes, generator=_generator())
    known = gender > 0
    return Data(x=x, edge_index=edge_index, y=(gender - 1).clamp(min=0),
                train_mask=known & (split < 0.5), test_mask=known & (split >= 0.75),
                val_mask=known & (split >= 0.5) & (split < 0.75))  # fmt: skip


def douban(root: str | Path) -> Data:
    """Ratings from 1 to 5 of 3,000 users and 3,000 films."""
    with np.load(Path(root) / "douban_ratings.npz") as stored:
        ends = [torch.from_numpy(stored[f"{part}_user_item"]).long() for part in ("train", "test")]
        marks = [torch.from_numpy(stored[f"{part}_rating"]).long() for part in ("train", "test")]
        users, items = int(stored["num_users"]), int(stored["num_items"])
    return ratings(users, items, ends[0], marks[0], ends[1], marks[1])


def pubmed_like(share: float) -> Data:
    return graphs.community_task(
        int(19_717 * share), int(88_648 * share), 500, 3, inside=0.7, signal=2.0
    )


def products_like(share: float) -> Data:
    nodes, edges = int(2_449_029 * share), int(123_718_280 * share)
    return graphs.community_task(nodes, edges, 100, 47, inside=0.3)


def bgs_like(share: float) -> Data:
    """Two classes; a relation joins nodes of one class, of two, or any, and few are frequent.

    Nodes have no features. Every edge has its inverse, of a relation of its own.
    """
    generator = _generator()
    nodes, edges = int(333_845 * share), int(916_199 * share)
    y = torch.randint(2, (nodes,), generator=generator)
    frequency = torch.arange(1, RELATIONS + 1).float() ** -1.0
    kind = torch.multinomial(frequency, edges, replacement=True, generator=generator)
    source = torch.randint(nodes, (edges,), generator=generator)
    ordered = torch.cat([(y == c).nonzero().squeeze(1) for c in range(2)])
    start, count = torch.tensor([0, int((y == 0).sum())]), torch.bincount(y, minlength=2)
    side = (y[source] + kind) % 2  # an even relation stays inside its class
    place = (torch.rand(edges, generator=generator) * count[side]).long()
    target = ordered[start[side] + place]
    loose = torch.rand(edges, generator=generator) < 0.2
    target = torch.where(loose, torch.randint(nodes, (edges,), generator=generator), target)
    split = torch.rand(nodes, generator=generator)
    return Data(
        num_nodes=nodes,
        y=y,
        edge_index=torch.stack([torch.cat([source, target]), torch.cat([target, source])]),
        edge_type=torch.cat([kind, kind + RELATIONS]),
        num_relations=2 * RELATIONS,
        train_mask=split < 0.5,
        test_mask=split >= 0.5,
    )


def ml1m_like(share: float) -> Data:
    """Ratings made of two vectors of 4 numbers and noise; a few films have most of them."""
    generator = _generator()
    users, items, count = int(6_040 * share), int(3_706 * share), int(1_000_209 * share)
    tastes = torch.randn(users, 4, generator=generator)
    kinds = torch.randn(items, 4, generator=generator)
    known = torch.arange(1, items + 1).float() ** -0.7
    user = torch.randint(users, (count,), generator=generator)
    item = torch.multinomial(known, count, replacement=True, generator=generator)
    noise = torch.randn(count, generator=generator)
    mark = 3.5 + 0.5 * (tastes[user] * kinds[item]).sum(dim=1) + 0.3 * noise
    rated, ends = mark.round().clamp(1, 5).long(), torch.stack([user, item])
    cut = int(0.9 * count)
    return ratings(users, items, ends[:, :cut], rated[:cut], ends[:, cut:], rated[cut:])


def ratings(
    users: int, items: int, train: Tensor, mark: Tensor, test: Tensor, test_mark: Tensor
) -> Data:
    """One graph of users and, numbered behind them, films.

    A training rating is an edge from the user to the film and one back; `edge_type` is the mark,
    from 0 on, plus 5 on the way back. `train` and `test` are pairs [2, R], `y` and `test_y` marks
    from 0 on.
    """
    shift = torch.tensor([[0], [users]])
    pairs, mark = train + shift, mark - 1
    return Data(
        num_nodes=users + items,
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),
        edge_type=torch.cat([mark, mark + 5]),
        train=pairs,
        y=mark,
        test=test + shift,
        test_y=test_mark - 1,
    )


def molecules_like(share: float) -> Batch:
    """All molecules as one batch: rings and chains of atoms; targets are rules about neighbours."""
    generator = _generator()
    count = max(8, int(7_831 * share))
    atoms = torch.poisson(torch.full((count,), 16.6), generator=generator).long() + 2
    batch = torch.repeat_interleave(torch.arange(count), atoms)
    nodes, begin = batch.numel(), torch.cumsum(atoms, 0) - atoms
    # Each atom but the first of a molecule is bound to one of the two before it: a tree, and some
    # rings are closed over five atoms.
    place = torch.arange(nodes) - begin[batch]
    back = 1 + (torch.rand(nodes, generator=generator) < 0.3).long()
    later = (place > 0).nonzero().squeeze(1)
    bonds = torch.stack([later - torch.minimum(back, place)[later], later])
    closed = ((place >= 5) & (torch.rand(nodes, generator=generator) < 0.12)).nonzero().squeeze(1)
    bonds = torch.cat([bonds, torch.stack([closed - 5, closed])], dim=1)
    kind = torch.multinomial(torch.arange(1, 45).float() ** -1.5, nodes, replacement=True,
                             generator=generator)  # fmt: skip
    x = torch.nn.functional.one_hot(kind, 44).float()
    x = torch.cat([x, torch.rand(nodes, 30, generator=generator)], dim=1)
    edge_index = torch.cat([bonds, bonds.flip(0)], dim=1)
    # A target is whether bonds between an atom of its kind and one of the first kind are many.
    ours = torch.stack([kind == target + 1 for target in range(12)], dim=1).float()
    near = torch.zeros(nodes, 12).index_add_(0, edge_index[1], ours[edge_index[0]])
    score = torch.zeros(count, 12).index_add_(0, batch, near * (kind == 0).unsqueeze(1))
    y = (score > score.median(dim=0).values).float()
    owner = batch[edge_index[0]]
    bound = edge_index[:, owner.argsort(stable=True)].split(torch.bincount(owner).tolist(), dim=1)
    parts = zip(x.split(atoms.tolist()), bound, begin, y, strict=True)
    data = Batch.from_data_list(
        [Data(x=x, edge_index=bound - first, y=y[None]) for x, bound, first, y in parts]
    )
    data.train_mask = torch.rand(count, generator=generator) < 0.8
    return data


def communities_graph(nodes: int, degree: float, generator: torch.Generator) -> Data:
    """A stochastic block model of two communities: 9 of 10 edges stay inside; both directions."""
    y = torch.randperm(nodes, generator=generator) % 2
    ends = torch.randint(nodes, (2, int(nodes * degree * 1.2)), generator=generator)
    kept = (y[ends[0]] == y[ends[1]]) | (torch.rand(ends.size(1), generator=generator) < 1 / 9)
    low, high = ends[:, kept & (ends[0] != ends[1])][:, : int(nodes * degree / 2)]
    return Data(edge_index=torch.stack([torch.cat([low, high]), torch.cat([high, low])]), y=y,
                num_nodes=nodes)  # fmt: skip


class WithLines(Data):
    """A graph, and the graph of its directed edges.

    Attributes:
        line_index: [2, L] from each edge u -> v to all edges v -> w but w = u: non-backtracking.
        end_index: [2, 2E] from each edge to its source, then to its target.
        sign: [2E] -1 at the source of an edge and 1 at its target.
        node_degree: [N, 1] in the graph.
        edge_degree: [E, 1] in the line graph.
    """

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key == "line_index":
            return self.num_edges
        if key == "end_index":
            return torch.tensor([[self.num_edges], [self.num_nodes]])
        return super().__inc__(key, value, *args, **kwargs)


def with_lines(data: Data) -> WithLines:
    """The same graph with its line graph."""
    source, target = data.edge_index
    first, order = source.sort(stable=True)  # edges by where they begin
    rowptr = torch._convert_indices_from_coo_to_csr(first, data.num_nodes)
    count = rowptr.diff()[target]  # of edges that go on from each
    edge = torch.repeat_interleave(torch.arange(source.numel()), count)
    place = torch.arange(edge.numel()) - (count.cumsum(0) - count)[edge]
    onward = order[rowptr[target[edge]] + place]
    line = torch.stack([edge, onward])[:, target[onward] != source[edge]]
    edges = torch.arange(source.numel())
    return WithLines(
        edge_index=data.edge_index,
        y=data.y,
        num_nodes=data.num_nodes,
        line_index=line,
        end_index=torch.stack([torch.cat([edges, edges]), torch.cat([source, target])]),
        sign=torch.ones(2, edges.numel()).mul_(torch.tensor([[-1.0], [1.0]])).flatten(),
        node_degree=degree(target, data.num_nodes).unsqueeze(1),
        edge_degree=degree(line[1], edges.numel()).unsqueeze(1),
    )


def block_models(share: float) -> Batch:
    """Graphs of 1,000 nodes, two communities and 3 neighbours a node, as one batch."""
    generator = _generator()
    count = max(4, int(64 * share))
    data = Batch.from_data_list(
        [with_lines(communities_graph(1_000, 3.0, generator)) for _ in range(count)]
    )
    data.train_mask = torch.arange(count) < 0.75 * count
    return data


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


REAL: dict[str, Callable[[str | Path], Data]] = {
    "facebook-pages": datasets.load_facebook_pages,
    "cornell5": cornell5,
    "douban": douban,
}
GENERATED: dict[str, Callable[[float], Data]] = {
    "pubmed-like": pubmed_like,
    "products-like": products_like,
    "bgs-like": bgs_like,
    "ml-1m-like": ml1m_like,
    "molecules-like": molecules_like,
    "block-models": block_models,
}
