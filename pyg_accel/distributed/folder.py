"""A graph in a folder, of which every rank reads its part.

The folder has ``meta.json`` and numpy arrays, which are read as memory maps; pickle is not used.
Nodes are in the order of the partition and edges are sorted by target, so the part of a rank is a
range of every array, for any number of ranks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed import partition as parts
from pyg_accel.distributed.partition import ONE, Partition, Types, edge_stores, store_of
from pyg_accel.distributed.partitioners import PARTITIONERS, method_reasons
from pyg_accel.distributed.suitability import data_reasons
from pyg_accel.errors import FolderError, NotDistributable

__all__ = ["Stored", "holds_ids", "load", "save"]

FORMAT, VERSION = "pyg_accel graph", 2
_ORDER, _ROWPTR, _COL = "order", "rowptr", "col"
_STORED_AS = {torch.bfloat16: torch.int16}  # dtypes that numpy does not have


def save(
    data: Data | HeteroData,
    folder: str | Path,
    *,
    partition: str | Tensor = "community",
    overwrite: bool = False,
) -> None:
    """Write a graph to a folder that :func:`distribute` takes in place of the data.

    One process calls it. The folder appears when it is complete; after an error there is none.

    Args:
        data: with a plain edge_index, or one per edge type.
        folder: the folder to create.
        partition: an order that :func:`pyg_accel.reorder` knows, ``"given"``, or an order [N] of
            the nodes, numbered type by type where there are several types.
        overwrite: replace a folder that :func:`save` created before.

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
        why = "and is not a stored graph" if overwrite else "overwrite=True replaces a stored graph"
        raise FolderError(f"{folder} exists already: {why}")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(data, temporary, partition)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(data: Data | HeteroData, folder: Path, method: str | Tensor) -> None:
    edges, sizes = parts.joined(data)
    size = sum(sizes.values())
    order = parts.partition(edges, size, 1, method).order.cpu()
    types = parts.by_type(Partition(order, torch.tensor([0, size])), sizes)
    arrays = {_ORDER: order}
    orders: dict[Any, Tensor] = {key: part.order for key, part in types.items()}
    for i, (key, store) in enumerate(edge_stores(data).items()):
        ends = store.edge_index.cpu()
        sources, targets = (types[key[2 * j]].positions()[ends[j].long()] for j in (0, 1))
        counts = torch.bincount(targets, minlength=sizes[key[2]])
        orders[key] = torch.argsort(targets, stable=True)
        arrays[_of(_ROWPTR, key, i)] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        arrays[_of(_COL, key, i)] = sources[orders[key]].to(ends.dtype)
    attributes = []
    for place, (store, keys) in _places(data).items():
        for name, value in store.items():
            if name in ("edge_index", "num_nodes"):
                continue
            role = "graph"
            if "node" in keys and store.is_node_attr(name):
                role = "node"
            elif "edge" in keys and store.is_edge_attr(name) and not holds_ids(name):
                role = "edge"
            if not isinstance(value, Tensor):
                raise NotDistributable(f"'{name}' is a {type(value).__name__}: a folder stores "
                                       "tensors")  # fmt: skip
            if role != "graph" and data.__cat_dim__(name, value) != 0:
                raise NotDistributable(f"'{name}' does not have {role}s in its first dimension")
            rows = slice(None) if role == "graph" else orders[keys[role]]
            arrays[f"{place}-{name}"] = value.cpu()[rows] if value.dim() else value.cpu()
            attributes.append([place, name, role])
    meta: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "nodes": list(sizes.items()),
        "edges": [[*key, orders[key].numel()] for key in edge_stores(data)],
        "attributes": attributes,
        "arrays": {name: _saved(folder / f"{name}.npy", tensor) for name, tensor in arrays.items()},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _saved(path: Path, tensor: Tensor) -> dict[str, Any]:
    """Write an array and return its entry in ``meta.json``."""
    stored = tensor.detach().contiguous()
    with path.open("wb") as file:
        stored = stored.view(_STORED_AS.get(stored.dtype, stored.dtype))
        np.save(file, stored.numpy(), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {
        "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."),
        "bytes": path.stat().st_size, "sha256": _sha256(path),
    }  # fmt: skip


def _of(name: str, key: Any, number: int) -> str:
    """Return the name of an array of one edge type."""
    return name if key[0] is ONE else f"{name}-{number}"


def _places(data: Data | HeteroData) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the stores by their names in ``meta.json``, with the node or edge type of each."""
    if isinstance(data, Data):
        return {"data": (data.stores[0], {"node": ONE, "edge": (ONE, "to", ONE)})}
    nodes, edges = enumerate(data.node_types), enumerate(data.edge_types)
    return (
        {"graph": (data.stores[0], {})}
        | {f"nodes{i}": (data[key], {"node": key}) for i, key in nodes}
        | {f"edges{i}": (data[key], {"edge": key}) for i, key in edges}
    )


def holds_ids(name: str) -> bool:
    """Return whether an attribute has ids, whose number may be that of nodes by chance."""
    return "index" in name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Stored:
    """A folder that :func:`save` created, with all arrays of the sizes in ``meta.json``.

    Args:
        folder: the folder.
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
            if [meta["format"], meta.get("version")] != [FORMAT, VERSION]:
                raise FolderError(
                    f"{path} is of another format than '{FORMAT}', version {VERSION}: "
                    f"'{meta['format']}', version {meta.get('version')}"
                )
            self._read(meta, verify)
        except FolderError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise FolderError(f"{path} is damaged: {error}") from error
        self.facts = {"folder": hashlib.sha256(json.dumps(meta).encode()).hexdigest()[:16]}

    def _read(self, meta: Mapping[str, Any], verify: bool) -> None:
        self.nodes = {key: int(n) for key, n in meta["nodes"]}
        self.edges = {(a, name, b): int(n) for a, name, b, n in meta["edges"]}
        self.attributes: list[list[str]] = meta["attributes"]
        self.arrays = dict(meta["arrays"])
        for name, entry in self.arrays.items():
            self._look(name, entry, verify)
        shapes = {_ORDER: [sum(self.nodes.values())]}
        for i, (key, n) in enumerate(self.edges.items()):
            shapes |= {_of(_ROWPTR, key, i): [self.nodes[key[2]] + 1], _of(_COL, key, i): [n]}
        places, sizes = _places(self._empty()), {"node": self.nodes, "edge": self.edges}
        for place, name, role in self.attributes:
            shape = self.arrays[f"{place}-{name}"]["shape"]
            rows = [] if role == "graph" else [sizes[role][places[place][1][role]]]
            shapes[f"{place}-{name}"] = rows + shape[len(rows) :]
        if any(self.arrays[name]["shape"] != shape for name, shape in shapes.items()):
            raise FolderError(f"{self.folder} is damaged: its arrays do not fit one another")

    def _empty(self) -> Data | HeteroData:
        """Return a data set of these types, without attributes."""
        data = Data() if ONE in self.nodes else HeteroData()
        for key, size in self.nodes.items():
            store_of(data, key).num_nodes = size
        for key in self.edges:
            store_of(data, key).edge_index = None
        return data

    def _look(self, name: str, entry: Mapping[str, Any], verify: bool) -> None:
        path = self.folder / f"{name}.npy"
        if Path(name).name != name or not path.is_file():
            raise FolderError(f"{self.folder} lacks {path.name}")
        if path.stat().st_size != entry["bytes"]:
            raise FolderError(f"{path} has {path.stat().st_size} bytes, not {entry['bytes']}: "
                              "it is cut off, or of another graph")  # fmt: skip
        array = self._map(name)
        dtype = getattr(torch, entry["dtype"])
        expected = str(_STORED_AS.get(dtype, dtype)).removeprefix("torch.")
        if list(array.shape) != entry["shape"] or expected != str(array.dtype):
            raise FolderError(f"{path} holds {array.dtype} {list(array.shape)}, not "
                              f"{entry['dtype']} {entry['shape']}")  # fmt: skip
        if verify and _sha256(path) != entry["sha256"]:
            raise FolderError(f"{path} is damaged: its checksum differs")

    def _map(self, name: str) -> Any:
        path = self.folder / f"{name}.npy"
        try:  # "c", copy on write: torch warns about memory that cannot be written
            return np.load(path, mmap_mode="c", allow_pickle=False)
        except ValueError as error:
            raise FolderError(f"{path} is no array of numpy: {error}") from error

    def array(self, name: str) -> Tensor:
        """Return an array as a tensor on the file; only what is read of it is loaded."""
        array, dtype = self._map(name), getattr(torch, self.arrays[name]["dtype"])
        if not array.size:  # has no memory to map
            return torch.empty(array.shape, dtype=dtype)
        return torch.from_numpy(array).view(dtype)

    def partitions(self, ranks: int) -> Types:
        """Return the partition of each node type, for any number of ranks."""
        order = self.array(_ORDER)
        work = torch.zeros(
            order.numel(), dtype=torch.int64
        )  # edges into the node at every position
        first = parts.begins(self.nodes)
        for i, key in enumerate(self.edges):
            low = first[key[2]]
            targets = (order >= low) & (order < low + self.nodes[key[2]])
            work[targets] += self.array(_of(_ROWPTR, key, i)).diff()
        return parts.by_type(Partition(order, parts.cut(work, ranks)), self.nodes)

    def part(
        self, types: Types, rank: int, whole: Callable[[str], bool]
    ) -> tuple[Data | HeteroData, dict[Any, tuple[Tensor, Tensor]]]:
        """Read the part of a rank.

        Args:
            types: the partition of each node type.
            rank: the rank.
            whole: returns by name whether an attribute of nodes is read for all of them, in the
                order of the data that was saved.

        Returns:
            The attributes; and by edge type the sources, as positions in the order of their type,
            and the targets, counted from the first node of the rank.
        """
        data = self._empty()
        edges: dict[Any, tuple[Tensor, Tensor]] = {}
        ranges = {key: slice(*p.cuts[rank : rank + 2].tolist()) for key, p in types.items()}
        for i, key in enumerate(self.edges):
            rows = ranges[key[2]]
            ptr = self.array(_of(_ROWPTR, key, i))[rows.start : rows.stop + 1]
            ranges[key] = slice(int(ptr[0]), int(ptr[-1]))
            targets = torch.repeat_interleave(torch.arange(rows.stop - rows.start), ptr.diff())
            edges[key] = self.array(_of(_COL, key, i))[ranges[key]].clone(), targets
        places = _places(data)
        for place, name, role in self.attributes:
            stored, (store, keys) = self.array(f"{place}-{name}"), places[place]
            if role == "node" and whole(name):
                store[name] = torch.empty_like(stored)
                store[name][types[keys[role]].order] = stored
            else:
                store[name] = (stored if role == "graph" else stored[ranges[keys[role]]]).clone()
        return data, edges


def load(folder: str | Path, *, verify: bool = False) -> Data | HeteroData:
    """Return the whole graph that :func:`save` stored: nodes in the user's order, edges by target.

    Args:
        folder: that :func:`save` created.
        verify: also compare the checksum of every file.

    Raises:
        FolderError: for any other folder, and for damaged or truncated files.
    """
    stored = Stored(folder, verify=verify)
    types = stored.partitions(1)
    data, edges = stored.part(types, 0, lambda name: True)
    for key, (sources, targets) in edges.items():
        ends = [types[key[0]].order[sources.long()], types[key[2]].order[targets]]
        store_of(data, key).edge_index = torch.stack(ends).to(sources.dtype)
    return data
