"""A graph in a folder, from which every rank reads its part.

The folder has ``meta.json`` and numpy arrays, which are read as memory maps; pickle is not used.
Nodes are in the order of the partition and edges are sorted by target, so the part of a rank is a
range of every array, for any number of ranks.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_accel.distributed import partition as parts
from pyg_accel.distributed.partition import ONE, Partition, Types, edge_stores, store_of
from pyg_accel.distributed.partitioners import method_reasons
from pyg_accel.distributed.suitability import data_reasons
from pyg_accel.errors import FolderError, NotDistributable

__all__ = ["Stored", "holds_ids", "load", "save"]

FORMAT, VERSION = "pyg_accel graph", 3
_META = "meta.json"
_ORDER, _ROWPTR, _COL = "order", "rowptr", "col"
_NAME = re.compile(r"[\w-]{1,80}", re.ASCII)  # names of arrays that are valid names of files
_FILE = re.compile(r"(arrays-\w+/)?[^/]+[.]npy", re.ASCII)


def save(
    data: Data | HeteroData,
    folder: str | Path,
    *,
    partition: str | Tensor = "community",
    overwrite: bool = False,
) -> None:
    """Write a graph to a folder that :func:`distribute` accepts as data.

    One process calls it. The folder appears when it is complete; an error leaves no folder, or the
    previous graph.

    Args:
        data: with a plain edge_index, or one per edge type.
        folder: the folder to create.
        partition: an order of :func:`pyg_accel.reorder`, ``"given"``, or an order [N] of the
            nodes, numbered type by type if there are several types.
        overwrite: replace the graph in a folder that :func:`save` created. Other files in it stay.

    Raises:
        FolderError: if the folder exists already, or has other contents.
        NotDistributable: for data that cannot be cut or stored.
    """
    reasons = data_reasons(data)
    if isinstance(partition, str):
        reasons += method_reasons(partition)
        if partition == "metis":
            reasons.append(f"partition='{partition}' cuts for one number of ranks, and a folder "
                           "serves any: pass an order")  # fmt: skip
    if reasons:
        raise NotDistributable("; ".join(reasons))
    folder = Path(folder)
    old = _files_to_replace(folder, overwrite) if os.path.lexists(folder) else None
    # The arrays of a graph that replaces another lie in a new folder inside of the old one. Moving
    # the new meta.json, which names them, replaces the graph in one step.
    mark = f"arrays-{secrets.token_hex(4)}"
    beside = folder.with_name(f".{folder.name}.{mark}") if old is None else folder / mark
    beside.mkdir(parents=True)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, beside, ignore_errors=True)
        _write(data, beside, "" if old is None else f"{mark}/", partition)
        if old is None:
            os.replace(beside, folder)
        else:
            os.replace(beside / _META, folder / _META)
        undo.pop_all()
    for path in old or ():
        path.unlink(missing_ok=True)
        with suppress(OSError):  # it has other files, or is the folder itself
            path.parent.rmdir()


def _files_to_replace(folder: Path, overwrite: bool) -> list[Path]:
    """Return the arrays that :func:`save` wrote to a folder."""
    if not overwrite:
        raise FolderError(f"{folder} exists already: overwrite=True replaces a stored graph")
    try:
        meta = _meta_of(folder)
        names = [entry.get("file", f"{name}.npy") for name, entry in meta["arrays"].items()]
        if not all(map(_FILE.fullmatch, names)):
            raise FolderError(f"{folder / _META} names files outside of its folder")
    except (FolderError, AttributeError, KeyError, TypeError) as error:
        raise FolderError(f"{folder} exists already and is not a stored graph: {error}") from error
    return [folder / name for name in names]


def _meta_of(folder: Path) -> dict[str, Any]:
    """Return the content of ``meta.json``, of any version."""
    path = folder / _META
    if not path.is_file():
        raise FolderError(f"{folder} is no stored graph: it has no {_META}")
    try:
        meta = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is damaged: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FolderError(f"{path} is of another format than '{FORMAT}'")
    return meta


def _write(data: Data | HeteroData, folder: Path, prefix: str, method: str | Tensor) -> None:
    """Write arrays and meta.json; ``prefix`` is the path of the folder relative to the graph."""
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
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or value.layout is not torch.strided or value.is_quantized:
                kind = f"{value.dtype} {value.layout}" if is_tensor else type(value).__name__
                raise NotDistributable(f"'{name}' is a {kind}: a folder stores dense tensors")
            if role != "graph" and data.__cat_dim__(name, value) != 0:
                raise NotDistributable(f"'{name}' does not have {role}s in its first dimension")
            rows = slice(None) if role == "graph" else orders[keys[role]]
            value = value.detach().cpu().resolve_conj().resolve_neg()
            array = value.view(_stored_as(value.dtype))  # torch cannot index every dtype
            arrays[f"{place}-{name}"] = array[rows].view(value.dtype) if value.dim() else value
            attributes.append([place, name, role])
    files = {n: f"{n if _NAME.fullmatch(n) else f'array-{i}'}.npy" for i, n in enumerate(arrays)}
    meta: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "nodes": list(sizes.items()),
        "edges": [[*key, orders[key].numel()] for key in edge_stores(data)],
        "attributes": attributes,
        "arrays": {
            name: {"file": prefix + files[name], **_saved(folder / files[name], tensor)}
            for name, tensor in arrays.items()
        },
    }  # fmt: skip
    text = json.dumps(meta | {"sha256": _digest(meta)}, indent=1)
    _write_file(folder / _META, lambda file: file.write(text.encode()))


def _write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _digest(meta: Mapping[str, Any]) -> str:
    """Return the checksum of meta.json without its last entry, the checksum."""
    content = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _stored_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an array in a file: numpy lacks bfloat16, float8 and others."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return getattr(torch, f"int{8 * dtype.itemsize}")  # type: ignore[no-any-return]
    return dtype


def _saved(path: Path, tensor: Tensor) -> dict[str, Any]:
    """Write an array and return its entry in ``meta.json``."""
    array = tensor.contiguous().view(_stored_as(tensor.dtype)).numpy()
    _write_file(path, lambda file: np.save(file, array, allow_pickle=False))
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
    """Return whether an attribute has ids: its length may equal the number of nodes by chance."""
    return "index" in name


def _sha256(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()


class Stored:
    """A folder that :func:`save` created, with all arrays of the sizes in ``meta.json``.

    Args:
        folder: the folder.
        verify: the numbers of the arrays to read and compare with their checksums.

    Raises:
        FolderError: for any other folder.
    """

    def __init__(self, folder: str | Path, verify: slice = slice(None)) -> None:
        self.folder = Path(folder)
        path, meta = self.folder / _META, _meta_of(self.folder)
        if meta.get("version") != VERSION:
            raise FolderError(f"{path} is of another format than version {VERSION} of '{FORMAT}': "
                              f"version {meta.get('version')}; save the graph again")  # fmt: skip
        try:
            self._read(meta, verify)
        except FolderError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise FolderError(f"{path} is damaged: {error}") from error
        if meta.get("sha256") != (digest := _digest(meta)):
            raise FolderError(f"{path} is damaged: its checksum differs")
        self.facts = {"folder": digest[:16]}

    def _read(self, meta: Mapping[str, Any], verify: slice) -> None:
        self.nodes = {key: int(n) for key, n in meta["nodes"]}
        self.edges = {(a, name, b): int(n) for a, name, b, n in meta["edges"]}
        self.attributes: list[list[str]] = meta["attributes"]
        self.arrays = dict(meta["arrays"])
        verified = [*self.arrays][verify]
        for name, entry in self.arrays.items():
            self._look(name, entry, name in verified)
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
        """Return a data set with the node and edge types, without attributes."""
        data = Data() if ONE in self.nodes else HeteroData()
        for key, size in self.nodes.items():
            store_of(data, key).num_nodes = size
        for key in self.edges:
            store_of(data, key).edge_index = None
        return data

    def _look(self, name: str, entry: Mapping[str, Any], verify: bool) -> None:
        path = self.folder / entry["file"]
        if not _FILE.fullmatch(entry["file"]) or not path.is_file():
            raise FolderError(f"{self.folder} lacks {entry['file']}")
        if path.stat().st_size != entry["bytes"]:
            raise FolderError(f"{path} has {path.stat().st_size} bytes, not {entry['bytes']}: "
                              "it is cut off, or of another graph")  # fmt: skip
        array = self._map(name)
        dtype = getattr(torch, entry["dtype"])
        expected = str(_stored_as(dtype)).removeprefix("torch.")
        if list(array.shape) != entry["shape"] or expected != str(array.dtype):
            raise FolderError(f"{path} holds {array.dtype} {list(array.shape)}, not "
                              f"{entry['dtype']} {entry['shape']}")  # fmt: skip
        if verify and _sha256(path) != entry["sha256"]:
            raise FolderError(f"{path} is damaged: its checksum differs")

    def _map(self, name: str) -> Any:
        path = self.folder / self.arrays[name]["file"]
        try:  # "c", copy on write: torch warns about memory that cannot be written
            return np.load(path, mmap_mode="c", allow_pickle=False)
        except (EOFError, SyntaxError, TokenError, ValueError) as error:
            raise FolderError(f"{path} is no array of numpy: {error}") from error

    def array(self, name: str) -> Tensor:
        """Return an array as a memory-mapped tensor with its dtype in the file."""
        array = self._map(name)
        if not array.size:  # no memory to map
            return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
        return torch.from_numpy(array)

    def _require(self, name: str, what: str, condition: Tensor | bool) -> None:
        if not condition:
            file = self.arrays[name]["file"]
            raise FolderError(f"{self.folder / file} is damaged: expected {what}")

    def partitions(self, ranks: int) -> Types:
        """Return the partition of each node type, for any number of ranks."""
        order = self.array(_ORDER)
        work = torch.zeros_like(order)  # edges into the node at every position
        nodes = torch.arange(order.numel())
        self._require(_ORDER, "every node once", torch.equal(order.sort().values, nodes))
        first = parts.begins(self.nodes)
        for i, key in enumerate(self.edges):
            low = first[key[2]]
            targets = (order >= low) & (order < low + self.nodes[key[2]])
            ptr = self.array(name := _of(_ROWPTR, key, i))
            ascends = (ptr.diff() >= 0).all() & (ptr[0] == 0) & (ptr[-1] == self.edges[key])
            self._require(name, f"numbers that ascend from 0 to {self.edges[key]}", ascends)
            work[targets] += ptr.diff()
        return parts.by_type(Partition(order, parts.cut(work, ranks)), self.nodes)

    def part(
        self, types: Types, rank: int, whole: Callable[[str], bool]
    ) -> tuple[Data | HeteroData, dict[Any, tuple[Tensor, Tensor]]]:
        """Read the part of a rank.

        Args:
            types: the partition of each node type.
            rank: the rank.
            whole: returns by name whether to read an attribute of nodes for all nodes, in the
                order of the saved data.

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
            col = self.array(name := _of(_COL, key, i))[ranges[key]].clone()
            inside = ((col >= 0) & (col < self.nodes[key[0]])).all()
            self._require(name, f"nodes below {self.nodes[key[0]]}", inside)
            edges[key] = col, targets
        places = _places(data)
        for place, name, role in self.attributes:
            stored, (store, keys) = self.array(f"{place}-{name}"), places[place]
            if role == "node" and whole(name):
                value = stored[types[keys[role]].positions()]
            else:
                value = (stored if role == "graph" else stored[ranges[keys[role]]]).clone()
            store[name] = value.view(getattr(torch, self.arrays[f"{place}-{name}"]["dtype"]))
        return data, edges


def load(folder: str | Path, *, verify: bool = True) -> Data | HeteroData:
    """Return the whole graph that :func:`save` stored: nodes in the user's order, edges by target.

    Args:
        folder: that :func:`save` created.
        verify: compare the checksum of every array.

    Raises:
        FolderError: for any other folder, and for damaged or truncated files.
    """
    stored = Stored(folder, slice(None) if verify else slice(0))
    types = stored.partitions(1)
    data, edges = stored.part(types, 0, lambda name: True)
    for key, (sources, targets) in edges.items():
        ends = [types[key[0]].order[sources.long()], types[key[2]].order[targets]]
        store_of(data, key).edge_index = torch.stack(ends).to(sources.dtype)
    return data
