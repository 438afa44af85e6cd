"""Generated data sets in place of those that PyG's examples download.

`install(share)` replaces classes of `torch_geometric.datasets` by classes of the same names, whose
data have the shapes, names and types of the real ones, and random contents. Nothing is learned from
them, but every layer of an example runs on what it is made for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset

EDGES = 100_000  # of a graph of nodes, for share 1


def install(share: float = 1.0) -> None:
    """Replace the data sets of PyG in this process."""
    for name, make in MADE.items():
        setattr(torch_geometric.datasets, name, _class_of(name, make, share))


def _class_of(name: str, make: Callable[..., list[Any]], share: float) -> type:
    def init(self: Any, root: Any = None, *args: Any, transform: Any = None,
             pre_transform: Any = None, pre_filter: Any = None, **kwargs: Any) -> None:  # fmt: skip
        given = [arg for arg in args if not callable(arg)]
        found = [arg for arg in args if callable(arg)]
        transform = transform or next(iter(found), None)
        torch_geometric.data.InMemoryDataset.__init__(self, None, transform)
        self.name = next((arg for arg in given if isinstance(arg, str)), kwargs.get("name", name))
        split = kwargs.get("split", next((a for a in given if a in ("train", "val", "test")), ""))
        graphs = make(self.name, split, share)
        if pre_transform is not None:
            graphs = [pre_transform(graph) for graph in graphs]
        for key in ("num_relations", "num_classes", "num_nodes", "num_rels", "num_node_types"):
            if key in FACTS.get(name, {}):
                setattr(self, f"_{key}", FACTS[name][key])
        self._data, self.slices = self.collate(graphs)

    own: dict[str, Any] = {"__init__": init, "__module__": __name__}
    for key in FACTS.get(name, {}):
        own[key] = property(lambda self, key=key: FACTS[name][key])
    return type(name, (InMemoryDataset,), own)


def _edges(nodes: int, count: int, others: int | None = None) -> Tensor:
    """A few nodes have many edges."""
    source = (nodes * torch.rand(count) ** 2).long()
    target = torch.randint(others or nodes, (count,))
    return torch.stack([torch.randperm(nodes)[source], target])


def _both(edge_index: Tensor) -> Tensor:
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([kept, kept.flip(0)], dim=1).unique(dim=1).contiguous()


def _masks(nodes: int, parts: int = 1) -> dict[str, Tensor]:
    split = torch.rand(nodes) if parts == 1 else torch.rand(nodes, parts)
    return {"train_mask": split < 0.3, "val_mask": (split >= 0.3) & (split < 0.6),
            "test_mask": split >= 0.6}  # fmt: skip


def node_graph(features: int, classes: int, splits: int = 1) -> Callable[..., list[Data]]:
    """One graph whose nodes have classes."""

    def make(name: str, split: str, share: float) -> list[Data]:
        edges = int(EDGES * share)
        nodes = max(200, edges // 15)
        x = (torch.rand(nodes, features) < 0.05).float()
        return [Data(x=x, edge_index=_both(_edges(nodes, edges // 2)),
                     y=torch.arange(nodes) % classes, **_masks(nodes, splits))]  # fmt: skip

    return make


def ppi(name: str, split: str, share: float) -> list[Data]:
    """Graphs with 50 features and 121 labels a node."""
    graphs = []
    for _ in range(4 if split == "train" else 2):
        nodes = max(100, int(2_000 * share))
        graphs.append(Data(x=torch.randn(nodes, 50), edge_index=_both(_edges(nodes, 14 * nodes)),
                           y=(torch.rand(nodes, 121) < 0.3).float()))  # fmt: skip
    return graphs


def small_graphs(
    count: int, nodes: int, features: int, classes: int, edge_features: int = 0
) -> Callable[..., list[Data]]:
    """Graphs with a class each."""

    def make(name: str, split: str, share: float) -> list[Data]:
        graphs = []
        for number in range(max(80, int(count * share))):
            size = nodes // 2 + int(torch.randint(nodes, ()))
            edge_index = _both(_edges(size, 2 * size))
            edge_index = torch.cat([edge_index, torch.tensor([[0, 1], [1, 0]])], dim=1)
            kinds = torch.nn.functional.one_hot(torch.randint(max(features, 1), (size,)))
            x = torch.nn.functional.pad(kinds, (0, features - kinds.size(1))).float()
            data = Data(edge_index=edge_index, y=torch.tensor([number % classes]))
            data.x, data.num_nodes = (x, size) if features else (None, size)
            if edge_features:
                data.edge_attr = torch.rand(edge_index.size(1), edge_features)
            graphs.append(data)
        return graphs

    return make


def tudataset(name: str, split: str, share: float) -> list[Data]:
    features = {"COLORS-3": 5, "TRIANGLES": 1, "MUTAG": 7, "IMDB-BINARY": 0, "Mutagenicity": 14}
    graphs = small_graphs(600, 40, features.get(name, 3), 2)(name, split, share)
    for data in graphs:
        if name == "TRIANGLES":  # its degrees are 14 at most
            place = torch.arange(data.num_nodes)
            data.edge_index = _both(torch.stack([place, (place + 1) % data.num_nodes]))
        if name in ("COLORS-3", "TRIANGLES"):
            data.y, data.attn = data.y.float(), torch.rand(data.num_nodes)
    # Their examples split 10,500 and 45,000 graphs at fixed places.
    return graphs * (-(-{"COLORS-3": 3_200, "TRIANGLES": 36_000}.get(name, 1) // len(graphs)))


def zinc(name: str, split: str, share: float) -> list[Data]:
    """Molecules: kinds of atoms and bonds are numbers."""
    graphs = small_graphs(600, 23, 1, 2)(name, split, share)
    for data in graphs:
        data.x = torch.randint(21, (data.num_nodes, 1))
        data.edge_attr = torch.randint(1, 4, (data.num_edges,))
        data.y = torch.randn(1)
    return graphs


def qm9(name: str, split: str, share: float) -> list[Data]:
    graphs = small_graphs(400, 18, 11, 2, edge_features=4)(name, split, share)
    for data in graphs:
        data.y, data.pos = torch.randn(1, 19), torch.randn(data.num_nodes, 3)
        data.z = torch.randint(1, 10, (data.num_nodes,))
        data.edge_attr = torch.nn.functional.one_hot(torch.randint(4, (data.num_edges,)), 4).float()
    return graphs * (20_400 // len(graphs))  # the first 20,000 of them are no training data


def upfd(name: str, split: str, share: float) -> list[Data]:
    graphs = small_graphs(300, 60, 10, 2)(name, split, share)
    for data in graphs:
        data.x = torch.randn(data.num_nodes, 10)
    return graphs


def faust(name: str, split: str, share: float) -> list[Data]:
    """Meshes."""
    graphs, nodes = [], 6_890
    faces = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes,
                         (torch.arange(nodes) + 83) % nodes])  # fmt: skip
    for _ in range(4 if split == "train" or not split else 2):
        graphs.append(Data(pos=torch.randn(nodes, 3), face=faces, y=torch.tensor([0])))
    return graphs


def entities(name: str, split: str, share: float) -> list[Data]:
    edges = int(EDGES * share)
    nodes = max(200, edges // 4)
    labelled = torch.randperm(nodes)[:180]
    return [Data(edge_index=_edges(nodes, edges), num_nodes=nodes,
                 edge_type=torch.randint(FACTS["Entities"]["num_relations"], (edges,)),
                 train_idx=labelled[:140], train_y=torch.arange(140) % 4,
                 test_idx=labelled[140:], test_y=torch.arange(40) % 4)]  # fmt: skip


def rel_link_pred(name: str, split: str, share: float) -> list[Data]:
    edges = int(EDGES * share / 2)
    nodes, half = max(200, edges // 20), FACTS["RelLinkPredDataset"]["num_relations"] // 2
    train, kind = _edges(nodes, edges), torch.randint(half, (edges,))
    some = {"train_edge_index": train, "train_edge_type": kind}
    for part in ("valid", "test"):
        some |= {f"{part}_edge_index": train[:, :500], f"{part}_edge_type": kind[:500]}
    return [Data(edge_index=torch.cat([train, train.flip(0)], dim=1), num_nodes=nodes,
                 edge_type=torch.cat([kind, kind + half]), **some)]  # fmt: skip


def knowledge(name: str, split: str, share: float) -> list[Data]:
    edges = int(EDGES * share) if split == "train" else 200
    nodes = max(200, int(EDGES * share) // 20)
    return [Data(edge_index=_edges(nodes, edges), edge_type=torch.randint(237, (edges,)),
                 num_nodes=nodes)]  # fmt: skip


def movie_lens(name: str, split: str, share: float) -> list[HeteroData]:
    edges, data = int(EDGES * share), HeteroData()
    users, films = max(100, edges // 150), max(200, edges // 10)
    data["user"].num_nodes = users
    data["movie"].x = torch.randn(films, 404)
    ends = torch.stack([torch.randint(users, (edges,)), torch.randint(films, (edges,))])
    data["user", "rates", "movie"].edge_index = ends
    data["user", "rates", "movie"].edge_label = torch.randint(6, (edges,))
    data["user", "rates", "movie"].time = torch.randint(1000, (edges,))
    return [data]


def amazon_book(name: str, split: str, share: float) -> list[HeteroData]:
    edges, data = int(EDGES * share), HeteroData()
    users, books = max(100, edges // 25), max(200, edges // 15)
    data["user"].num_nodes, data["book"].num_nodes = users, books
    ends = torch.stack([torch.randint(users, (edges,)), torch.randint(books, (edges,))])
    data["user", "rates", "book"].edge_index = ends
    data["book", "rated_by", "user"].edge_index = ends.flip(0)
    data["user", "rates", "book"].edge_label_index = ends[:, :1000]
    return [data]


def imdb(name: str, split: str, share: float) -> list[HeteroData]:
    edges, data = int(EDGES * share / 2), HeteroData()
    sizes = {"movie": max(100, edges // 12), "director": max(50, edges // 20),
             "actor": max(100, edges // 10)}  # fmt: skip
    for kind, count in sizes.items():
        data[kind].x = (torch.rand(count, 256) < 0.05).float()
    for other in ("director", "actor"):
        ends = _edges(sizes["movie"], edges // (4 if other == "director" else 2), sizes[other])
        data["movie", "to", other].edge_index = ends
        data[other, "to", "movie"].edge_index = ends.flip(0)
    data["movie"].y = torch.arange(sizes["movie"]) % 3
    for mask, value in _masks(sizes["movie"]).items():
        data["movie"][mask] = value
    return [data]


def dblp(name: str, split: str, share: float) -> list[HeteroData]:
    edges, data = int(EDGES * share), HeteroData()
    sizes = {"author": max(100, edges // 25), "paper": max(100, edges // 7),
             "term": max(50, edges // 12), "conference": 20}  # fmt: skip
    for kind, width in {"author": 334, "paper": 423, "term": 50}.items():
        data[kind].x = (torch.rand(sizes[kind], width) < 0.05).float()
    data["conference"].num_nodes = 20
    for other, part in {"author": 5, "term": 1, "conference": 7}.items():
        ends = _edges(sizes["paper"], edges // part, sizes[other])
        data["paper", "to", other].edge_index = ends
        data[other, "to", "paper"].edge_index = ends.flip(0)
    data["author"].y = torch.arange(sizes["author"]) % 4
    for mask, value in _masks(sizes["author"]).items():
        data["author"][mask] = value
    return [data]


def signed(name: str, split: str, share: float) -> list[Data]:
    """Edges that like and dislike, as a sequence of one graph."""
    edges = int(EDGES * share)
    nodes = max(200, edges // 12)
    return [Data(edge_index=_edges(nodes, edges), num_nodes=nodes,
                 edge_attr=torch.randint(0, 2, (edges,)) * 2 - 1)]  # fmt: skip


def events(name: str, split: str, share: float) -> list[Data]:
    count = int(2000 * share)
    return [Data(sub=torch.randint(200, (1,)), rel=torch.randint(20, (1,)),
                 obj=torch.randint(200, (1,)), t=torch.tensor([step // 10]))
            for step in range(count)]  # fmt: skip


def linkx(name: str, split: str, share: float) -> list[Data]:
    return node_graph(128, 2, splits=5)(name, split, share)


# What a data set says of itself and does not follow from its data.
FACTS: dict[str, dict[str, int]] = {
    "Entities": {"num_relations": 90, "num_classes": 4},
    "RelLinkPredDataset": {"num_relations": 40},
    "ICEWS18": {"num_nodes": 200, "num_rels": 20},
    "GDELT": {"num_nodes": 200, "num_rels": 20},
    "FAUST": {"num_classes": 6890},
}
MADE: dict[str, Callable[..., list[Any]]] = {
    "Planetoid": node_graph(300, 7),
    "CitationFull": node_graph(300, 7),
    "WikipediaNetwork": node_graph(300, 5, splits=10),
    "LINKXDataset": linkx,
    "Flickr": node_graph(200, 7),
    "Reddit": node_graph(300, 41),
    "PPI": ppi,
    "TUDataset": tudataset,
    "ZINC": zinc,
    "QM9": qm9,
    "UPFD": upfd,
    "FAUST": faust,
    "Entities": entities,
    "RelLinkPredDataset": rel_link_pred,
    "FB15k_237": knowledge,
    "MovieLens": movie_lens,
    "AmazonBook": amazon_book,
    "IMDB": imdb,
    "DBLP": dblp,
    "BitcoinOTC": signed,
    "ICEWS18": events,
    "GDELT": events,
}
