"""``sampled()`` around patched models, and ``calibrate_sampling()``."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import SparseTensor

import pyg_accel
from pyg_accel import Graph, ops
from pyg_accel.patching import sampling
from pyg_accel.settings import settings

NODES, EDGES = 40, 900
edge_index = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(4))
graph = Graph.from_edge_index(edge_index, (NODES, NODES))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NODES, 6)


def sampled_output(layer: torch.nn.Module, *args, width: int = 5, **how) -> Tensor:
    layer.eval()
    with pyg_accel.patched(), pyg_accel.sampled(width, **how), torch.no_grad():
        return layer(*args)


@pytest.mark.parametrize("strategy", ["bucket", "fastrand"])
def test_means_go_over_the_sampled_edges(x, strategy, report_of):
    actual = sampled_output(pyg.SimpleConv(aggr="mean"), x, edge_index, strategy=strategy)
    expected = ops.sampled_spmm(graph, x, width=5, strategy=strategy, reduce="mean")
    torch.testing.assert_close(actual, expected)
    (row,) = report_of()
    assert row.formula == f"mean_j u0 over 5 edges by {strategy}"


@pytest.mark.parametrize("rescale", ["row", "none"])
def test_weighted_sums_of_a_gcn_are_sampled_and_rescaled(x, rescale, report_of):
    layer = pyg.GCNConv(6, 6, bias=False)
    actual = sampled_output(layer, x, edge_index, rescale=rescale)
    loops, weight = gcn_norm(edge_index, num_nodes=NODES)
    whole = Graph.from_edge_index(loops, (NODES, NODES))
    expected = ops.sampled_spmm(whole, layer.lin(x), weight, width=5, rescale=rescale,
                                edge_order=True)  # fmt: skip
    torch.testing.assert_close(actual, expected.detach())
    assert "over 5 edges by fastrand" in report_of()[0].formula


def test_a_width_above_every_degree_changes_nothing(x, always):
    for layer in (pyg.SAGEConv(6, 3), pyg.GCNConv(6, 3), pyg.GATConv(6, 3, heads=2)):
        layer.eval()
        with pyg_accel.patched(), torch.no_grad():
            exact = layer(x, edge_index)
        actual = sampled_output(layer, x, edge_index, width=NODES * NODES)
        torch.testing.assert_close(actual, exact)


def test_attention_weighs_the_sampled_edges(x, report_of):
    out = sampled_output(pyg.GATConv(6, 3, heads=2), x, edge_index)
    assert out.isfinite().all()
    formulas = [row.formula for row in report_of()]
    assert any("sum_j mul(e0,u1) over 5 edges by fastrand" in text for text in formulas)


@pytest.mark.parametrize("aggr", ["max", ["mean", "max"], "std"], ids=str)
def test_other_aggregations_stay_exact_and_the_report_says_so(x, aggr, report_of, always):
    layer = pyg.SimpleConv(aggr=aggr)
    with pyg_accel.patched():
        exact = layer.eval()(x, edge_index)
    pyg_accel.reset_report()
    torch.testing.assert_close(sampled_output(layer, x, edge_index), exact)
    assert "(exact: only sums and means are sampled)" in report_of()[0].formula


def test_messages_that_are_no_product_stay_exact(x, report_of):
    class Gated(pyg.SimpleConv):
        def message(self, x_i, x_j):
            return torch.sigmoid(x_i) * x_j

    class PerFeature(pyg.SimpleConv):
        def message(self, x_j):
            return x_j * torch.ones(EDGES, 6)

    for layer in (Gated(aggr="sum"), PerFeature(aggr="sum")):
        sampled_output(layer, x, edge_index)
    assert all("(exact: " in row.formula for row in report_of())


@pytest.mark.parametrize("kind", ["torch_csr", "torch_coo", "sparse_tensor"])
def test_sparse_matrices_are_sampled_too(x, kind, report_of):
    layer = pyg.SAGEConv(6, 3)
    if kind == "sparse_tensor":
        pytest.importorskip("torch_sparse")
        adj = SparseTensor.from_edge_index(edge_index, sparse_sizes=(NODES, NODES)).t()
    else:
        adj = torch.sparse_csr_tensor(graph.rowptr, graph.col, torch.ones(EDGES), (NODES, NODES))
        adj = adj if kind == "torch_csr" else adj.to_sparse_coo()
    sampled_output(layer, x, adj)
    assert "over 5 edges by fastrand" in report_of()[0].formula


def test_training_is_refused(x):
    layer = pyg.SAGEConv(6, 3)
    with pyg_accel.patched(), pyg_accel.sampled(5):
        with pytest.raises(RuntimeError, match=r"(?s)SAGEConv.*eval"):
            layer(x, edge_index)
        out = layer.eval()(x.requires_grad_(), edge_index)
        with pytest.raises(RuntimeError, match="no gradient"):
            out.sum().backward()


def test_nothing_patched_is_an_error():
    with pytest.raises(RuntimeError, match="patch"), pyg_accel.sampled():
        pass


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"width": 0}, "at least 1"),
        ({"width": "8"}, "whole number"),
        ({"width": 1.5}, "whole number"),
        ({"strategy": "x"}, "bucket"),
        ({"rescale": "mean"}, "row"),
    ],
)
def test_what_does_not_fit_is_refused(how, words):
    with pyg_accel.patched(), pytest.raises(ValueError, match=words), pyg_accel.sampled(**how):
        pass


def test_blocks_nest_and_end_with_an_exception(x):
    layer = pyg.SimpleConv(aggr="sum").eval()
    with pyg_accel.patched():
        exact = layer(x, edge_index)
        with pyg_accel.sampled(5):
            five = layer(x, edge_index)
            with pyg_accel.sampled(2):
                assert not torch.equal(layer(x, edge_index), five)
            assert torch.equal(layer(x, edge_index), five)
        with pytest.raises(KeyError), pyg_accel.sampled(5):
            raise KeyError
        assert sampling.in_force() is None
        assert sampling.state.key == ""
        torch.testing.assert_close(layer(x, edge_index), exact)


def test_a_sample_is_not_verified(x):
    settings.verify = True
    sampled_output(pyg.SimpleConv(aggr="sum"), x, edge_index)


def test_only_the_layers_of_a_patched_model_are_sampled(x, report_of):
    ours, theirs = pyg.SimpleConv(aggr="sum").eval(), pyg.SimpleConv(aggr="sum").eval()
    with pyg_accel.patched(ours), pyg_accel.sampled(2):
        assert not torch.allclose(ours(x, edge_index), theirs(x, edge_index))
    (row,) = report_of()
    assert row.calls == 1


@pytest.mark.slow
def test_compiled_models_follow_the_block(x):
    layer = pyg.SimpleConv(aggr="sum").eval()
    with pyg_accel.patched(), torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        exact = compiled(x, edge_index)
        with pyg_accel.sampled(5):
            expected, actual = layer(x, edge_index), compiled(x, edge_index)
        again = compiled(x, edge_index)
        with pyg_accel.sampled(2):
            fewer = compiled(x, edge_index)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(again, exact)
    assert not torch.allclose(fewer, actual)


class Mean(torch.nn.Module):
    """Two classes, told apart by the mean over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.SimpleConv(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.conv(x, edge_index, edge_weight)


def noisy_task(nodes: int = 400, degree: int = 60) -> Data:
    """Neighbours are of one's own class in 6 of 10 cases, so that few say little."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (nodes,), generator=generator)
    target = torch.arange(nodes).repeat_interleave(degree)
    same = torch.rand(target.numel(), generator=generator) < 0.65
    wanted = torch.where(same, y[target], 1 - y[target])
    members = [(y == c).nonzero().flatten() for c in (0, 1)]
    draw = torch.rand(target.numel(), generator=generator)
    source = torch.stack([m[(draw * m.numel()).long()] for m in members])
    source = source.gather(0, wanted.unsqueeze(0)).squeeze(0)
    return Data(x=torch.nn.functional.one_hot(y, 2).float(), y=y,
                edge_index=torch.stack([source, target]),
                val_mask=torch.ones(nodes, dtype=torch.bool))  # fmt: skip


def test_calibration_finds_the_smallest_width_within_the_drop():
    data, model = noisy_task(), torch.nn.Sequential(Mean())
    model.forward = model[0].forward
    model.train()[0].eval()
    seen: list[float] = []

    def metric(out: Tensor, y: Tensor) -> float:
        seen.append(float((out.argmax(-1) == y).double().mean()))
        return seen[-1]

    widths = (64, 1, 4, 32, 16)
    actual = pyg_accel.calibrate_sampling(
        model, data, data.val_mask, 0.02, widths=widths, metric=metric
    )
    assert actual == pyg_accel.calibrate_sampling(model, data, data.val_mask, 0.02, widths=widths)
    every, *scores = seen
    assert actual == sorted(widths)[len(scores) - 1]  # larger ones are not tried
    assert scores[-1] >= every - 0.02
    assert all(score < every - 0.02 for score in scores[:-1])
    assert every - scores[0] > 0.1  # a single edge says little
    assert (model.training, model[0].training) == (True, False)
    assert not sampling.overrides.installed()


def test_calibration_says_when_no_width_will_do():
    data, model = noisy_task(), Mean()
    exact = model(data.x, data.edge_index)[data.val_mask]

    def same(out: Tensor, _: Tensor) -> float:
        return float(torch.allclose(out, exact, atol=1e-4))

    inputs = (model, data, data.val_mask)
    assert pyg_accel.calibrate_sampling(*inputs, widths=(1, 2), metric=same) is None
    assert pyg_accel.calibrate_sampling(*inputs, widths=(1, 64), metric=same) == 64  # all edges


def test_calibration_takes_weights_metrics_and_matrices():
    data = noisy_task()
    data.edge_weight = torch.ones(data.edge_index.size(1))
    seen = []

    def metric(out: Tensor, y: Tensor) -> float:
        seen.append(out.shape)
        return 0.5

    actual = pyg_accel.calibrate_sampling(Mean(), data, data.val_mask, metric=metric, widths=(8,))
    assert (actual, len(seen)) == (8, 2)
    adj = torch.sparse_coo_tensor(data.edge_index.flip(0), data.edge_weight, (400, 400))
    matrix = adj.coalesce().to_sparse_csr()
    for name in ("adj_t", "edge_index"):
        other = Data(x=data.x, y=data.y)
        other[name] = matrix
        actual = pyg_accel.calibrate_sampling(
            pyg.SAGEConv(2, 2), other, data.val_mask, widths=(8,), metric=metric
        )
        assert actual == 8


def test_calibration_refuses_a_model_of_which_nothing_is_sampled():
    data = noisy_task()
    for model in (pyg.GraphSAGE(2, 8, 2, 2, aggr="max"), pyg.EdgeCNN(2, 8, 2, 2)):
        name = type(model).__name__
        with pytest.raises(ValueError, match=f"nothing of {name} is sampled"):
            pyg_accel.calibrate_sampling(model, data, data.val_mask)


def test_calibration_of_a_compiled_model_sees_its_samples():
    data, model = noisy_task(), torch.compile(Mean(), backend="aot_eager")
    for _ in range(2):  # the second time nothing is traced
        assert pyg_accel.calibrate_sampling(model, data, data.val_mask, widths=[64]) == 64


def test_calibration_of_numbers_wants_a_metric():
    data = noisy_task()
    numbers = Data(x=data.x, edge_index=data.edge_index, y=torch.randn(400))
    mask = data.val_mask
    with pytest.raises(ValueError, match="pass 'metric'"):
        pyg_accel.calibrate_sampling(Mean(), numbers, mask)
    several = Data(x=data.x, edge_index=data.edge_index, y=torch.ones(400, 2).long())
    with pytest.raises(ValueError, match="one class a node"):
        pyg_accel.calibrate_sampling(Mean(), several, mask)
    actual = pyg_accel.calibrate_sampling(
        Mean(), numbers, mask, widths=[64],
        metric=lambda out, y: -float((out[:, 0] - y).square().mean()),
    )  # fmt: skip
    assert actual == 64


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"widths": ()}, "'widths' to be one or more"),
        ({"widths": (True,)}, "'widths' to be a whole number"),
        ({"widths": (4, 8.5)}, "'widths' to be a whole number"),
        ({"forward": lambda model, data: data.x[:3]}, "400 rows"),
        ({"forward": lambda model, data: data.x[:, 0]}, r"\[N, C\]"),
    ],
)
def test_calibration_names_the_argument_that_does_not_fit(inputs, words):
    data = noisy_task()
    with pytest.raises(ValueError, match=words):
        pyg_accel.calibrate_sampling(Mean(), data, data.val_mask, **inputs)


def test_calibration_refuses_what_does_not_fit():
    data = noisy_task()
    with pytest.raises(ValueError, match="mask"):
        pyg_accel.calibrate_sampling(Mean(), data, torch.zeros(400, dtype=torch.bool))
    with pytest.raises(ValueError, match="one per node"):
        pyg_accel.calibrate_sampling(Mean(), data, torch.ones(7, dtype=torch.bool))
    with pytest.raises(ValueError, match="max_drop"):
        pyg_accel.calibrate_sampling(Mean(), data, data.val_mask, max_drop=-0.1)
    with pytest.raises(ValueError, match="'y'"):
        pyg_accel.calibrate_sampling(Mean(), Data(x=data.x), data.val_mask)
    with pytest.raises(ValueError, match="at least 1"):
        pyg_accel.calibrate_sampling(Mean(), data, data.val_mask, widths=(0,))


@pytest.mark.full
@pytest.mark.parametrize("conv", [pyg.GCNConv, pyg.SAGEConv])
@pytest.mark.parametrize("name", ["Cora", "facebook-pages"])
def test_a_calibrated_width_keeps_the_accuracy_of_trained_models(name, conv, data_root):
    benchmark = pytest.importorskip("benchmarks.papers.es_spmm.models")
    datasets = pytest.importorskip("benchmarks.tools.datasets")
    data = datasets.load_task(name, data_root)
    model = benchmark.model_of(conv, data, learned=True)
    actual = pyg_accel.calibrate_sampling(model, data, data.val_mask, 0.01)
    assert actual is not None
    with pyg_accel.patched(model), torch.no_grad():
        exact = benchmark.accuracy(model, data, data.test_mask)
        with pyg_accel.sampled(actual):
            assert benchmark.accuracy(model, data, data.test_mask) >= exact - 0.01


def test_the_example_draws_accuracy_by_width(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    figure, path = tmp_path / "figure.png", Path(__file__).parents[2] / "examples"
    options = ["--nodes", "300", "--degree", "40", "--plot", str(figure)]
    monkeypatch.setattr(sys, "argv", ["calibrate_sampling.py", *options])
    runpy.run_path(str(path / "calibrate_sampling.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("all edges: accuracy ")
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == ["4", "8", "16", "32", "64"]
    assert lines[-1].startswith("width to use, by the validation nodes: ")
    assert figure.stat().st_size > 1000
    assert not sampling.overrides.installed()
