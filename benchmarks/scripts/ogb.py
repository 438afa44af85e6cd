"""Stands in for the package `ogb`, with made data of the schema of its data sets of nodes.

:func:`install` makes `from ogb.nodeproppred import PygNodePropPredDataset, Evaluator` work without
the package. Numbers of nodes are smaller; degrees, features and classes are those of the data sets.
"""

import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from benchmarks.scripts.data import edges


def arxiv(g: torch.Generator) -> Data:
    """Citations, directed: 7 of a node."""
    nodes = 20_000
    return labelled(edges(nodes, nodes, 140_000, g), nodes, 128, 40, g)


def products(g: torch.Generator) -> Data:
    """Products bought together, both directions: 50 of a node."""
    nodes = 20_000
    both = to_undirected(edges(nodes, nodes, 500_000, g), num_nodes=nodes)
    return labelled(both, nodes, 100, 47, g)


def proteins(g: torch.Generator) -> Data:
    """Proteins without features: eight numbers of an edge, 112 labels of a node."""
    nodes = 12_000
    ends = edges(nodes, nodes, 4_000_000, g)
    ends = ends[:, ends[0] < ends[1]]
    edge_attr = torch.rand(ends.size(1), 8, generator=g)
    edge_index, edge_attr = to_undirected(ends, edge_attr, num_nodes=nodes)
    y = (torch.rand(nodes, 112, generator=g) < 0.2).long()
    species = torch.randint(0, 8, (nodes, 1), generator=g)
    return Data(edge_index=edge_index, edge_attr=edge_attr, y=y, node_species=species,
                num_nodes=nodes)  # fmt: skip


def labelled(
    edge_index: Tensor, nodes: int, features: int, classes: int, g: torch.Generator
) -> Data:
    y = torch.randint(0, classes, (nodes, 1), generator=g)
    y[:classes, 0] = torch.arange(classes)
    x = torch.randn(nodes, features, generator=g) + one_hot(y[:, 0], features)
    return Data(x=x, edge_index=edge_index, y=y, num_nodes=nodes)


GENERATORS: dict[str, Callable[[torch.Generator], Data]] = {
    "ogbn-arxiv": arxiv, "ogbn-products": products, "ogbn-proteins": proteins,
}  # fmt: skip


class PygNodePropPredDataset:
    """One graph, and a division of its nodes.

    Args:
        name: of a data set.
        root: is not read.
        transform: of the graph, each time that it is read.
        pre_transform: of the graph, once.
    """

    def __init__(
        self, name: str, root: str = "dataset", transform: Callable[[Data], Data] | None = None,
        pre_transform: Callable[[Data], Data] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.root, self.transform = name, root, transform
        self._g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        data = GENERATORS[name](self._g)
        self._data = data if pre_transform is None else pre_transform(data)
        labels = self._data.y
        self.num_classes = 2 if name == "ogbn-proteins" else int(labels.max()) + 1
        self.num_tasks, self.num_features = labels.size(1), self._data.num_features
        nodes = torch.randperm(labels.size(0), generator=self._g)
        first, second = int(0.6 * len(nodes)), int(0.8 * len(nodes))
        self._parts = {"train": nodes[:first], "valid": nodes[first:second], "test": nodes[second:]}

    def get_idx_split(self) -> dict[str, Tensor]:
        return {name: part.sort().values for name, part in self._parts.items()}

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        data = self._data.clone()
        return data if self.transform is None else self.transform(data)


class Evaluator:
    """Accuracy; of several labels the area under the curve of the ranks, averaged over labels.

    Args:
        name: of a data set.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def eval(self, inputs: dict[str, Tensor]) -> dict[str, float]:
        truth, guess = (np.asarray(inputs[key].cpu()) for key in ("y_true", "y_pred"))
        if self.name != "ogbn-proteins":
            return {"acc": float((truth == guess).mean())}
        ranks = guess.argsort(0).argsort(0) + 1
        ones = (truth == 1).sum(0)
        most = np.maximum(ones * (len(truth) - ones), 1)
        areas = ((ranks * (truth == 1)).sum(0) - ones * (ones + 1) / 2) / most
        return {"rocauc": float(areas.mean())}


def install() -> None:
    """Let scripts import it as `ogb`."""
    package: Any = ModuleType("ogb")
    package.nodeproppred = ModuleType("ogb.nodeproppred")
    package.nodeproppred.PygNodePropPredDataset = PygNodePropPredDataset
    package.nodeproppred.Evaluator = Evaluator
    sys.modules |= {"ogb": package, "ogb.nodeproppred": package.nodeproppred}
