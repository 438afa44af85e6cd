"""Made data of the schema of PyG's datasets, which scripts would download.

:func:`install` points `torch_geometric.datasets` at it. Numbers of nodes, features and classes are
smaller than those of the data sets, degrees are skewed, labels are random: times say something,
accuracies do not.
"""

import inspect
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.datasets
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.utils import coalesce, to_undirected

Items = list[Any]
parts: list[dict[str, float]] = []  # seconds of the parts of every step, of scripts that note them
GENERATORS: dict[str, Callable[..., Items]] = {}
_OF_BASE = ("transform", "pre_transform", "pre_filter", "force_reload")


def of(*names: str) -> Callable[[Callable[..., Items]], Callable[..., Items]]:
    """Register what makes the items of datasets, given a generator and their arguments."""

    def register(function: Callable[..., Items]) -> Callable[..., Items]:
        GENERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def skewed(nodes: int, count: int, g: torch.Generator) -> Tensor:
    """Ids of nodes, of which some occur far more often than others."""
    ids = (torch.rand(count, generator=g).pow(2) * nodes).long().clamp(max=nodes - 1)
    return torch.randperm(nodes, generator=g)[ids]


def edges(sources: int, targets: int, count: int, g: torch.Generator) -> Tensor:
    """An edge_index without duplicates, [2, at most count]."""
    ends = torch.stack([skewed(sources, count, g), skewed(targets, count, g)])
    return torch.unique(ends, dim=1).contiguous()


def with_masks(store: Any, nodes: int, g: torch.Generator) -> Any:
    """Divide nodes for training, validation and test."""
    part = torch.rand(nodes, generator=g)
    store.train_mask, store.test_mask = part < 0.6, part >= 0.8
    store.val_mask = ~(store.train_mask | store.test_mask)
    return store


def of_nodes(nodes: int, count: int, features: int, classes: int, g: torch.Generator) -> Data:
    """An undirected graph with a label for every node."""
    y = torch.randint(0, classes, (nodes,), generator=g)
    y[:classes] = torch.arange(classes)
    edge_index = to_undirected(edges(nodes, nodes, count, g), num_nodes=nodes)
    x = torch.randn(nodes, features, generator=g) + one_hot(y % features, features)
    return with_masks(Data(x=x, edge_index=edge_index, y=y), nodes, g)


def small(least: int, most: int, degree: float, g: torch.Generator) -> tuple[int, Tensor]:
    """Number of nodes and edge_index of a small connected graph."""
    nodes = int(torch.randint(least, most, (1,), generator=g))
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    chords = torch.randint(0, nodes, (2, max(int(nodes * (degree / 2 - 1)), 2)), generator=g)
    both = torch.cat([ring, chords], dim=1)
    both = torch.cat([both, both.flip(0)], dim=1)
    return nodes, coalesce(both[:, both[0] != both[1]], num_nodes=nodes)


@of("Planetoid")
def planetoid(g: torch.Generator, **_: Any) -> Items:
    return [of_nodes(2708, 5300, 1433, 7, g)]


@of("Reddit", "Flickr", "GraphLandDataset")
def one_graph(g: torch.Generator, **_: Any) -> Items:
    return [of_nodes(6000, 40_000, 128, 7, g)]


@of("LINKXDataset", "WikipediaNetwork")
def several_splits(g: torch.Generator, **_: Any) -> Items:
    data = of_nodes(3000, 40_000, 100, 5, g)
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = data[name].view(-1, 1).repeat(1, 10)
    return [data]


@of("PPI")
def ppi(g: torch.Generator, split: str = "train", **_: Any) -> Items:
    items = [of_nodes(500, 5000, 50, 7, g) for _ in range(8 if split == "train" else 2)]
    for data in items:
        data.y = (torch.rand(500, 121, generator=g) < 0.3).float()
    return items


@of("TUDataset")
def small_graphs(g: torch.Generator, name: str = "", **_: Any) -> Items:
    items = []
    for _ in range(300):
        nodes, edge_index = small(10, 90, 3.7, g)
        kinds = 7 if name == "MUTAG" else 3
        data = Data(edge_index=edge_index, y=torch.randint(0, 2, (1,), generator=g))
        if not name.startswith("IMDB"):
            data.x = one_hot(torch.randint(0, kinds, (nodes,), generator=g), kinds).float()
        data.num_nodes = nodes
        items.append(data)
    return items


@of("ZINC")
def zinc(g: torch.Generator, split: str = "train", **_: Any) -> Items:
    items = []
    for _ in range(1000 if split == "train" else 200):
        nodes, edge_index = small(12, 36, 2.2, g)
        bonds = torch.randint(1, 4, (edge_index.size(1),), generator=g)
        atoms = torch.randint(0, 21, (nodes, 1), generator=g)
        y = torch.randn(1, generator=g)
        items.append(Data(x=atoms, edge_index=edge_index, edge_attr=bonds, y=y))
    return items


@of("Entities")
def entities(g: torch.Generator, **_: Any) -> Items:
    nodes, count = 2500, 14_000
    kinds = (torch.rand(count, generator=g).pow(2) * 90).long().sort().values
    ends = torch.stack([skewed(nodes, count, g), skewed(nodes, count, g)])
    ids, y = torch.randperm(nodes, generator=g)[:176], torch.arange(176) % 4
    return [Data(edge_index=ends, edge_type=kinds, num_nodes=nodes, train_idx=ids[:140],
                 train_y=y[:140], test_idx=ids[140:], test_y=y[140:])]  # fmt: skip


def of_types(
    sizes: dict[str, int], relations: dict[tuple[str, str, str], int], features: int,
    g: torch.Generator,
) -> HeteroData:  # fmt: skip
    """A graph of several types, with features for all of them."""
    data = HeteroData()
    for name, nodes in sizes.items():
        data[name].x = torch.randn(nodes, features, generator=g)
    for (source, relation, target), count in relations.items():
        edge_index = edges(sizes[source], sizes[target], count, g)
        data[source, relation, target].edge_index = edge_index
    return data


def labelled(data: HeteroData, name: str, classes: int, g: torch.Generator) -> Items:
    """Add labels and masks to a type."""
    nodes = data[name].num_nodes
    data[name].y = torch.arange(nodes) % classes
    with_masks(data[name], nodes, g)
    return [data]


@of("OGB_MAG")
def mag(g: torch.Generator, **_: Any) -> Items:
    sizes = {"paper": 3000, "author": 2500, "institution": 100, "field_of_study": 400}
    relations = {("author", "affiliated_with", "institution"): 3000,
                 ("author", "writes", "paper"): 9000, ("paper", "cites", "paper"): 12_000,
                 ("paper", "has_topic", "field_of_study"): 12_000}  # fmt: skip
    return labelled(of_types(sizes, relations, 128, g), "paper", 349, g)


@of("IMDB")
def imdb(g: torch.Generator, **_: Any) -> Items:
    data = of_types({"movie": 1200, "director": 600, "actor": 1500}, {}, 200, g)
    for other, count in (("director", 1200), ("actor", 3600)):
        edge_index = edges(1200, data[other].num_nodes, count, g)
        data["movie", "to", other].edge_index = edge_index
        data[other, "to", "movie"].edge_index = edge_index.flip(0)
    return labelled(data, "movie", 3, g)


@of("MovieLens")
def ratings(g: torch.Generator, **_: Any) -> Items:
    data, edge_index = HeteroData(), edges(300, 900, 15_000, g)
    data["movie"].x, data["user"].num_nodes = torch.randn(900, 404, generator=g), 300
    data["user", "rates", "movie"].edge_index = edge_index
    stars = torch.randint(0, 6, (edge_index.size(1),), generator=g)
    data["user", "rates", "movie"].edge_label = stars
    return [data]


@of("ModelNet", "FAUST")
def surfaces(g: torch.Generator, name: str = "", **_: Any) -> Items:
    """Points of a sphere, with triangles: clouds of ModelNet, meshes of FAUST."""
    nodes, count = (120, 64) if name else (600, 10)
    items = []
    for i in range(count):
        pos = torch.nn.functional.normalize(torch.randn(nodes, 3, generator=g))
        face = torch.randint(0, nodes, (3, 2 * nodes), generator=g)
        items.append(Data(pos=pos, face=face, y=torch.tensor([i % 10])))
    return items


@of("MNISTSuperpixels")
def superpixels(g: torch.Generator, **_: Any) -> Items:
    items = []
    for _ in range(320):
        pos = 28 * torch.rand(75, 2, generator=g)
        near = torch.cdist(pos, pos).fill_diagonal_(torch.inf).topk(8, largest=False).indices
        ends = torch.stack([near.flatten(), torch.arange(75).repeat_interleave(8)])
        items.append(Data(x=torch.rand(75, 1, generator=g), pos=pos,
                          edge_index=to_undirected(ends, num_nodes=75),
                          y=torch.randint(0, 10, (1,), generator=g)))  # fmt: skip
    return items


def _dataset(name: str, generate: Callable[..., Items]) -> type:
    original: Any = getattr(torch_geometric.datasets, name)
    parameters = inspect.signature(original.__init__)

    class Made(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = parameters.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = {n: v for n, v in bound.arguments.items() if n not in ("self", "root")}
            self.name = given.get("name", name)
            base = {key: given.pop(key, None) for key in _OF_BASE[:3]}
            InMemoryDataset.__init__(self, tempfile.mkdtemp(), **base)
            given.pop("force_reload", None)
            seed = zlib.crc32(f"{name} {given.get('name')} {given.get('split')}".encode())
            items = generate(torch.Generator().manual_seed(seed), **given)
            with torch.random.fork_rng(devices=[]):
                if self.pre_transform is not None:
                    items = [self.pre_transform(item) for item in items]
            self.data, self.slices = self.collate(items)

        def _download(self) -> None:
            pass

        def _process(self) -> None:
            pass

        num_relations = 90  # of Entities

    Made.__name__ = Made.__qualname__ = name
    return Made


def install() -> None:
    """Let `torch_geometric.datasets` have made data."""
    for name, generate in GENERATORS.items():
        setattr(torch_geometric.datasets, name, _dataset(name, generate))
