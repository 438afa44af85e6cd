"""A graph in a folder, of which every rank reads its own part.

``meta.json`` and arrays of numpy, read as memory maps; no pickle is written or read. Nodes are in
the order that is cut, edges by target, so the part of a rank is a range of every array, for any
number of ranks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_accel.distributed.partition import Partition, cut
from pyg_accel.distributed.suitability import data_reasons
from pyg_accel.errors import FolderError, NotDistributable
from pyg_accel.graph import Graph
from pyg_accel.reordering.orders import order_of

__all__ = ["Stored", "load", "save"]

FORMAT, VERSION = "pyg_accel graph", 1
_ORDER, _ROWPTR, _COL = "order", "rowptr", "col"
_WITHOUT_NUMPY = {torch.bfloat16: torch.int16}  # is stored as


def save(
    data: Data,
    folder: str | Path,
    *,
    partition: str | Tensor = "community",
    overwrite: bool = False,
) -> None:
    """Write a graph to a folder that :func:`distribute` takes in place of the data.

    One process calls it. The folder appears when it is complete; a full disk leaves none.

    Args:
        data: with a plain edge_index.
        folder: to make.
        partition: an order that :func:`pyg_accel.reorder` knows, ``"given"``, or an order [N].
        overwrite: replace a folder that :func:`save` made before.

    Raises:
        FolderError: if the folder exists already.
        NotDistributable: for data that cannot be cut.
    """
    if not isinstance(data, Data):
        raise NotDistributable(f"expected one Data (got {type(data).__name__})")
    if reasons := data_reasons(data):
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


def _write(data: Data, folder: Path, partition: str | Tensor) -> None:
    size = int(data.num_nodes or 0)
    given = data.edge_index
    assert given is not None  # data_reasons has looked
    edges = given.cpu()
    if isinstance(partition, str) and partition == "given":
        order = torch.arange(size)
    else:
        order = order_of(Graph.from_edge_index(edges.contiguous(), (size, size)), partition).cpu()
    places = torch.empty_like(order)
    places[order] = torch.arange(size)
    targets = places[edges[1].long()]
    by_target = torch.argsort(targets, stable=True)
    rowptr = torch.cat([targets.new_zeros(1), torch.bincount(targets, minlength=size).cumsum(0)])
    col = places[edges[0].long()][by_target].to(edges.dtype)
    arrays = {_ORDER: order, _ROWPTR: rowptr, _COL: col}
    roles: dict[str, str] = {}
    for name, value in data.to_dict().items():
        if name == "edge_index" or not isinstance(value, Tensor):
            if name not in ("edge_index", "num_nodes"):
                raise NotDistributable(f"'{name}' is a {type(value).__name__}: a folder stores "
                                       "tensors")  # fmt: skip
            continue
        roles[name] = (
            "node"
            if data.is_node_attr(name)
            else "edge"
            if data.is_edge_attr(name) and "index" not in name
            else ("graph")
        )
        if roles[name] != "graph" and data.__cat_dim__(name, value) != 0:
            raise NotDistributable(f"'{name}' does not have nodes or edges in its first dimension")
        picked = {"node": order, "edge": by_target}.get(roles[name])
        arrays[f"data-{name}"] = value.cpu() if picked is None else value.cpu()[picked]
    meta: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "nodes": size, "edges": edges.size(1),
        "roles": roles, "arrays": {},
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
            self.nodes, self.edges = int(meta["nodes"]), int(meta["edges"])
            self.roles, self.arrays = dict(meta["roles"]), dict(meta["arrays"])
            expected = {_ORDER: [self.nodes], _ROWPTR: [self.nodes + 1], _COL: [self.edges]}
            shapes = {name: list(entry["shape"]) for name, entry in self.arrays.items()}
            for name, entry in self.arrays.items():
                self._look(name, entry, verify)
        except (AttributeError, KeyError, TypeError) as error:
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

    def partition(self, ranks: int) -> Partition:
        """Return who owns what, for any number of ranks."""
        return Partition(self.array(_ORDER), cut(self.array(_ROWPTR).diff(), ranks))

    def part(self, part: Partition, rank: int, whole: Any) -> tuple[Data, Tensor, Tensor]:
        """Read what a rank owns.

        Args:
            part: who owns what.
            rank: whose part.
            whole: tells by name whether an attribute of nodes is read for all of them, in the
                order of the data that was saved.

        Returns:
            The attributes; the sources of its edges, as places in the order; their targets, counted
            from its first node.
        """
        low, high = int(part.cuts[rank]), int(part.cuts[rank + 1])
        ptr = self.array(_ROWPTR)[low : high + 1].clone()
        first, last = int(ptr[0]), int(ptr[-1])
        data = Data()
        for name, role in self.roles.items():
            stored = self.array(f"data-{name}")
            if role == "node" and whole(name):
                value = torch.empty_like(stored)
                value[part.order] = stored
            elif role == "node":
                value = stored[low:high].clone()
            else:
                value = stored[first:last].clone() if role == "edge" else stored.clone()
            data[name] = value
        targets = torch.repeat_interleave(torch.arange(high - low), ptr.diff())
        return data, self.array(_COL)[first:last].clone(), targets


def _stored_dtype(entry: Mapping[str, Any]) -> str:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return str(_WITHOUT_NUMPY.get(dtype, dtype)).removeprefix("torch.")


def load(folder: str | Path, *, verify: bool = False) -> Data:
    """Return the graph that :func:`save` stored, in one piece: nodes as they were, edges by target.

    Args:
        folder: that :func:`save` made.
        verify: also compare the checksum of every file.

    Raises:
        FolderError: for any other folder, and files that are damaged or cut off.
    """
    stored = Stored(folder, verify=verify)
    part = stored.partition(1)
    data, sources, targets = stored.part(part, 0, lambda name: True)
    order = part.order.clone()
    data.edge_index = torch.stack([order[sources.long()], order[targets]]).to(sources.dtype)
    data.num_nodes = stored.nodes
    return data
