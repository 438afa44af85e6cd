"""Rewritten layers inside ``sampled()``: the sums that patched layers take, and their costs."""

import pytest
import torch
from torch_geometric import nn

import pyg_accel
from pyg_accel import layers
from pyg_accel.rewrite import associations, optimize
from pyg_accel.rewrite.optimized import OptimizedModel
from pyg_accel.rewrite.select import Options

N, E, WIDTH = 60, 1500, 4
pytestmark = pytest.mark.usefixtures("always")


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs():
    edge_index = torch.randint(N, (2, E))
    edge_index[:, :5] = edge_index[:1, :5]  # self-loops
    return torch.randn(N, 6), edge_index


LAYERS = {
    "gcn": lambda: nn.GCNConv(6, 4),
    "mean": lambda: nn.SAGEConv(6, 4),
    "sum": lambda: nn.SAGEConv(6, 4, aggr="sum"),
    "gin": lambda: nn.GINConv(torch.nn.Linear(6, 4)),
    "tag": lambda: nn.TAGConv(6, 4, K=2),
    "gat": lambda: nn.GATConv(6, 4),
    "heads": lambda: nn.GATConv(6, 4, heads=3),
    "gatv2": lambda: nn.GATv2Conv(6, 4, heads=2),
    "maxk": lambda: layers.MaxKSAGEConv(6, 4, k=2),
}


@pytest.mark.one_of(10)
@pytest.mark.parametrize("rescale", ["row", "none"])
@pytest.mark.parametrize("strategy", ["fastrand", "bucket"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_tree_takes_the_sample_of_patched_layers(name, strategy, rescale):
    conv, (x, edge_index) = LAYERS[name]().eval(), inputs()
    actual = associations(conv, x, edge_index)
    exact = conv(x, edge_index)
    with pyg_accel.patched(), pyg_accel.sampled(WIDTH, strategy, rescale=rescale):
        right = conv(x, edge_index)
        for tree in actual.all:
            layer = OptimizedModel(conv, Options(choose=tree))
            torch.testing.assert_close(layer(x, edge_index), right, msg=str(tree))
        assert not torch.allclose(right, exact) or name == "maxk"
    torch.testing.assert_close(layer(x, edge_index), exact)


def test_the_bill_says_sampled_and_a_decision_does_not_outlive_the_block():
    conv, (x, edge_index) = nn.SAGEConv(6, 4).eval(), inputs()
    fast = optimize(conv, x, edge_index, static=("x",))
    exact = fast(x, edge_index)
    with pyg_accel.patched():
        for width in (3, 5, 3):
            with pyg_accel.sampled(width):
                torch.testing.assert_close(fast(x, edge_index), conv(x, edge_index))
                with open("/dev/null", "w") as nowhere:
                    (plan,) = pyg_accel.explain(fast, file=nowhere).layers
                chosen = next(tree for tree in plan.trees if tree.chosen)
                work = (*chosen.once, *chosen.forward)
                assert [w for w in work if w.startswith("sampled_spmm A")]
    assert torch.equal(fast(x, edge_index), exact)


def test_training_is_refused():
    conv, (x, edge_index) = nn.SAGEConv(6, 4), inputs()
    fast = optimize(conv, x, edge_index, train=True)
    with (
        pyg_accel.patched(),
        pyg_accel.sampled(3),
        pytest.raises(RuntimeError, match="training mode"),
    ):
        fast(x, edge_index)
