"""Folders of stored graphs: what save() replaces, and what load() refuses."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN

import pyg_accel
from pyg_accel import distributed
from pyg_accel.distributed import folder as format_
from pyg_accel.errors import FolderError, NotDistributable

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize")


def graph(nodes: int = 30, seed: int = 2) -> Data:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, 90), generator=generator)
    return Data(x=torch.randn(nodes, 4, generator=generator), edge_index=edge_index)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


MINE = {
    "no meta.json": None,
    "another format": '{"mine": 1}',
    "a list": "[1, 2]",
    "no JSON": "my notes",
    "deep JSON": "[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "no arrays": '{"format": "pyg_accel graph"}',
    "arrays in a list": '{"format": "pyg_accel graph", "arrays": [1]}',
    "files elsewhere": '{"format": "pyg_accel graph", "arrays": {"x": {"file": "../thesis.npy"}}}',
    "files elsewhere, version 2": '{"format": "pyg_accel graph", "arrays": {"../thesis": {}}}',
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", MINE)
def test_a_folder_that_save_did_not_create_stays(tmp_path, what, overwrite):
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "thesis.npy").write_text("x")
    (folder / "thesis.txt").write_text("x")
    if (text := MINE[what]) is not None:
        (folder / "meta.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = files(tmp_path)
    with pytest.raises(FolderError, match="exists already"):
        distributed.save(graph(), folder, overwrite=overwrite)
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "link to nothing", "empty"])
def test_what_is_no_folder_of_a_graph_stays(tmp_path, kind):
    path = tmp_path / "mine"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nothing")
    for overwrite in (False, True):
        with pytest.raises(FolderError, match="exists already"):
            distributed.save(graph(), path, overwrite=overwrite)
    assert os.path.lexists(path) and len(files(tmp_path)) == 1


def test_overwriting_replaces_the_graph_alone(tmp_path):
    folder = tmp_path / "stored"
    distributed.save(graph(), folder)
    (folder / "thesis.txt").write_text("x")
    (folder / "plots").mkdir()
    for seed in (3, 4):
        new = graph(40, seed)
        distributed.save(new, folder, overwrite=True)
        assert torch.equal(distributed.load(folder).x, new.x)
    assert (folder / "thesis.txt").read_text() == "x"
    meta = json.loads((folder / "meta.json").read_text())
    arrays = {entry["file"] for entry in meta["arrays"].values()}
    homes = {str(Path(name).parent) for name in arrays}
    assert {*files(folder)} == {"meta.json", "thesis.txt", "plots"} | arrays | homes
    assert [p.name for p in tmp_path.iterdir()] == ["stored"]


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path):
    distributed.save(graph(), tmp_path / "stored")
    (tmp_path / "link").symlink_to(tmp_path / "stored")
    new = graph(seed=5)
    distributed.save(new, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(distributed.load(tmp_path / "stored").x, new.x)


def test_a_folder_of_an_older_version_can_be_replaced(tmp_path):
    folder = tmp_path / "stored"
    distributed.save(graph(), folder)
    meta = json.loads((folder / "meta.json").read_text())
    for entry in meta["arrays"].values():
        del entry["file"]
    (folder / "meta.json").write_text(json.dumps(meta | {"version": 2}))
    with pytest.raises(FolderError, match="version 2; save the graph again"):
        distributed.load(folder)
    distributed.save(graph(seed=3), folder, overwrite=True)
    assert torch.equal(distributed.load(folder).x, graph(seed=3).x)
    assert not (folder / "col.npy").exists()


def stops_at(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step of save() fail."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    where = {"array": (np, "save"), "meta": (json, "dumps"), "in place": (os, "replace")}
    monkeypatch.setattr(*where[step], fail)


@pytest.mark.parametrize("step", ["array", "meta", "in place"])
@pytest.mark.parametrize("there", [False, True])
def test_the_graph_from_before_survives_an_error(tmp_path, monkeypatch, step, there):
    folder = tmp_path / "stored"
    if there:
        distributed.save(graph(), folder)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        stops_at(step, patch)
        with pytest.raises(KeyboardInterrupt):
            distributed.save(graph(seed=3), folder, overwrite=True)
    assert files(tmp_path) == before
    if there:
        assert torch.equal(distributed.load(folder).x, graph().x)


def test_a_graph_can_replace_the_one_it_was_loaded_from(tmp_path):
    distributed.save(graph(), tmp_path / "stored")
    data = distributed.load(tmp_path / "stored")
    data.x += 1
    distributed.save(data, tmp_path / "stored", overwrite=True)
    assert torch.equal(distributed.load(tmp_path / "stored").x, graph().x + 1)


def put(folder: Path, name: str, place: int, value: int) -> None:
    array = np.load(folder / f"{name}.npy")
    array[place] = value
    np.save(folder / f"{name}.npy", array)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


VALUES = [
    ("col", 5, 10**9), ("col", 5, -1), ("col", 0, 30), ("rowptr", 5, -5), ("rowptr", 0, 1),
    ("rowptr", 30, 89), ("rowptr", 3, 10**12), ("order", 5, 7), ("order", 5, 10**12),
    ("order", 5, -1), ("data-x", 3, 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value"), VALUES)
def test_arrays_with_other_values_are_refused(tmp_path, name, place, value):
    distributed.save(graph(), tmp_path / "stored", partition="given")
    put(tmp_path / "stored", name, place, value)
    with pytest.raises(FolderError, match=f"{name}.npy is damaged: its checksum"):
        distributed.load(tmp_path / "stored")
    if name != "data-x":  # without checksums, what a graph cannot have is refused nevertheless
        with pytest.raises(FolderError, match=f"{name}.npy is damaged: expected"):
            distributed.load(tmp_path / "stored", verify=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": [[None, 30], ["x", 0]]},
        {"nodes": [["x", 30]]},
        {"nodes": []},
        {"nodes": [[None, -1], ["x", 31]]},
        {"nodes": [[None, 1e400]]},
        {"nodes": None},
        {"edges": [[None, "to", None, 91]]},
        {"edges": []},
        {"edges": [["a", "to", None, 90]]},
        {"attributes": []},
        {"attributes": [["data", "x", "edge"]]},
        {"attributes": [["nodes7", "x", "node"]]},
        {"attributes": [["data", "x", "graph"]]},
        {"arrays": {}},
        {"arrays": [["order"]]},
        {"arrays": {"order": {"file": "../order.npy"}}},
        {"arrays": {"order": {"file": "../stored/order.npy", "bytes": 368}}},
        {"sha256": ""},
        {"version": "3"},
    ],
    ids=str,
)
def test_other_facts_are_refused(tmp_path, changes):
    distributed.save(graph(), tmp_path / "stored")
    edit(tmp_path / "stored", **changes)
    for verify in (True, False):
        with pytest.raises(FolderError):
            distributed.load(tmp_path / "stored", verify=verify)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"", b"null", b'"x"', b"{}"], ids=len)
def test_other_content_of_meta_json_is_refused(tmp_path, content):
    distributed.save(graph(), tmp_path / "stored")
    (tmp_path / "stored" / "meta.json").write_bytes(content)
    with pytest.raises(FolderError):
        distributed.load(tmp_path / "stored")


def test_any_flipped_bit_is_refused(tmp_path):
    distributed.save(graph(8), tmp_path / "stored")
    generator = torch.Generator().manual_seed(0)
    for name in ("order", "rowptr", "col", "data-x"):  # in half of the cases, in its header
        path = tmp_path / "stored" / f"{name}.npy"
        content = path.read_bytes()
        for place in torch.randint(len(content), (12,), generator=generator).tolist():
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << place % 8
            path.write_bytes(spoilt)
            with pytest.raises(FolderError):
                distributed.load(tmp_path / "stored")
        path.write_bytes(content)
    distributed.load(tmp_path / "stored")


def test_each_array_is_verified_by_one_rank(tmp_path, monkeypatch):
    distributed.save(graph(), tmp_path / "stored")
    read: list[str] = []
    sha256 = format_._sha256
    monkeypatch.setattr(format_, "_sha256", lambda p: read.append(p.name) or sha256(p))
    for rank in range(3):
        format_.Stored(tmp_path / "stored", slice(rank, None, 3))
    assert sorted(read) == ["col.npy", "data-x.npy", "order.npy", "rowptr.npy"]


def test_a_rank_that_finds_damage_stops_all(two, tmp_path):
    distributed.save(graph(), tmp_path / "stored")
    put(tmp_path / "stored", "data-x", 3, 8)
    for kind, text in two.errors(spread, folder=str(tmp_path / "stored")):
        assert kind == "NotDistributable" and "data-x.npy is damaged" in text


def spread(device: torch.device, folder: str) -> None:
    pyg_accel.distribute(GCN(4, 8, 2, 3), folder)


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex32, torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_come_back(tmp_path, dtype):
    data = graph()
    bits = torch.randint(0, 2, (30, dtype.itemsize), dtype=torch.uint8)
    data.rows, data.none = bits.view(dtype), bits[:0].view(dtype)
    data.of_graph = bits[0].view(dtype)[0]
    distributed.save(data, tmp_path / "stored")
    back = distributed.load(tmp_path / "stored")
    for name in ("rows", "of_graph", "none"):
        actual, expected = back[name], data[name]
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (actual, expected)))


NAMES = ["a/b", "..", "../up", "with space", "name.dot", "Ünï", "x" * 300, "nul\0", "new\nline"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_attributes_and_types_of_any_name_come_back(tmp_path, name):
    data = HeteroData()
    data[name].x = torch.rand(5, 2)
    data[name][name] = torch.arange(5)
    data[name, name, name].edge_index = torch.randint(5, (2, 9))
    distributed.save(data, tmp_path / "stored")
    distributed.save(data, tmp_path / "stored", overwrite=True)
    back = distributed.load(tmp_path / "stored")
    assert back.metadata() == data.metadata()
    assert torch.equal(back[name].x, data[name].x) and torch.equal(
        back[name][name], torch.arange(5)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["stored"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.eye(30).to_sparse(), "sparse_coo"),
        (torch.eye(30).to_sparse_csr(), "sparse_csr"),
        (torch.quantize_per_tensor(torch.rand(30), 0.1, 0, torch.qint8), "qint8"),
        ("text", "str"),
    ],
    ids=["coo", "csr", "quantized", "str"],
)
def test_what_is_no_dense_tensor_is_refused(tmp_path, value, text):
    data = graph()
    data["mine"] = value
    with pytest.raises(NotDistributable, match=f"'mine' is a .*({text}).*dense tensors"):
        distributed.save(data, tmp_path / "stored")
    assert files(tmp_path) == []


def test_lazy_views_of_numbers_are_stored(tmp_path):
    data = graph()
    data.conj = torch.rand(30, 2, dtype=torch.complex64).conj()
    data.neg = torch._neg_view(torch.rand(30))
    data.strided = torch.rand(4, 30).t()
    distributed.save(data, tmp_path / "stored")
    back = distributed.load(tmp_path / "stored")
    for name in ("conj", "neg", "strided"):
        assert torch.equal(back[name], data[name])


def test_a_folder_can_be_copied(tmp_path):
    distributed.save(graph(), tmp_path / "stored")
    distributed.save(graph(seed=3), tmp_path / "stored", overwrite=True)
    shutil.copytree(tmp_path / "stored", tmp_path / "copy")
    assert torch.equal(distributed.load(tmp_path / "copy").x, graph(seed=3).x)
