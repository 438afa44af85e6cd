"""Graphs that a transform builds in worker processes, and what layers make of them."""

import copy
import gc

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GINConv, HeteroConv, SAGEConv
from torch_geometric.transforms import AddSelfLoops, Compose
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import pyg_accel
from pyg_accel.graph import Graph
from pyg_accel.graph import graph as graphs
from pyg_accel.transforms import BuildCSR

pytestmark = pytest.mark.filterwarnings("ignore:.*unable to open shared memory:UserWarning")
N, F = 40, 8


@pytest.fixture
def builds(monkeypatch):
    """What this process sorts: a list that grows with each graph and each transpose."""
    made: list[str] = []
    build, turn = Graph._from_coo, graphs.transpose

    def counted(*args):
        made.append("graph")
        return build(*args)

    def counted_turn(*args):
        made.append("transpose")
        return turn(*args)

    monkeypatch.setattr(Graph, "_from_coo", staticmethod(counted))
    monkeypatch.setattr(graphs, "transpose", counted_turn)
    return made


def sample(seed: int, edges: int = 300) -> Data:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(N, (2, edges), generator=generator)
    return Data(x=torch.randn(N, F, generator=generator), edge_index=edge_index)


class Sampled:
    """Makes a graph of each seed and transforms it, as a loader that samples does in a worker."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, seeds: list[int]) -> Data:
        return self.transform(sample(seeds[0]))


def batches(transform, workers: int = 2, collate=Sampled) -> list[Data]:
    return list(DataLoader(range(4), collate_fn=collate(transform), num_workers=workers))


def step(model, x: Tensor, *graph) -> list[Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, *graph)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def twins(layer):
    """A layer, and a copy of it that is patched."""
    fast = copy.deepcopy(layer)
    pyg_accel.patch(fast)
    return layer, fast


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


LAYERS = {
    "SAGE": lambda: SAGEConv(F, F),
    "SAGE max": lambda: SAGEConv(F, F, aggr="max"),
    "GIN": lambda: GINConv(torch.nn.Linear(F, F)),
    "GAT": lambda: GATConv(F, F, add_self_loops=False),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_builds_nothing_that_a_loader_built(kind, workers, builds, always):
    layer, fast = twins(LAYERS[kind]())
    loaded = batches(BuildCSR(), workers)
    if workers == 0:
        assert builds == ["graph", "transpose"] * len(loaded)
        builds.clear()
    for seed, data in enumerate(loaded):
        assert type(data.edge_index) is Tensor
        assert data.edge_index.equal(sample(seed).edge_index)
        wanted = step(layer, data.x, data.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)
    assert builds == []
    assert all(row.formula for row in pyg_accel.report().rows)


def test_without_the_transform_a_layer_builds_graph_and_transpose(builds, always):
    """The test above can fail."""
    _, fast = twins(LAYERS["SAGE"]())
    for data in batches(lambda data: data):
        step(fast, data.x, data.edge_index)
    assert builds == ["graph", "transpose"] * 4


def test_the_transpose_can_be_left_to_those_who_need_it(builds, always):
    _, fast = twins(LAYERS["SAGE"]())
    (data, *_) = batches(BuildCSR(transpose=False))
    with torch.no_grad():
        fast(data.x, data.edge_index)
    assert builds == []
    step(fast, data.x, data.edge_index)
    assert builds == ["transpose"]


def test_the_flow_of_the_layers_is_that_of_the_transform(builds, always):
    layer, fast = twins(SAGEConv(F, F, flow="target_to_source"))
    for data in batches(BuildCSR(flow="target_to_source")):
        wanted = step(layer, data.x, data.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)
    assert builds == []
    with pytest.raises(ValueError, match="unknown flow 'sideways'"):
        BuildCSR(flow="sideways")


class SampledHetero:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, seeds: list[int]) -> HeteroData:
        data, flat = HeteroData(), sample(seeds[0])
        data["paper"].x, data["author"].x = flat.x, flat.x[:25]
        data["paper", "cites", "paper"].edge_index = flat.edge_index
        data["author", "writes", "paper"].edge_index = torch.stack(
            [flat.edge_index[0] % 25, flat.edge_index[1]]
        )
        return self.transform(data)


def test_every_edge_type_has_a_graph(builds, always):
    model, fast = twins(HeteroConv({
        ("paper", "cites", "paper"): SAGEConv((F, F), F),
        ("author", "writes", "paper"): GATConv((F, F), F, add_self_loops=False),
    }))  # fmt: skip
    for data in batches(BuildCSR(), collate=SampledHetero):
        wanted = model(data.x_dict, data.edge_index_dict)["paper"]
        found = fast(data.x_dict, data.edge_index_dict)["paper"]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        found.sum().backward()
    assert builds == []


def _change(data: Data) -> None:
    data.edge_index[:, :50] = data.edge_index[:, :50].flip(0)


def _replace(data: Data) -> None:
    data.edge_index = data.edge_index.flip(0)


def _copy(data: Data) -> None:
    data.update(copy.deepcopy(data))
    data.edge_index[0].fill_(3)


class Then:
    """A transform that runs after another."""

    def __init__(self, change):
        self.change = change

    def __call__(self, data: Data) -> Data:
        self.change(data)
        return data


@pytest.mark.one_of(2)
@pytest.mark.parametrize("place", ["worker", "main process"])
@pytest.mark.parametrize("change", [_change, _replace, _copy])
def test_an_edge_index_that_was_changed_has_no_old_graph(change, place, builds, always):
    layer, fast = twins(LAYERS["SAGE"]())
    in_worker = Compose([BuildCSR(), Then(change)])
    for data in batches(in_worker if place == "worker" else BuildCSR()):
        if place == "main process":
            change(data)
        assert type(data.edge_index) is Tensor
        wanted = step(layer, data.x, data.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)
    assert builds == ["graph", "transpose"] * 4


def test_more_nodes_than_the_data_have_make_another_graph(builds, always):
    layer, fast = twins(LAYERS["SAGE"]())
    (data, *_) = batches(BuildCSR())
    x = torch.cat([data.x, data.x])
    wanted = step(layer, x, data.edge_index)
    close(step(fast, x, data.edge_index), wanted)
    assert builds == ["graph", "transpose"]


def test_data_that_do_not_move_keep_their_graph_and_copies_have_none(builds, always):
    _, fast = twins(LAYERS["SAGE"]())
    (data, *_) = batches(BuildCSR())
    moved = data.to("cpu")
    step(fast, moved.x, moved.edge_index)
    assert builds == []
    other = data.clone()
    step(fast, other.x, other.edge_index)
    assert builds == ["graph", "transpose"]


def test_graphs_go_with_their_batches(always, stored_graphs):
    before = stored_graphs()
    loaded = batches(BuildCSR())
    assert stored_graphs() > before
    del loaded
    gc.collect()
    assert stored_graphs() == before


class Batched:
    """What docs/how-to/build_graphs_in_workers.md says of many small graphs."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, seeds: list[int]) -> Data:
        return self.transform(Batch.from_data_list([sample(seed, 30) for seed in (*seeds, 9)]))


def test_a_batch_of_small_graphs_is_built_after_it_was_collated(builds, always):
    layer, fast = twins(LAYERS["GIN"]())
    for seed, data in enumerate(batches(BuildCSR(), collate=Batched)):
        assert [part.num_edges for part in data.to_data_list()] == [30, 30]
        assert data[1].edge_index.equal(sample(9, 30).edge_index), seed
        wanted = step(layer, data.x, data.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)
    assert builds == []


class Graphs(torch.utils.data.Dataset):
    """Graphs that are transformed one by one, as those of PyG's datasets."""

    def __getitem__(self, seed: int) -> Data:
        return BuildCSR()(sample(seed, 30))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_graphs_that_are_transformed_before_they_are_collated_stay_right(
    batch_size, workers, always
):
    layer, fast = twins(LAYERS["GIN"]())
    loader = GraphLoader(Graphs(), batch_size, num_workers=workers)
    plain = GraphLoader([sample(seed, 30) for seed in range(4)], batch_size)
    for data, other in zip(loader, plain, strict=True):
        assert type(data.edge_index) is Tensor
        assert data.edge_index.equal(other.edge_index)
        wanted = step(layer, data.x, other.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)


def test_loops_are_added_before_the_graph_is_built(builds, always):
    """So that nothing is built for layers that add them otherwise, as the docs say."""
    layer, fast = twins(GATConv(F, F, add_self_loops=False))
    for data in batches(Compose([AddSelfLoops(), BuildCSR()])):
        wanted = step(layer, data.x, data.edge_index)
        close(step(fast, data.x, data.edge_index), wanted)
    assert builds == []


def test_data_without_a_plain_edge_index_are_left_alone():
    transform = BuildCSR()
    assert transform(Data(x=torch.randn(3, 2))).num_nodes == 3
    for edge_index in (torch.eye(3).to_sparse_csr(), torch.zeros(2, 3), torch.zeros(3, 2).long()):
        data = Data(x=torch.randn(3, 2), edge_index=edge_index)
        assert transform(data).edge_index is edge_index
    # Two kinds of nodes in one Data, or fewer than the edges name: a layer is told otherwise.
    for edge_index in (torch.tensor([[5, 6], [0, 1]]), torch.tensor([[0, -1], [0, 1]])):
        data = Data(x=torch.randn(3, 2), edge_index=edge_index)
        assert transform(data).edge_index is edge_index
    assert str(transform) == "BuildCSR(transpose=True, flow='source_to_target')"


def test_a_graph_that_was_built_ahead_is_not_new():
    """At default settings: a new graph of 6,000 edges is not worth sorting, but this one is."""
    torch.manual_seed(0)
    nodes, layer = 500, SAGEConv(16, 16)
    x = torch.randn(nodes, 16)
    with pyg_accel.patched():
        for _ in range(2):  # shows what the layer does
            layer(x, edges := torch.randint(nodes, (2, 6_000)))
            layer(x, edges)
        pyg_accel.reset_report()
        data = Data(x=x, edge_index=torch.randint(nodes, (2, 6_000)))
        layer(x, data.edge_index.clone())
        layer(x, BuildCSR()(data).edge_index)
    reasons = {row.reason.split(" of fewer")[0]: row.calls for row in pyg_accel.report().rows}
    assert reasons == {"": 1, "small: a new graph": 1}


@pytest.mark.skipif(
    not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason="NeighborLoader needs pyg-lib or torch-sparse"
)
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib' installation")
def test_a_neighbor_loader_builds_graphs_in_its_workers(builds, always):
    layer, fast = twins(LAYERS["SAGE"]())
    data = sample(0, 400)
    loader = NeighborLoader(data, [5, 3], batch_size=10, transform=BuildCSR(), num_workers=2)
    for batch in loader:
        wanted = step(layer, batch.x, batch.edge_index)
        close(step(fast, batch.x, batch.edge_index), wanted)
    assert builds == []
