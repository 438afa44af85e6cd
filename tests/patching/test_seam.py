"""What ``patch()`` gives PyG in the place of pyg-lib, and takes back."""

import io
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import nn, utils
from torch_geometric.data import Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    ShaDowKHopSampler,
)
from torch_geometric.nn.conv import spline_conv
from torch_geometric.nn.models import DimeNetPlusPlus, SchNet

import pyg_accel
from pyg_accel.pyg_lib import seam
from pyg_accel.runtime.native import cpu_unavailable_reasons
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.skipif(torch_geometric.typing.WITH_PYG_LIB, reason="pyg-lib is installed"),
    pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="there is no native library"),
]


def state() -> dict[str, object]:
    """Every name of PyG's modules and of torch.ops that may change."""
    names = {"pyg_lib", "SparseTensor", "spline_basis", "spline_weighting"}
    actual = {
        f"{name}.{key}": value
        for name, module in list(sys.modules.items())
        if name.startswith("torch_geometric")
        for key, value in vars(module).items()
        if key.startswith("WITH_") or key in names
    }
    return actual | {"torch.ops.pyg": vars(torch.ops).get("pyg")}


@pytest.fixture
def patched() -> Iterator[None]:
    with pyg_accel.patched():
        yield


def points() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(40, 3), torch.arange(40) // 10


def test_unpatch_restores_every_flag():
    before = state()
    with pyg_accel.patched():
        assert torch_geometric.typing.WITH_KNN
        with pyg_accel.patched():
            pass
        assert nn.models.node2vec.WITH_PYG_LIB
        assert state() != before
    assert {k: v for k, v in state().items() if k in before} == before
    with pytest.raises(ImportError, match="pyg-lib"):
        nn.knn_graph(torch.rand(4, 2), 1)


def test_the_patch_of_a_model_gives_nothing():
    model = nn.GCNConv(2, 2)
    with pyg_accel.patched(model):
        assert not torch_geometric.typing.WITH_KNN


def test_where_pyg_lib_is_installed_it_stays_unless_a_setting_asks(monkeypatch):
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    with pyg_accel.patched():
        assert not torch_geometric.typing.WITH_KNN
    settings.replace_pyg_lib = True
    with pyg_accel.patched():
        assert torch_geometric.typing.WITH_KNN


def test_modules_that_are_imported_between_two_blocks_get_it_too(monkeypatch):
    with pyg_accel.patched():
        pass
    late = ModuleType("torch_geometric.late")
    late.WITH_KNN = torch_geometric.typing.WITH_KNN
    monkeypatch.setitem(sys.modules, late.__name__, late)
    for _ in range(2):
        with pyg_accel.patched():
            assert late.WITH_KNN
        assert not late.WITH_KNN


def test_a_flag_that_is_changed_between_two_blocks_is_restored(monkeypatch):
    with pyg_accel.patched():
        pass
    monkeypatch.setattr(spline_conv, "spline_basis", print)
    with pyg_accel.patched():
        assert spline_conv.spline_basis is not print
    assert spline_conv.spline_basis is print


def test_a_version_of_pyg_without_a_flag_gets_the_others(monkeypatch):
    monkeypatch.delattr(torch_geometric.typing, "WITH_KNN")
    monkeypatch.setattr(seam, "_looked", 0)  # the places of other tests are theirs
    monkeypatch.setattr(seam, "_places", [])
    with pyg_accel.patched():
        assert torch_geometric.typing.WITH_METIS
        assert not hasattr(torch_geometric.typing, "WITH_KNN")


def test_functions_of_points_run(patched):
    x, batch = points()
    edges = nn.knn_graph(x, 3, batch)
    assert edges.shape == (2, 120)
    assert (edges[1].diff() >= 0).all()
    assert (batch[edges[0]] == batch[edges[1]]).all()
    distance = torch.cdist(x, x).masked_fill(batch[:, None] != batch, torch.inf)
    assert nn.radius_graph(x, 0.4, batch, loop=True).size(1) == int((distance < 0.4).sum())
    assert torch.equal(nn.nearest(x, x[5:], batch, batch[5:])[5:], torch.arange(35))
    assert nn.fps(x, batch, 0.3).numel() == 12
    assert nn.voxel_grid(x, 0.5, batch).unique().numel() <= 32
    assert nn.graclus(edges, num_nodes=40).bincount().max() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x, batch: nn.knn_graph(x, 1, batch),
        lambda x, batch: nn.fps(x, batch),
        lambda x, batch: nn.DynamicEdgeConv(nn.Linear(4, 2), 1)(x, batch),
        lambda x, batch: nn.GravNetConv(2, 2, 2, 2, 1)(x, batch),
        lambda x, batch: nn.XConv(2, 2, dim=2, kernel_size=2, hidden_channels=2)(x, x, batch),
    ],
    ids=["knn_graph", "fps", "DynamicEdgeConv", "GravNetConv", "XConv"],
)
def test_a_batch_that_is_not_sorted_is_refused(patched, call):
    call(torch.rand(4, 2), torch.tensor([0, 0, 2, 2]))
    with pytest.raises(ValueError, match="'batch' to ascend"):
        call(torch.rand(4, 2), torch.tensor([1, 1, 0, 0]))
    with pytest.raises(ValueError, match="'batch' from 0"):
        call(torch.rand(4, 2), torch.tensor([-1, -1, 0, 0]))


def test_a_batch_beyond_its_size_is_refused(patched):
    with pytest.raises(ValueError, match="'batch' from 0"):
        nn.knn_graph(torch.rand(4, 2), 1, torch.tensor([0, 0, 1, 1]), batch_size=1)


def test_functions_compile_and_script(patched):
    x, _ = points()
    compiled = torch.compile(lambda x: nn.knn_graph(x, 3) + 0, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), nn.knn_graph(x, 3))
    assert torch.equal(torch.jit.script(nn.knn_graph)(x, 3), nn.knn_graph(x, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("rows", [0, 9])
def test_a_softmax_of_integers_is_floating_point(dtype, rows):
    scores, ptr = torch.arange(rows).to(dtype), torch.tensor([0, rows // 2, rows])
    wanted = torch.cat([part.softmax(0) for part in scores.float().split(ptr.diff().tolist())])
    with pyg_accel.patched():  # PyG's own needs torch-scatter for integers
        torch.testing.assert_close(utils.softmax(scores, ptr=ptr), wanted)


def test_layers_and_models_run(patched):
    x, batch = points()
    edges = nn.knn_graph(x, 4, batch)
    assert nn.DynamicEdgeConv(nn.MLP([6, 8], norm=None), 3)(x, batch).shape == (40, 8)
    assert nn.GravNetConv(3, 4, 2, 2, 3)(x, batch).shape == (40, 4)
    assert nn.XConv(3, 4, 3, 3, hidden_channels=8)(x, x, batch).shape == (40, 4)
    spline = nn.SplineConv(3, 4, dim=2, kernel_size=3)
    assert spline(x, edges, torch.rand(edges.size(1), 2)).shape == (40, 4)
    z = torch.randint(1, 9, (40,))
    assert SchNet(8, 8, 2, 4, cutoff=0.5)(z, x, batch).shape == (4, 1)
    dimenet = DimeNetPlusPlus(8, 1, 1, 4, 4, 8, 2, 3, cutoff=0.6)
    assert dimenet(z, x, batch).isfinite().all()
    walks = nn.Node2Vec(edges, 8, 4, 3, p=0.5, q=2.0, num_nodes=40)
    positive, negative = next(iter(walks.loader(batch_size=10)))
    assert walks.loss(positive, negative).isfinite()
    steps = torch.stack([positive[:, :-1], positive[:, 1:]]).view(2, -1)
    assert {*map(tuple, steps.t().tolist())} <= {*map(tuple, edges.t().tolist())}


def test_loaders_of_subgraphs_give_edges_of_the_graph(patched):
    x, _ = points()
    edges = nn.knn_graph(x, 4)
    data = Data(x=x, edge_index=edges, n_id=torch.arange(40), e_id=torch.arange(160))
    loaders = [
        ClusterLoader(ClusterData(data, 4, log=False), batch_size=2),
        GraphSAINTNodeSampler(data, 10, num_steps=2, sample_coverage=3, log=False),
        GraphSAINTEdgeSampler(data, 10),
        GraphSAINTRandomWalkSampler(data, 5, walk_length=3),
        ShaDowKHopSampler(data, 2, 3, batch_size=4),
    ]
    for loader in loaders:
        batch = next(iter(loader))
        assert batch.num_edges
        assert torch.equal(edges[:, batch.e_id], batch.n_id[batch.edge_index])
        assert torch.equal(x[batch.n_id], batch.x)


def test_the_report_and_doctor_name_what_serves(patched):
    pyg_accel.reset_report()
    nn.knn_graph(torch.rand(9, 2), 2)
    rows = {row.layer: row.backend for row in pyg_accel.report(io.StringIO()).rows}
    assert rows["knn"] == "cpu"
    assert seam.description().startswith("pyg_accel: knn cpu")


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("way", ["eager", "script", "compile"])
def test_a_matrix_for_each_type_on_any_number_of_rows(rows, way):
    layer, types = nn.HeteroLinear(3, 5, num_types=4), torch.randint(4, (rows,))
    x = torch.randn(rows, 3, requires_grad=True)
    inputs = [x, *layer.parameters()]
    right = layer(x, types)
    with pyg_accel.patched():
        model = layer
        if way == "script":
            model = torch.jit.script(layer)
        elif way == "compile":
            torch._dynamo.reset()
            model = torch.compile(layer, backend="eager")
        out = model(x, types)
    torch.testing.assert_close(out, right)
    for mine, other in zip(
        *(torch.autograd.grad(t.sin().sum(), inputs) for t in (out, right)), strict=True
    ):
        torch.testing.assert_close(mine, other)
