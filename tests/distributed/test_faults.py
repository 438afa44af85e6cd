"""Bad input and lost ranks: a named error on every rank, in bounded time."""

import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch_geometric import nn
from torch_geometric.data import Data

import pyg_accel
from pyg_accel import distributed
from pyg_accel.distributed import partitioners
from pyg_accel.errors import FolderError, NotDistributable

VERSION = pyg_accel.__version__


def graph(nodes: int = 30) -> Data:
    generator = torch.Generator().manual_seed(2)
    edge_index = torch.randint(nodes, (2, 150), generator=generator)
    x = torch.randn(nodes, 4, generator=generator)
    return Data(x=x, edge_index=edge_index, y=torch.arange(nodes) % 2,
                edge_attr=torch.rand(150, 2, generator=generator))  # fmt: skip


def differ(device: torch.device, what: str) -> None:
    """One rank comes with something else."""
    data, model, options = graph(), nn.GCN(4, 8, 2, 3), dict[str, Any]()
    if dist.get_rank() == 1:
        if what == "edges":
            data.edge_index[0, 3] = (data.edge_index[0, 3] + 1) % 30
        elif what == "features":
            data.x[3, 2] += 1
        elif what == "width":
            model = nn.GCN(4, 9, 2, 3)
        elif what == "layer":
            model = nn.GraphSAGE(4, 8, 2, 3)
        elif what == "rows":
            options["rows"] = "own"
        elif what == "version":
            pyg_accel.__version__ = "0.0"
        elif what == "ids":
            data.edge_index[0, 3] = 30
    if what == "partition":
        options["partition"] = "metiss"
    elif what == "missing":
        partitioners.find_spec = lambda name: None
        options["partition"] = "metis"
    try:
        pyg_accel.distribute(model, data, **options)
    finally:
        pyg_accel.__version__ = VERSION
        partitioners.find_spec = find_spec


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("edges", "PartitionMismatch", "data edge_index"),
        ("features", "PartitionMismatch", "data x"),
        ("width", "PartitionMismatch", "parameter convs.0"),
        ("layer", "PartitionMismatch", "model: rank 0: GCN"),
        ("rows", "PartitionMismatch", "rows: rank 0: all, rank 1: own"),
        ("version", "PartitionMismatch", f"pyg_accel: rank 0: {VERSION}, rank 1: 0.0"),
        ("partition", "NotDistributable", "no partition 'metiss'; there are given, community,"),
        ("missing", "NotDistributable", "pip install 'pyg-accel[partition]'"),
        ("ids", "NotDistributable", "rank 1: the edge_index has node ids outside of 30"),
    ],
)
def test_ranks_that_differ_all_raise(two, what, kind, text):
    errors = two.errors(differ, what=what)
    assert errors[0] == errors[1]
    assert errors[0][0] == kind and text in errors[0][1]


class Flipped(torch.nn.Module):
    """Makes edges of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.GCNConv(4, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index.flip(0))


class Both(nn.MessagePassing):
    """Reads x as a whole too."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: torch.Tensor) -> torch.Tensor:
        return x_j

    def update(self, inputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return inputs + x


class Own(nn.HANConv):
    """Derived from a layer that is known."""

    def __init__(self, types: list[str], width: int) -> None:
        super().__init__(width, width, (types, [("a", "to", "a")]))


MODELS = {
    "flow": lambda: nn.GCNConv(4, 3, flow="target_to_source"),
    "lazy": lambda: nn.SAGEConv(-1, 3),
    "dynamic": lambda: nn.SuperGATConv(4, 3),
    "both": lambda: Both(),
    "pool": lambda: nn.SAGPooling(4),
    "derived": lambda: Own(["a"], 4),
    "types": lambda: nn.HGTConv(4, 4, (["a"], [("a", "to", "a")])),
    "all pairs": lambda: nn.GPSConv(4, nn.GCNConv(4, 4)),
}


def unsuited(device: torch.device, model: str) -> None:
    pyg_accel.distribute(MODELS[model](), graph())


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("flow", "flip the edge_index"),
        ("lazy", "call it once before"),
        ("dynamic", "a sample of all pairs of nodes"),
        ("both", "reads 'x' both as a whole"),
        ("pool", "SAGPooling"),
        ("derived", "Own: it looks at all nodes"),
        ("types", "HGTConv: it looks at all nodes"),
        ("all pairs", "GPSConv: it looks at all nodes"),
    ],
)
def test_models_that_cannot_be_distributed_say_why(ranks, model, text):
    errors = ranks(2).errors(unsuited, model=model)
    assert errors[0] == errors[1]
    assert errors[0][0] == "NotDistributable" and text in errors[0][1]


def called_with(device: torch.device, what: str) -> None:
    model, data = pyg_accel.distribute(Flipped() if what == "flip" else nn.GCN(4, 8, 2, 3), graph())
    x, edges = (graph().x, data.edge_index) if what == "features" else (data.x, data.edge_index)
    model(x, edges.clone() if what == "clone" else edges)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("flip", "distribute() did not return"),
        ("clone", "distribute() did not return"),
        ("features", "30 rows of 'x', but this rank owns"),
    ],
)
def test_calls_with_other_edges_or_rows_raise(ranks, what, text):
    for kind, actual in ranks(2).errors(called_with, what=what):
        assert kind == "NotDistributable" and text in actual


def test_without_a_process_group_the_error_says_how():
    with pytest.raises(pyg_accel.errors.DistributedError, match="torchrun"):
        pyg_accel.distribute(nn.GCN(4, 8, 2, 3), graph())


def from_folder(device: torch.device, folder: str, rows: str) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model, data = pyg_accel.distribute(nn.GCN(4, 8, 2, 3).double(), folder, rows=rows)
    out = model(data.x.double(), data.edge_index)
    return [out.detach().cpu(), data.y.cpu(), data.edge_attr.cpu(), data.n_id.cpu()]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_stored_graph_serves_any_number_of_ranks(ranks, tmp_path, world):
    data = graph()
    distributed.save(data, tmp_path / "stored")
    torch.manual_seed(5)
    expected = nn.GCN(4, 8, 2, 3).double()(data.x.double(), data.edge_index).detach()
    whole = ranks(world)(from_folder, folder=str(tmp_path / "stored"), rows="all")
    for out, y, _, _ in whole:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert torch.equal(y, data.y)
    assert sum(len(part[2]) for part in whole) == 150
    for out, y, _, own in ranks(world)(from_folder, folder=str(tmp_path / "stored"), rows="own"):
        torch.testing.assert_close(out, expected[own], rtol=0, atol=1e-12)
        assert torch.equal(y, data.y[own])


def test_a_stored_graph_comes_back_whole(tmp_path):
    data = graph()
    data.half, data.name_free = data.x.bfloat16(), torch.tensor(3.0)
    distributed.save(data, tmp_path / "stored")
    back = distributed.load(tmp_path / "stored", verify=True)
    for name in ("x", "y", "half", "name_free"):
        assert torch.equal(back[name], data[name]) and back[name].dtype == data[name].dtype

    def edges(d: Data) -> list[Any]:
        return sorted(zip(*d.edge_index.tolist(), d.edge_attr.tolist(), strict=True))

    assert edges(back) == edges(data)
    with pytest.raises(FolderError, match="exists already"):
        distributed.save(data, tmp_path / "stored")
    distributed.save(data, tmp_path / "stored", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["stored"]


def spoil(folder: Path, how: str) -> None:
    meta = folder / "meta.json"
    col = folder / "col.npy"
    if how == "no meta":
        meta.unlink()
    elif how == "no json":
        meta.write_text("{")
    elif how == "foreign":
        meta.write_text('{"format": "something else"}')
    elif how == "version":
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": 99}))
    elif how == "cut off":
        os.truncate(col, col.stat().st_size - 8)
    elif how == "no array":
        (folder / "rowptr.npy").unlink()
    elif how == "pickle":
        size = col.stat().st_size
        col.write_bytes(b"\x80\x04" + b"x" * (size - 2))
    elif how == "other shape":
        actual = json.loads(meta.read_text())
        actual["arrays"]["col"]["shape"] = [10, 15]
        meta.write_text(json.dumps(actual))
    elif how == "bits":
        content = bytearray(col.read_bytes())
        content[-1] ^= 1
        col.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no meta", "no meta.json"),
        ("no json", "damaged"),
        ("foreign", "another format"),
        ("version", "version 99"),
        ("cut off", "cut off"),
        ("no array", "lacks rowptr.npy"),
        ("pickle", "no array of numpy"),
        ("other shape", "not int64"),
        ("bits", "checksum"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, how, text):
    distributed.save(graph(), tmp_path / "stored")
    spoil(tmp_path / "stored", how)
    with pytest.raises(FolderError, match=text):
        distributed.load(tmp_path / "stored", verify=True)


def test_a_damaged_folder_raises_the_same_error_on_every_rank(ranks, tmp_path):
    distributed.save(graph(), tmp_path / "stored")
    spoil(tmp_path / "stored", "cut off")
    for kind, actual in ranks(2).errors(from_folder, folder=str(tmp_path / "stored"), rows="all"):
        assert kind == "NotDistributable" and "cut off" in actual


def test_data_that_a_folder_cannot_store_is_refused(tmp_path):
    data = graph()
    data.names = ["a"] * 30
    with pytest.raises(NotDistributable, match="names"):
        distributed.save(data, tmp_path / "stored")
    assert list(tmp_path.iterdir()) == []


def die(device: torch.device, where: str) -> None:
    """Rank 1 is killed; the others must not wait for ever."""
    data = graph()
    model, share = pyg_accel.distribute(nn.GraphSAGE(4, 8, 2, 3), data)
    model(share.x, share.edge_index)
    if where == "forward" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out = model(share.x, share.edge_index)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.full), "backward"])
def test_a_killed_rank_ends_the_others(fresh, where):
    ranks = fresh(2)
    start = time.monotonic()
    (_, answer), (_, dead) = ranks.answers(die, where=where)
    assert answer[0] == "RankLost" and "another rank ended" in answer[1]
    assert dead[0] == "died"
    assert time.monotonic() - start < 60


def without_loss(device: torch.device, late: str) -> None:
    """The second rank computes no gradients in the second step, and goes on."""
    model, data = pyg_accel.distribute(nn.GCN(4, 8, 2, 3), graph())
    for step in range(3):
        out = model(data.x, data.edge_index)
        other = dist.get_rank() == 1
        if late == ("the loss" if other else "the rest"):
            time.sleep(1)
        if not (other and step == 1):
            out.square().sum().backward()


@pytest.mark.full
@pytest.mark.parametrize("late", ["the loss", "the rest"])
def test_a_rank_whose_loss_does_not_depend_on_the_model_is_named(fresh, late, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")  # else ranks do not compare their steps
    start = time.monotonic()
    errors = fresh(2).errors(without_loss, late=late)
    assert time.monotonic() - start < 60
    kinds = [kind for kind, _ in errors]
    assert "RanksDiverged" in kinds and set(kinds) <= {"RanksDiverged", "RankLost"}
    text = errors[kinds.index("RanksDiverged")][1]
    assert "does not depend on what the model returned" in text


def several_calls(device: torch.device) -> None:
    """Calls without a backward pass, and one backward pass for two: alike on all ranks."""
    model, data = pyg_accel.distribute(nn.GCN(4, 8, 2, 3).to(device), graph().to(device))
    for _ in range(20):  # more passes than are kept
        model(data.x, data.edge_index)
        first, second = (model(data.x, data.edge_index) for _ in range(2))
        (first.sum() + second.square().sum()).backward()
        model.eval()(data.x, data.edge_index)
        model.train()


def test_calls_without_gradients_are_no_fault(two, fresh, monkeypatch):
    two(several_calls)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    fresh(2)(several_calls)


def sharded_checkpoint(device: torch.device, folder: str, saves: bool) -> torch.Tensor:
    torch.manual_seed(dist.get_world_size())
    model, data = pyg_accel.distribute(nn.GCN(4, 8, 2, 3, norm="batch_norm"), graph())
    state = {"model": model.state_dict()}
    (checkpoint.save if saves else checkpoint.load)(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return model.eval()(data.x, data.edge_index).detach()


@pytest.mark.full
def test_the_checkpoints_of_torch_take_a_distributed_model(ranks, tmp_path):
    before = ranks(2)(sharded_checkpoint, folder=str(tmp_path / "state"), saves=True)[0]
    for after in ranks(3)(sharded_checkpoint, folder=str(tmp_path / "state"), saves=False):
        torch.testing.assert_close(after, before)
