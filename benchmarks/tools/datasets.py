"""Real graphs, read from files that the user has; nothing is ever downloaded.

`root` is a folder that holds any of
    planetoid/ind.<name>.*      or the same files in root itself or in root/<Name>/raw
    facebook_pages/facebook*    or the same files in root itself
    cornell5_adjacency.npz
"""

import csv
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.utils import to_undirected

from benchmarks.tools import graphs

PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
FACEBOOK_FILES = ("facebook_edges.csv", "facebook.json", "facebook_target.csv")
FACEBOOK_FEATURES = 4_714  # binary features of a page, numbered from 0
REAL = ("Cora", "CiteSeer", "facebook-pages", "cornell5")


def load_task(name: str, root: str | Path | None = None) -> Data:
    """Node classification by name: one of `REAL` from the files in `root`, or a synthetic graph.

    Graphs that come without features and classes get random ones, 128 and 40, as ogbn-arxiv has:
    good for timing, nothing to learn.
    """
    if name in REAL and root is None:
        raise FileNotFoundError(f"{name} is read from files: name their folder")
    if name in ("Cora", "CiteSeer"):
        return load_planetoid(name, root)
    if name == "facebook-pages":
        return load_facebook_pages(root)
    if name == "cornell5":
        return _with_random_task(*load_cornell5(root))
    rowptr, col = graphs.load(name)
    row = torch.repeat_interleave(rowptr.diff())
    # The graph is symmetric: this is the order by source that PyG's transforms leave behind.
    return _with_random_task(torch.stack([row, col]), rowptr.numel() - 1)


def load_planetoid(name: str, root: str | Path) -> Data:
    """Cora, CiteSeer or PubMed with its public split.

    PyG wants the raw files in a folder tree of its own and writes beside them, so that tree is
    made of links in a temporary folder and `root` may be read-only.
    """
    files = tuple(f"ind.{name.lower()}.{part}" for part in PLANETOID_PARTS)
    source = _find(Path(root), ("planetoid", ".", f"{name}/raw"), files)
    with tempfile.TemporaryDirectory(prefix="pyg_accel-") as tree:
        raw = Path(tree, name, "raw")
        raw.mkdir(parents=True)
        for file in files:
            (raw / file).symlink_to((source / file).resolve())
        return Planetoid(tree, name)[0]


def load_facebook_pages(root: str | Path, *, num_features: int | None = 128, seed: int = 0) -> Data:
    """Facebook pages that like one another; the class is the kind of page.

    Returns edge_index int64 [2, 341825] in both directions, y int64 [22470] of 4 classes, train,
    val and test masks of 10, 10 and 80%, and x float32 [22470, num_features]: a fixed random
    projection of the 4,714 binary features, or those features themselves for None.
    """
    folder = _find(Path(root), ("facebook_pages", "."), FACEBOOK_FILES)
    with open(folder / "facebook_target.csv", encoding="utf-8", newline="") as file:
        kinds = {int(page["id"]): page["page_type"] for page in csv.DictReader(file)}
    ends = np.loadtxt(folder / "facebook_edges.csv", np.int64, delimiter=",", skiprows=1)
    edges = torch.from_numpy(ends.T.copy())
    features = json.loads((folder / "facebook.json").read_text())
    y = torch.from_numpy(np.unique([kinds[i] for i in sorted(kinds)], return_inverse=True)[1])
    num_nodes = y.numel()

    node = np.repeat([int(key) for key in features], [len(ids) for ids in features.values()])
    feature = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in features.values()])
    x = torch.zeros(num_nodes, FACEBOOK_FEATURES)
    x[torch.from_numpy(node), torch.from_numpy(feature)] = 1.0
    generator = torch.Generator().manual_seed(seed)
    if num_features is not None:
        projection = torch.randn(FACEBOOK_FEATURES, num_features, generator=generator)
        x = x @ projection * num_features**-0.5

    split = torch.rand(num_nodes, generator=generator)
    return Data(
        x=x,
        y=y,
        edge_index=to_undirected(edges, num_nodes=num_nodes),
        train_mask=split < 0.1,
        val_mask=(split >= 0.1) & (split < 0.2),
        test_mask=split >= 0.2,
    )


def load_twitch_fr(root: str | Path, *, num_features: int = 128, seed: int = 0) -> Data:
    """French users of Twitch who are friends; the class is whether what they show is for adults.

    Returns edge_index int64 [2, 225332] in both directions, y int64 [6551] of 2 classes, train, val
    and test masks of 50, 25 and 25% of the nodes whose class is known, and x float32
    [6551, num_features], a fixed random projection of 3,170 binary features.
    """
    name = "twitch_fr.npz"
    with np.load(_find(Path(root), (".",), (name,)) / name) as stored:
        edges, y = torch.from_numpy(stored["edges"]).long(), torch.from_numpy(stored["mature"])
        starts, ids = stored["feature_ptr"], torch.from_numpy(stored["feature_ids"]).long()
    num_nodes = y.numel()
    x = torch.zeros(num_nodes, int(ids.max()) + 1)
    x[torch.from_numpy(np.repeat(np.arange(num_nodes), np.diff(starts))), ids] = 1.0
    generator = torch.Generator().manual_seed(seed)
    x = x @ torch.randn(x.size(1), num_features, generator=generator) * num_features**-0.5
    split, known = torch.rand(num_nodes, generator=generator), y >= 0
    return Data(
        x=x,
        y=y.long().clamp(min=0),
        edge_index=to_undirected(edges, num_nodes=num_nodes),
        train_mask=known & (split < 0.5),
        val_mask=known & (split >= 0.5) & (split < 0.75),
        test_mask=known & (split >= 0.75),
    )


def load_cornell5(root: str | Path) -> tuple[Tensor, int]:
    """A dense social graph without features: edge_index int64 [2, 1581554] and 18,660 nodes."""
    name = "cornell5_adjacency.npz"
    with np.load(_find(Path(root), (".",), (name,)) / name) as stored:
        rowptr, col = stored["indptr"].astype(np.int64), stored["indices"].astype(np.int64)
    num_nodes = len(rowptr) - 1
    row = np.repeat(np.arange(num_nodes), np.diff(rowptr))
    return torch.from_numpy(np.stack([row, col])), num_nodes


def _with_random_task(edge_index: Tensor, num_nodes: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(num_nodes, 128, generator=generator),
        y=torch.randint(40, (num_nodes,), generator=generator),
        edge_index=edge_index,
        train_mask=torch.ones(num_nodes, dtype=torch.bool),
    )


def _find(root: Path, folders: tuple[str, ...], files: tuple[str, ...]) -> Path:
    """The first of `folders` below `root` that holds all `files`."""
    for folder in folders:
        if all((root / folder / file).is_file() for file in files):
            return root / folder
    wanted = " or ".join(str(root / folder) for folder in folders)
    raise FileNotFoundError(f"expected {', '.join(files)} in {wanted}")
