"""Neighbour loaders on a GPU: their batches against those of the CPU, and what is hard there."""

import gc
import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch_geometric.sampler.utils
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.sampler import BidirectionalNeighborSampler, NeighborSampler

import pyg_accel
from pyg_accel.loader import devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.usefixtures("patched_without_other_samplers"),
]
N, E = 500, 4000
OF_SEEDS = {"input_id", "seed_time", "edge_label_index", "edge_label", "edge_label_time",
            "src_index", "dst_pos_index", "dst_neg_index"}  # fmt: skip


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave edges of a target in their order, which PyG's sort does not promise."""
    monkeypatch.setattr(torch_geometric.sampler.utils, "index_sort", lambda x: x.sort(stable=True))


@pytest.fixture
def data() -> Data:
    return Data(
        x=torch.randn(N, 3), edge_index=torch.randint(N, (2, E)), edge_attr=torch.randn(E),
        y=torch.randint(4, (N,)), time=torch.randint(50, (N,)), when=torch.randint(50, (E,)),
        w=torch.rand(E) + 0.1,
    )  # fmt: skip


@pytest.fixture
def typed(typed: HeteroData) -> HeteroData:
    typed["v", "like", "v"].edge_index = torch.randint(80, (2, 200))
    return typed


def assert_equal(actual: Any, expected: Any, name: str = "") -> None:
    """Compare nests of tensors, of which the first are on the GPU."""
    assert type(actual) is type(expected), name
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_equal(actual[key], value, f"{name} {key}")
    elif isinstance(expected, Tensor):
        assert actual.is_cuda or name.split()[-1] in OF_SEEDS, name
        assert actual.dtype == expected.dtype, name
        assert torch.equal(actual.cpu(), expected), name
    else:
        assert actual == expected, name


def epochs(cls: type, data: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Batches of the CPU, of data on the GPU, of copies there, and of data on the host."""
    actual = []
    for where, loader, room in (
        (data, None, 0), (data.clone().to("cuda"), None, 0),
        (data, "cuda", 2**40), (data.clone(), "cuda", 0),
    ):  # fmt: skip
        with (
            pyg_accel.patched(loader=loader),
            patch.object(devices, "_room", lambda _, room=room: room),
        ):
            torch.manual_seed(5)
            np.random.seed(5)
            actual.append([batch.to_dict() for batch in cls(where, *args, **kwargs)])
    assert len(actual[0]) > 1
    return actual


def assert_same_epochs(cls: type, data: Any, *args: Any, **kwargs: Any) -> None:
    expected, *others = epochs(cls, data, *args, **kwargs)
    for other in others:
        assert len(other) == len(expected)
        for actual, right in zip(other, expected, strict=True):
            assert_equal(actual, right)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replace": {"replace": True},  # of all neighbours each once
    "disjoint": {"disjoint": True},
    "time of nodes": {"time_attr": "time", "input_time": torch.full((N,), 30)},
    "time of seeds": {"time_attr": "time", "disjoint": True},
    "last": {"time_attr": "time", "temporal_strategy": "last"},
    "time of edges": {"time_attr": "when", "input_time": torch.full((N,), 30)},
    "weights": {"weight_attr": "w"},
    "induced": {"subgraph_type": "induced"},
    "disjoint and induced": {"subgraph_type": "induced", "disjoint": True},
    "workers": {"num_workers": 2, "persistent_workers": True},
    "in workers": {"num_workers": 2, "filter_per_worker": True, "pin_memory": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_batches_with_all_neighbours_are_those_of_the_cpu(data: Data, case: str):
    assert_same_epochs(NeighborLoader, data, [-1, -1], batch_size=100, **OPTIONS[case])


def test_bidirectional_batches_are_those_of_the_cpu(data: Data):
    """Of two edges between the same nodes PyG keeps the attributes of any."""
    del data.edge_attr, data.when, data.w
    actual = epochs(NeighborLoader, data, [-1], batch_size=100, subgraph_type="bidirectional")
    for batches in zip(*actual, strict=True):
        for batch in batches:
            assert batch.pop("e_id").numel() == batch["edge_index"].size(1)
        for batch in batches[1:]:
            assert_equal(batch, batches[0])


@pytest.mark.parametrize("disjoint", [False, True])
def test_samplers_of_both_directions_sample_on_the_cpu(data: Data, disjoint: bool):
    is_edge = torch.zeros(N, N, dtype=torch.bool)
    is_edge[tuple(data.edge_index)] = True
    for where, loader in ((data.clone().to("cuda"), None), (data, "cuda")):
        with pyg_accel.patched(loader=loader):
            sampler = BidirectionalNeighborSampler(where, [2], disjoint=disjoint)
            batch = next(iter(NodeLoader(where, sampler, input_nodes=torch.arange(9))))
        assert is_edge[tuple(batch.n_id.cpu()[batch.edge_index.cpu()])].all()


def test_the_last_neighbours_in_time_are_those_of_the_cpu(data: Data):
    data.time = torch.randperm(N)
    options = {"time_attr": "time", "temporal_strategy": "last"}
    assert_same_epochs(NeighborLoader, data, [3, 2], batch_size=100, **options)


@pytest.mark.parametrize("times", [False, True])
def test_typed_batches_are_those_of_the_cpu(typed: HeteroData, times: bool):
    options = {"time_attr": "time", "temporal_strategy": "last"} if times else {}
    assert_same_epochs(
        NeighborLoader, typed, [4, 4] if times else [-1, -1], input_nodes="u", batch_size=10,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_links_are_those_of_the_cpu(data: Data, mode: str, times: bool):
    options: dict[str, Any] = {}
    if times:
        options = {"time_attr": "time", "edge_label_time": torch.full((E,), 50)}
    assert_same_epochs(
        LinkNeighborLoader, data, [-1], edge_label_index=data.edge_index, batch_size=1000,
        neg_sampling={"mode": mode, "amount": 1}, **options,
    )  # fmt: skip


def test_int32_graphs_and_a_larger_one_are_those_of_the_cpu():
    """Many threads meet in the table, which grows at each hop."""
    edge_index = (torch.rand(2, 2_000_000) ** 4 * 100_000).long()
    for dtype in (torch.int64, torch.int32):
        data = Data(edge_index=edge_index.to(dtype), num_nodes=100_000)
        seeds = torch.randint(100_000, (2000,))
        on_cpu = NeighborSampler(data, [-1, -1])._sample(seeds)
        on_gpu = NeighborSampler(data.clone().to("cuda"), [-1, -1])._sample(seeds)
        for name in ("row", "col", "edge", "node"):
            actual = getattr(on_gpu, name)
            assert actual.is_cuda
            assert actual.dtype == dtype
            assert torch.equal(actual.cpu(), getattr(on_cpu, name)), name
        assert on_gpu.num_sampled_nodes == on_cpu.num_sampled_nodes
        assert on_gpu.num_sampled_edges == on_cpu.num_sampled_edges


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "w"},
                                     {"weight_attr": "w", "replace": True},
                                     {"disjoint": True}])  # fmt: skip
@pytest.mark.parametrize("counts", [[10, 5], [100, 3]])
def test_a_seed_gives_the_same_batch_each_time(counts: list[int], options: dict[str, Any]):
    edges = 1_000_000
    data = Data(
        edge_index=(torch.rand(2, edges) ** 3 * 20_000).long(), num_nodes=20_000,
        w=torch.rand(edges),
    ).to("cuda")  # fmt: skip
    sampler, seeds = NeighborSampler(data, counts, **options), torch.randperm(20_000)[:1000]
    batches = []
    for _ in range(5):
        torch.manual_seed(7)
        batches.append(sampler._sample(seeds))
    source, target = data.edge_index[:, sampler.perm[batches[0].edge]]
    assert torch.equal(batches[0].node[batches[0].row], source)
    assert torch.equal(batches[0].node[batches[0].col], target)
    for other in batches[1:]:
        for name in ("row", "col", "edge", "node"):
            assert torch.equal(getattr(batches[0], name), getattr(other, name))
    assert not torch.equal(batches[0].edge, sampler._sample(seeds).edge)  # the stream moves on


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight_attr": "w"},
                                     {"weight_attr": "w", "replace": True}])  # fmt: skip
@pytest.mark.parametrize("k", [10, 1000, 999_999, -1])
def test_hubs(k: int, options: dict[str, Any]):
    degree = 1_000_000
    data = Data(
        edge_index=torch.stack([torch.arange(1, degree + 1), torch.zeros(degree).long()]),
        num_nodes=degree + 1, w=torch.rand(degree) + 0.1,
    ).to("cuda")  # fmt: skip
    sampler = NeighborSampler(data, [k], **options)
    out = sampler._sample(torch.tensor([0, 7]))
    count = degree if k < 0 else k
    assert out.num_sampled_edges == [count]
    assert out.node.unique().numel() == out.node.numel()
    assert torch.equal(out.node[out.row], sampler.perm[out.edge] + 1)
    if not options.get("replace") or k < 0:
        assert out.edge.unique().numel() == count
    if k == 1000:  # spread over the whole row
        assert 0.4 < float(out.edge.double().mean()) / degree < 0.6


def test_loaders_share_one_copy_and_use_no_workers(data: Data):
    with pyg_accel.patched(loader="cuda"):
        first, second = (NeighborLoader(data, [3], batch_size=50, num_workers=2) for _ in range(2))
    assert not data.x.is_cuda
    assert first.data.x.is_cuda
    assert first.data.x.data_ptr() == second.data.x.data_ptr()
    assert first.num_workers == 0


def test_weights_may_change():
    star = Data(
        edge_index=torch.stack([torch.arange(1, 21), torch.zeros(20, dtype=torch.long)]),
        num_nodes=21, w=torch.eye(20)[3],
    )  # fmt: skip
    with pyg_accel.patched(loader="cuda"):
        sampler = NeighborSampler(star, [1], weight_attr="w")
        assert sampler._sample(torch.tensor([0])).node.tolist() == [0, 4]
        sampler.edge_weight.copy_(torch.eye(20)[8])
        assert sampler._sample(torch.tensor([0])).node.tolist() == [0, 9]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3), (4, 3, 2)], ids=str)
def test_a_gpu_reads_pinned_memory(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = torch.randint(2, shape).to(dtype).pin_memory()
    actual = devices.readable(tensor, torch.device("cuda", 0))
    assert actual.is_cuda
    assert actual.dtype == dtype
    assert actual.shape == shape
    assert torch.equal(actual.cpu(), tensor)
    tensor.fill_(True)
    assert torch.equal(actual.cpu(), tensor)  # the same memory


def test_what_does_not_fit_stays_on_the_host(monkeypatch: pytest.MonkeyPatch):
    data = Data(
        edge_index=torch.randint(N, (2, 2**20)), x=torch.randn(N, 2**12), y=torch.randn(N, 2**10)
    )
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(
        devices, "_room", lambda _: before + data.y.nbytes + 2**20 - torch.cuda.memory_allocated()
    )
    there = devices.data_for(data, torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() - before == data.y.nbytes
    for name in ("edge_index", "x", "y"):
        assert there[name].is_cuda
        assert torch.equal(there[name].cpu(), data[name])
    again = devices.data_for(data, torch.device("cuda", 0))
    assert again.x.data_ptr() == there.x.data_ptr()


def test_pinned_data_are_neither_copied_nor_kept():
    data = Data(x=torch.randn(N, 3).pin_memory(), edge_index=torch.randint(N, (2, E)))
    with pyg_accel.patched(loader="cuda"):
        loader = NeighborLoader(data, [3], batch_size=50)
    assert loader.data.x.data_ptr() == data.x.data_ptr()
    memory = weakref.ref(data.x.untyped_storage())
    batch = next(iter(loader))
    assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    del data
    gc.collect()
    assert memory() is not None
    del loader
    gc.collect()
    assert memory() is None


def queue_work() -> torch.cuda.Event:
    """Keep the current stream busy for about a second; returns the end of it."""
    torch.cuda._sleep(1_500_000_000)
    return torch.cuda.current_stream().record_event()


def test_the_host_is_one_batch_ahead_of_a_step(data: Data):
    loader = NeighborLoader(data.clone().to("cuda"), [5, 5], batch_size=20)
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    end = queue_work()
    first = next(batches)
    assert not end.query()  # it is ready before the step is
    next(batches)
    assert end.query()
    assert torch.equal(first.x.cpu(), data.x[first.n_id.cpu()])


def test_what_a_step_writes_is_read_by_the_next_batch():
    star = Data(
        edge_index=torch.stack([torch.arange(1, 21), torch.zeros(20, dtype=torch.long)]),
        num_nodes=21, w=torch.eye(20)[3], x=torch.zeros(21),
    ).to("cuda")  # fmt: skip
    loader = NeighborLoader(star, [1], weight_attr="w", batch_size=1)
    loader(torch.tensor([0]))
    new = torch.eye(20, device="cuda")[8]
    end = queue_work()
    loader.node_sampler.edge_weight.copy_(new)
    star.x.fill_(1)
    batch = loader(torch.tensor([0]))
    assert batch.n_id.tolist() == [0, 9]
    assert batch.x.tolist() == [1, 1]
    assert end.query()


def test_a_transform_may_raise_and_a_loop_be_left(data: Data):
    def fails(_: Data) -> Data:
        raise KeyError("mine")

    on_gpu = data.clone().to("cuda")
    with pytest.raises(KeyError, match="mine"):
        next(iter(NeighborLoader(on_gpu, [3], transform=fails)))
    for _ in NeighborLoader(on_gpu, [3], batch_size=10):
        break
    assert len([*NeighborLoader(on_gpu, [3], batch_size=100)]) == N // 100


def test_features_may_stay_on_the_host(data: Data):
    data.edge_index = data.edge_index.cuda()
    for batch in NeighborLoader(data, [3, 2], batch_size=100):
        assert batch.edge_index.is_cuda
        assert not batch.x.is_cuda
        assert torch.equal(batch.x, data.x[batch.n_id.cpu()])


def test_what_is_wrong_is_named(data: Data):
    on_gpu = data.clone().to("cuda")
    for seeds in (torch.tensor([N]), torch.tensor([-1]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match="'seed'"):
            NeighborSampler(on_gpu, [2])._sample(seeds)
    with pytest.raises(ValueError, match="fewer samples"):
        NeighborSampler(on_gpu, [2**41], replace=True)._sample(torch.arange(4))
    sampler = NeighborSampler(on_gpu, [3, 3])
    sampler.row[:] = N + 5
    with pytest.raises(ValueError, match="edge_index"):
        sampler._sample(torch.arange(20))
    with pytest.raises(ValueError, match="'loader'"):
        pyg_accel.patch(loader="meta")
    NeighborSampler(on_gpu, [2])._sample(torch.arange(4))  # the device has no error


def test_the_report_says_where_batches_were_sampled(
    data: Data, report_of: Any, monkeypatch: pytest.MonkeyPatch
):
    pyg_accel.reset_report()
    on_gpu = data.clone().to("cuda")
    next(iter(NeighborLoader(on_gpu, [3])))
    (row,) = [row for row in report_of() if row.layer == "NeighborSampler"]
    assert (row.formula, row.backend) == ("neighbors [3]", "cuda")
    monkeypatch.setattr(devices, "cuda_unavailable_reasons", lambda: ["it was not built"])
    pyg_accel.reset_report()
    batch = next(iter(NeighborLoader(on_gpu, [3])))
    assert batch.x.is_cuda
    (row,) = [row for row in report_of() if row.layer == "NeighborSampler"]
    assert row.backend == "cpu"
    assert "it was not built" in row.formula + row.reason


def test_batches_outlive_later_ones(data: Data):
    """Memory of a batch is not another's while work on it is queued."""
    loader = NeighborLoader(data.clone().to("cuda"), [5, 5], batch_size=20)
    held = [(batch.n_id, batch.n_id.clone()) for batch in loader]
    torch.cuda.synchronize()
    assert all(torch.equal(n_id, copy) for n_id, copy in held)


def test_models_train_on_batches(data: Data):
    model = GraphSAGE(3, 16, 2, 4).cuda()
    with pyg_accel.patched(loader="cuda"):
        loader = NeighborLoader(data, [5, 5], batch_size=64)
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
