"""A graph in a folder, of which every rank reads its own part.

``meta.json`` and arrays of numpy, read as memory maps; no pickle is written or read. Nodes are in
the order that is cut, edges by target, so the part of a rank is a range of every array, for any
number of ranks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed.partition import Partition, cut
from pyg_accel.distributed.partitioners import PARTITIONERS, method_reasons
from pyg_accel.distributed.stores import (
    ONE,
    Types,
    begins,
    by_type,
    edge_stores,
    holds_ids,
    joined,
    store_of,
)
from pyg_accel.distributed.suitability import data_reasons
from pyg_accel.errors import FolderError, NotDistributable
from pyg_accel.graph import Graph
from pyg_accel.reordering.orders import order_of

__all__ = ["Stored", "load", "save"]

FORMAT, VERSION = "pyg_accel graph", 2
_ORDER, _ROWPTR, _COL = "order", "rowptr", "col"
_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}  # is stored as


def save(
    data: Data | HeteroData,
    folder: str | Path,
    *,
    partition: str | Tensor = "community",
    overwrite: bool = False,
) -> None:
    """Write a graph to a folder that :func:`distribute` takes in place of the data.

    One process calls it. The folder appears when it is complete; a full disk leaves none.

    Args:
        data: with a plain edge_index, or one for each type of edges.
        folder: to make.
        partition: an order that :func:`pyg_accel.reorder` knows, ``"given"``, or an order [N]: of
            nodes type by type where there are several types.
        overwrite: replace a folder that :func:`save` made before.

    Raises:
        FolderError: if the folder exists already.
        NotDistributable: for data that cannot be cut.
    """
    reasons = data_reasons(data)
    if isinstance(partition, str):
        reasons += method_reasons(partition)
        if partition in PARTITIONERS:
            reasons.append(f"partition='{partition}' cuts for one number of ranks, and a folder "
                           "serves any: pass an order")  # fmt: skip
    if reasons:
        raise NotDistributable("; ".join(reasons))
    folder = Path(folder)
    if folder.exists() and not (overwrite and (folder / "meta.json").is_file()):
        raise FolderError(f"{folder} exists already" + (
            "; overwrite=True replaces a stored graph" if not overwrite else
            ", and is not a stored graph"
        ))  # fmt: skip
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _write(data, beside, partition)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(data: Data | HeteroData, folder: Path, method: str | Tensor) -> None:
    edges, sizes = joined(data)
    most, edges = sum(sizes.values()), edges.cpu()
    if isinstance(method, str) and method == "given":
        order = torch.arange(most)
    else:
        order = order_of(Graph.from_edge_index(edges.contiguous(), (most, most)), method).cpu()
    types = by_type(Partition(order, torch.tensor([0, most])), sizes)
    arrays = {_ORDER: order}
    by_target: dict[Any, Tensor] = {}
    for i, (key, store) in enumerate(edge_stores(data).items()):
        ends = store.edge_index.cpu()
        targets = types[key[2]].places()[ends[1].long()]
        by_target[key] = torch.argsort(targets, stable=True)
        counts = torch.bincount(targets, minlength=sizes[key[2]])
        arrays[_of(_ROWPTR, key, i)] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        sources = types[key[0]].places()[ends[0].long()]
        arrays[_of(_COL, key, i)] = sources[by_target[key]].to(ends.dtype)
    attributes = []
    for place, name, value, role, key in _attributes(data):
        if not isinstance(value, Tensor):
            raise NotDistributable(f"'{name}' is a {type(value).__name__}: a folder stores tensors")
        if role != "graph" and data.__cat_dim__(name, value) != 0:
            raise NotDistributable(f"'{name}' does not have nodes or edges in its first dimension")
        kept = value.cpu()
        if role != "graph":
            kept = kept[types[key].order if role == "node" else by_target[key]]
        arrays[f"{place}-{name}"] = kept
        attributes.append([place, name, role])
    meta: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "nodes": list(sizes.items()),
        "edges": [[*key, found.numel()] for key, found in by_target.items()],
        "attributes": attributes, "arrays": {},
    }  # fmt: skip
    for name, tensor in arrays.items():
        path = folder / f"{name}.npy"
        kept = tensor.detach().contiguous()
        kept = kept.view(_WITHOUT_NUMPY.get(kept.dtype, kept.dtype))
        with path.open("wb") as file:
            np.save(file, kept.numpy(), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        meta["arrays"][name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _of(name: str, key: Any, number: int) -> str:
    """The name of an array of one type of edges."""
    return name if key[0] is ONE else f"{name}-{number}"


def _attributes(data: Data | HeteroData) -> Iterator[tuple[str, str, Any, str, Any]]:
    """Yield the place, name, value, role and type of every attribute but edge_index."""
    one = ONE, "to", ONE
    if isinstance(data, Data):
        places: list[tuple[str, Any, Any, Any]] = [("data", data, ONE, one)]
    else:
        places = [("graph", data.stores[0], ..., ...)]
        places += [(f"nodes{i}", data[k], k, ...) for i, k in enumerate(data.node_types)]
        places += [(f"edges{i}", data[k], ..., k) for i, k in enumerate(data.edge_types)]
    for place, store, nodes, edges in places:
        for name, value in (data.to_dict() if store is data else store).items():
            if name in ("edge_index", "num_nodes"):
                continue
            if nodes is not ... and store.is_node_attr(name):
                yield place, name, value, "node", nodes
            elif edges is not ... and store.is_edge_attr(name) and not holds_ids(name):
                yield place, name, value, "edge", edges
            else:
                yield place, name, value, "graph", None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Stored:
    """A folder that was looked at: every array is there, of the size that ``meta.json`` tells.

    Args:
        folder: that :func:`save` made.
        verify: also compare the checksum of every file, which reads them all.

    Raises:
        FolderError: for any other folder.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        path = self.folder / "meta.json"
        if not path.is_file():
            raise FolderError(f"{self.folder} is no stored graph: it has no meta.json")
        try:
            meta = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FolderError(f"{path} is damaged: {error}") from error
        if not isinstance(meta, Mapping) or meta.get("format") != FORMAT:
            raise FolderError(f"{path} is of another format than '{FORMAT}'")
        if meta.get("version") != VERSION:
            raise FolderError(
                f"{path} has version {meta.get('version')}; this is version {VERSION}"
            )
        try:
            self.nodes = {key: int(n) for key, n in meta["nodes"]}
            self.edges = {(a, name, b): int(n) for a, name, b, n in meta["edges"]}
            self.attributes: list[list[str]] = meta["attributes"]
            self.arrays = dict(meta["arrays"])
            expected = {_ORDER: [sum(self.nodes.values())]}
            for i, (key, n) in enumerate(self.edges.items()):
                expected |= {_of(_ROWPTR, key, i): [self.nodes[key[2]] + 1], _of(_COL, key, i): [n]}
            shapes = {name: list(entry["shape"]) for name, entry in self.arrays.items()}
            for name, entry in self.arrays.items():
                self._look(name, entry, verify)
            for place, name, role in self.attributes:
                self._type(place, role)
                expected[f"{place}-{name}"] = shapes[f"{place}-{name}"]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise FolderError(f"{path} is damaged: it lacks {error}") from error
        if any(shapes.get(name) != shape for name, shape in expected.items()):
            raise FolderError(f"{path} is damaged: its arrays do not fit one another")
        self.facts = {"folder": hashlib.sha256(json.dumps(meta).encode()).hexdigest()[:16]}

    def _look(self, name: str, entry: Mapping[str, Any], verify: bool) -> None:
        path = self.folder / f"{name}.npy"
        if Path(name).name != name or not path.is_file():
            raise FolderError(f"{self.folder} lacks {path.name}")
        if path.stat().st_size != entry["bytes"]:
            raise FolderError(f"{path} has {path.stat().st_size} bytes, not {entry['bytes']}: "
                              "it is cut off, or of another graph")  # fmt: skip
        found = self._map(name)
        if list(found.shape) != entry["shape"] or _stored_dtype(entry) != str(found.dtype):
            raise FolderError(f"{path} holds {found.dtype} {list(found.shape)}, not "
                              f"{entry['dtype']} {entry['shape']}")  # fmt: skip
        if verify and _sha256(path) != entry["sha256"]:
            raise FolderError(f"{path} is damaged: its checksum is another one")

    def _map(self, name: str) -> Any:
        path = self.folder / f"{name}.npy"
        try:  # "c": torch wants memory that may be written, and nothing writes
            return np.load(path, mmap_mode="c", allow_pickle=False)
        except ValueError as error:
            raise FolderError(f"{path} is no array of numpy: {error}") from error

    def array(self, name: str) -> Tensor:
        """Return an array as a tensor on the file; what is read of it is loaded."""
        dtype = getattr(torch, self.arrays[name]["dtype"])
        found = self._map(name)
        return (
            torch.from_numpy(found).view(dtype)
            if found.size
            else torch.empty(self.arrays[name]["shape"], dtype=dtype)
        )

    def partitions(self, ranks: int) -> Types:
        """Return who owns what, for any number of ranks."""
        order = self.array(_ORDER)
        work = torch.zeros(order.numel(), dtype=torch.int64)  # edges of the node at every place
        first = begins(self.nodes)
        for i, key in enumerate(self.edges):
            degrees = self.array(_of(_ROWPTR, key, i)).diff()
            if key[0] is ONE:
                work = degrees
            else:
                begin = first[key[2]]
                work[(order >= begin) & (order < begin + self.nodes[key[2]])] += degrees
        return by_type(Partition(order, cut(work, ranks)), self.nodes)

    def part(
        self, types: Types, rank: int, whole: Callable[[str], bool]
    ) -> tuple[Data | HeteroData, dict[Any, tuple[Tensor, Tensor]]]:
        """Read what a rank owns.

        Args:
            types: who owns what.
            rank: whose part.
            whole: tells by name whether an attribute of nodes is read for all of them, in the
                order of the data that was saved.

        Returns:
            The attributes; of each type of edges the sources, as places in the order of their type,
            and the targets, counted from the first node of the rank.
        """
        data = Data() if ONE in self.nodes else HeteroData()
        edges: dict[Any, tuple[Tensor, Tensor]] = {}
        ranges: dict[Any, tuple[int, int]] = {}
        for key, part in types.items():
            ranges[key] = int(part.cuts[rank]), int(part.cuts[rank + 1])
            store_of(data, key).num_nodes = self.nodes[key]
        for i, key in enumerate(self.edges):
            low, high = ranges[key[2]]
            ptr = self.array(_of(_ROWPTR, key, i))[low : high + 1].clone()
            first, last = ranges[key] = int(ptr[0]), int(ptr[-1])
            targets = torch.repeat_interleave(torch.arange(high - low), ptr.diff())
            edges[key] = self.array(_of(_COL, key, i))[first:last].clone(), targets
            store_of(data, key).edge_index = None
        for place, name, role in self.attributes:
            stored = self.array(f"{place}-{name}")
            key = self._type(place, role)
            if role == "node" and whole(name):
                value = torch.empty_like(stored)
                value[types[key].order] = stored
            else:
                value = stored[slice(*ranges[key])].clone() if role != "graph" else stored.clone()
            setattr(data if key is None else store_of(data, key), name, value)
        return data, edges

    def _type(self, place: str, role: str) -> Any:
        """The type of nodes or edges that an attribute is at."""
        if place in ("data", "graph"):
            return (ONE, "to", ONE) if role == "edge" else ONE
        known: Any = self.nodes if place.startswith("nodes") else self.edges
        return list(known)[int(place[5:])]


def _stored_dtype(entry: Mapping[str, Any]) -> str:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return str(_WITHOUT_NUMPY.get(dtype, dtype)).removeprefix("torch.")


def load(folder: str | Path, *, verify: bool = False) -> Data | HeteroData:
    """Return the graph that :func:`save` stored, in one piece: nodes as they were, edges by target.

    Args:
        folder: that :func:`save` made.
        verify: also compare the checksum of every file.

    Raises:
        FolderError: for any other folder, and files that are damaged or cut off.
    """
    stored = Stored(folder, verify=verify)
    types = stored.partitions(1)
    data, edges = stored.part(types, 0, lambda name: True)
    for key, (sources, targets) in edges.items():
        ends = [types[key[0]].order[sources.long()], types[key[2]].order[targets]]
        store_of(data, key).edge_index = torch.stack(ends).to(sources.dtype)
    return data
