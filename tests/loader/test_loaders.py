"""PyG's loaders on the sampler of this package, from the first line to the batch."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.sampler import (
    BaseSampler,
    BidirectionalNeighborSampler,
    NeighborSampler,
    NodeSamplerInput,
    SamplerOutput,
)

import pyg_accel
from pyg_accel.loader import devices
from pyg_accel.patching import loading

pytestmark = pytest.mark.usefixtures("patched_without_other_samplers")
N, E = 200, 1600


@pytest.fixture
def data() -> Data:
    return Data(
        x=torch.arange(N).float().view(-1, 1).repeat(1, 3),
        edge_index=torch.randint(N, (2, E)),
        edge_attr=torch.arange(E).float(),
        y=torch.randint(4, (N,)),
        time=torch.arange(N),
    )


def assert_of(data: Data, batch: Data) -> None:
    assert (batch.x[:, 0].long() == batch.n_id).all()
    assert (batch.edge_attr.long() == batch.e_id).all()
    assert (data.edge_index[:, batch.e_id] == batch.n_id[batch.edge_index]).all()


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (0, {"replace": True}), (0, {"disjoint": True}), (2, {}),
     (2, {"filter_per_worker": True, "pin_memory": True})],
)  # fmt: skip
def test_an_epoch_has_every_seed_once(data: Data, workers: int, options: dict[str, Any]):
    loader = NeighborLoader(data, [4, 3], batch_size=32, shuffle=True, num_workers=workers,
                            persistent_workers=workers > 0, **options)  # fmt: skip
    for _ in range(2):
        seeds = []
        for batch in loader:
            assert_of(data, batch)
            assert batch.edge_index.shape[1] > 0
            seeds += batch.n_id[: batch.batch_size].tolist()
        assert sorted(seeds) == list(range(N))
    loader._iterator = None  # ends workers that persist, now and not when garbage is collected


def test_workers_draw_different_batches_that_the_seed_repeats(data: Data):
    def epoch(workers: int) -> list[list[int]]:
        torch.manual_seed(3)
        loader = NeighborLoader(data, [2], input_nodes=torch.zeros(64, dtype=torch.long),
                                batch_size=1, num_workers=workers)  # fmt: skip
        return [batch.e_id.tolist() for batch in loader]

    for workers in (0, 2):
        batches = epoch(workers)
        assert batches == epoch(workers)
        assert len(set(map(tuple, batches))) > 5


@pytest.mark.parametrize("kind", ["directional", "bidirectional", "induced"])
def test_types_of_subgraphs(data: Data, kind: str):
    (batch,) = NeighborLoader(data, [3, 3], input_nodes=torch.arange(20), batch_size=20,
                              subgraph_type=kind)  # fmt: skip
    edges = set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))
    members = set(batch.n_id.tolist())
    stock = set(map(tuple, data.edge_index.t().tolist()))
    if kind == "induced":
        assert edges == {(s, t) for s, t in stock if s in members and t in members}
    if kind == "bidirectional":
        assert edges == {(t, s) for s, t in edges}
    else:
        assert edges <= stock


@pytest.mark.parametrize("mode", ["binary", "triplet"])
@pytest.mark.parametrize("times", [False, True])
def test_links_with_negatives(data: Data, mode: str, times: bool):
    options: dict[str, Any] = {}
    if times:
        options = {"time_attr": "time", "edge_label_time": torch.full((E,), N)}
    loader = LinkNeighborLoader(data, [3, 2], edge_label_index=data.edge_index, batch_size=64,
                                neg_sampling={"mode": mode, "amount": 2}, **options)  # fmt: skip
    for batch in loader:
        assert_of(data, batch)
        if mode == "binary":
            positive = batch.edge_label_index[:, batch.edge_label > 0]
        else:
            positive = torch.stack([batch.src_index, batch.dst_pos_index])
            assert batch.dst_neg_index.shape == (positive.size(1), 2)
        assert (batch.n_id[positive] == data.edge_index[:, batch.input_id]).all()


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_typed_links_with_negatives_in_time(typed: HeteroData, mode: str):
    kind = ("u", "buys", "v")
    index = typed[kind].edge_index
    loader = LinkNeighborLoader(
        typed, [3, 2], edge_label_index=(kind, index), batch_size=50, time_attr="time",
        edge_label_time=torch.full((300,), 60), neg_sampling={"mode": mode, "amount": 1},
    )  # fmt: skip
    for batch in loader:
        count = len(batch[kind].input_id if mode == "binary" else batch["u"].src_index)
        assert count == 50
        for name in ("u", "v"):
            times = batch[name].time[batch[name].num_sampled_nodes[0] :]
            assert (times <= 60).all()
            assert int(batch[name].batch.max()) < 50


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_temporal_batches_of_typed_graphs(typed: HeteroData, strategy: str):
    loader = NeighborLoader(
        typed, [4, 4], input_nodes=("u", torch.arange(50)), input_time=torch.arange(50) + 10,
        time_attr="time", temporal_strategy=strategy, batch_size=10, num_workers=2,
    )  # fmt: skip
    for batch in loader:
        for name in ("u", "v"):
            beyond = batch[name].num_sampled_nodes[0]
            limits = batch["u"].seed_time[batch[name].batch]
            assert (batch[name].time <= limits)[beyond:].all()


@pytest.mark.parametrize("options", [{"weight_attr": "w"}, {"time_attr": "when"}])
def test_weights_and_times_of_edges_need_no_pyg_lib(data: Data, options: dict[str, str]):
    data.w, data.when = torch.rand(E), torch.randint(100, (E,))
    extra = {"input_time": torch.full((N,), 50)} if "time_attr" in options else {}
    for batch in NeighborLoader(data, [3], batch_size=50, **options, **extra):
        assert_of(data, batch)
        assert "time_attr" not in options or (batch.when <= 50).all()


def test_no_warning_asks_for_pyg_lib(data: Data, recwarn: pytest.WarningsRecorder):
    NeighborLoader(data, [3])
    assert not [w for w in recwarn if "pyg-lib" in str(w.message)]


def test_an_index_may_be_a_mask_and_data_a_sparse_matrix(data: Data):
    mask = torch.rand(N) < 0.2
    loader = NeighborLoader(data, [3], input_nodes=mask, batch_size=1000)
    assert next(iter(loader)).batch_size == int(mask.sum())
    empty = NeighborLoader(data, [3], input_nodes=torch.zeros(N, dtype=torch.bool), batch_size=4)
    assert len(empty) == 0


@pytest.mark.full
def test_workers_that_are_not_forked_patch_when_they_begin(data: Data):
    loader = NeighborLoader(
        data, [3], batch_size=100, num_workers=1, multiprocessing_context="spawn",
        worker_init_fn=patch_worker,
    )  # fmt: skip
    for batch in loader:
        assert_of(data, batch)


def patch_worker(worker: int) -> None:
    pyg_accel.patch()


def test_models_train_on_batches(data: Data):
    model = GraphSAGE(3, 16, 2, 4)
    for batch in NeighborLoader(data, [5, 5], batch_size=64):
        out = model(
            batch.x, batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )[: batch.batch_size]  # fmt: skip
        whole = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, whole)
        torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()


def test_typed_models_run_on_batches(typed: HeteroData):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv((-1, -1), 4)

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.conv(x, edge_index)

    model = to_hetero(Model(), typed.metadata())
    for batch in NeighborLoader(typed, [4], input_nodes="u", batch_size=25):
        assert model(batch.x_dict, batch.edge_index_dict)["u"].shape[0] == batch["u"].num_nodes


def test_weights_outlive_the_patch():
    """PyG's own sampler would ignore them beside torch-sparse."""
    weight = torch.zeros(20)
    weight[3] = 1.0
    star = Data(
        edge_index=torch.stack([torch.arange(1, 21), torch.zeros(20, dtype=torch.long)]),
        num_nodes=21, w=weight,
    )  # fmt: skip
    loader = NeighborLoader(star, [1], input_nodes=torch.zeros(20).long(), weight_attr="w")
    pyg_accel.unpatch()
    assert {int(batch.n_id[-1]) for batch in loader} == {4}
    assert {int(batch.n_id[-1]) for batch in copy.deepcopy(loader)} == {4}


def test_a_type_of_nodes_whose_number_pyg_cannot_tell():
    data = HeteroData()
    data["a"].x, data["c"].y = torch.ones(2, 1), torch.ones(2)
    data["c", "t", "a"].edge_index = torch.tensor([[0, 1], [0, 1]])
    batch = next(iter(NeighborLoader(data, [-1], input_nodes=("a", torch.tensor([0])))))
    assert batch["c", "t", "a"].edge_index.tolist() == [[0], [0]]


@pytest.mark.parametrize("count", [2**62 + 1, 2**62, 2**41])
def test_more_samples_than_memory_holds_are_refused(count):
    sampler = NeighborSampler(
        Data(edge_index=torch.randint(0, 9, (2, 300)), num_nodes=9), [count], replace=True
    )
    with pytest.raises(ValueError, match="fewer samples"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1, 2, 3, 4])))


def test_induced_subgraphs_leave_out_ids_that_are_no_nodes():
    data = Data(edge_index=torch.tensor([[3, 1], [0, 0]]), num_nodes=3)
    loader = NeighborLoader(data, [0], input_nodes=torch.tensor([0, 0, 1]), batch_size=3,
                            subgraph_type="induced", disjoint=True)  # fmt: skip
    assert next(iter(loader)).edge_index.shape == (2, 0)
    loader = NeighborLoader(data, [0], input_nodes=torch.tensor([0, 1]), batch_size=2,
                            subgraph_type="induced")  # fmt: skip
    assert next(iter(loader)).edge_index.tolist() == [[1], [0]]


@pytest.mark.parametrize("bad", [3, 10**8, -1])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_targets_that_do_not_exist_are_refused(bad: int, backward: bool, is_sorted: bool):
    """PyG would count them beyond an array."""
    edges = torch.tensor([[1, 2, 0], [0, 1, bad]])
    data = Data(edge_index=edges.flip(0) if backward else edges, num_nodes=3)
    direction: Any = "backward" if backward else "forward"
    typed = HeteroData()
    typed["a"].num_nodes = typed["b"].num_nodes = 3
    typed["a", "to", "b"].edge_index = data.edge_index
    for each in (data, typed):
        with pytest.raises(ValueError, match=r"'edge_index' .* there are 3 nodes"):
            NeighborSampler(each, [2], is_sorted=is_sorted, sample_direction=direction)


NEEDED = {
    "HGTLoader(typed, [4], input_nodes='a')": "'HGTSampler' requires 'torch-sparse'",
    "NeighborSampler(data.edge_index, [3])": "'SparseTensor' requires 'torch-sparse'",
}
SCRIPT = """
import sys
sys.modules["torch_sparse"] = sys.modules["pyg_lib"] = None
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import *
import pyg_accel
pyg_accel.patch()
data = Data(edge_index=torch.randint(50, (2, 300)), x=torch.randn(50, 3))
typed = HeteroData()
typed["a"].x, typed["a", "to", "a"].edge_index = torch.randn(50, 3), data.edge_index
next(iter(NeighborLoader(data, [2])))
for call in sys.argv[1:]:
    try:
        eval(call)
    except ImportError as error:
        print(error)
"""


@pytest.mark.full
def test_loaders_that_need_other_operators_raise_the_error_of_pyg():
    done = subprocess.run([sys.executable, "-c", SCRIPT, *NEEDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if "requires" in line]
    assert printed == list(NEEDED.values())


@pytest.mark.parametrize("disjoint", [False, True])
def test_samplers_of_both_directions_stay_on_the_cpu(disjoint: bool, monkeypatch):
    """There PyG compares their nodes."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(loading, "device_from", lambda loader: gpu)
    monkeypatch.setattr(devices, "cuda_unavailable_reasons", lambda: [])
    monkeypatch.setattr(devices, "readable", lambda tensor, device: tensor)
    data = Data(x=torch.randn(50, 2), edge_index=torch.randint(50, (2, 300)))
    is_edge = torch.zeros(50, 50, dtype=torch.bool)
    is_edge[tuple(data.edge_index)] = True
    with pyg_accel.patched(loader="cuda"):
        assert devices.device_of(NeighborSampler(data, [2])) == gpu
        sampler = BidirectionalNeighborSampler(data, [2], disjoint=disjoint)
        parts = sampler.forward_sampler, sampler.backward_sampler
        assert [devices.device_of(part).type for part in parts] == ["cpu", "cpu"]
        assert "one by one" in devices.why_on_cpu(parts[0])
        for batch in NodeLoader(data, sampler, input_nodes=torch.arange(20), batch_size=5):
            assert is_edge[tuple(batch.n_id[batch.edge_index])].all()
            assert ("batch" in batch) is disjoint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_batches_on_a_gpu_that_is_not_there_are_refused():
    with pytest.raises(ImportError, match="no CUDA device"):
        pyg_accel.patch(loader="cuda")
    with pytest.raises(ValueError, match="'loader'"):
        pyg_accel.patch(loader="meta")
    with pytest.raises(ValueError, match="'loader'"):
        pyg_accel.patch(GraphSAGE(3, 4, 1), loader="cpu")


class OfNodes(BaseSampler):
    """Not a NeighborSampler."""

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


class Fixed(OfNodes):
    """Returns the same edges for all nodes."""

    def sample_from_nodes(self, index, **kwargs):
        ends = torch.arange(2)
        return SamplerOutput(node=torch.arange(9), row=ends, col=ends.flip(0), edge=ends,
                             metadata=(index.input_id, index.time))  # fmt: skip


class AnswersAll(Fixed):
    """Has every attribute that it is asked for."""

    def __getattr__(self, name):
        return lambda *args: None


class AnswersNone(Fixed):
    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")


class Wraps(OfNodes):
    """Asks a sampler of PyG."""

    def __init__(self, data):
        self.inner = NeighborSampler(data, [2])

    def sample_from_nodes(self, index, **kwargs):
        return self.inner.sample_from_nodes(index)


@pytest.mark.parametrize("loader", [None, "cpu"])
@pytest.mark.parametrize("make", [Fixed, AnswersAll, AnswersNone])
def test_samplers_of_users_are_left_alone(make, loader):
    data = Data(x=torch.randn(50, 2), edge_index=torch.randint(50, (2, 300)))

    def batches():
        return [batch.to_dict() for batch in NodeLoader(data, make(), batch_size=10)]

    expected = batches()
    with pyg_accel.patched(loader=loader):
        actual = batches()
    assert len(actual) == len(expected) == 5
    for ours, stock in zip(actual, expected, strict=True):
        assert ours.keys() == stock.keys() and torch.equal(ours["x"], stock["x"])


def test_a_sampler_inside_of_another_stays_on_the_cpu(monkeypatch):
    """Whoever wraps it reads its results there, and so does the loader."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(loading, "device_from", lambda loader: gpu)
    monkeypatch.setattr(devices, "cuda_unavailable_reasons", lambda: [])
    monkeypatch.setattr(devices, "readable", lambda tensor, device: tensor)
    data = Data(x=torch.randn(50, 2), edge_index=torch.randint(50, (2, 300)))
    with pyg_accel.patched(loader="cuda"):
        sampler = Wraps(data)
        assert devices.device_of(sampler.inner) == gpu
        loader = NodeLoader(data, sampler, batch_size=10)
        assert devices.device_of(sampler.inner).type == "cpu"
        assert devices.why_on_cpu(sampler.inner) == "it is part of a Wraps"
        assert sum(batch.batch_size for batch in loader) == 50
