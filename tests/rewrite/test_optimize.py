"""``optimize()``: the same model, parameters and modes."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as nn

import pyg_accel
from pyg_accel import layers as layers_of_maxk
from pyg_accel import optimize
from pyg_accel.errors import VerificationError
from pyg_accel.rewrite.optimized import rewritten_layers
from pyg_accel.settings import settings

N, E = 200, 1500


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.GCNConv(12, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = nn.SAGEConv(8, 3)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.second(x, edge_index)


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Net()
        self.head = nn.GCNConv(3, 2)

    def forward(self, x, edge_index):
        return self.head(self.encoder(x, edge_index), edge_index)


def inputs(width=12):
    return torch.randn(N, width), torch.randint(N, (2, E))


def layers(model):
    return list(rewritten_layers(model).values())


def same(model, fast, *args, **kwargs):
    """Compare results and gradients in both modes, with the same random numbers."""
    for mode in (True, False):
        outs, grads = [], []
        for module in (model, fast):
            module.train(mode)
            torch.manual_seed(1)
            out = module(*args, **kwargs)
            named = {n.split("original_code.")[-1].removeprefix("_orig_mod."): p
                     for n, p in module.named_parameters()}  # fmt: skip
            parameters = [named[name] for name, _ in model.named_parameters()]
            seed = torch.linspace(0, 1, out.numel()).view_as(out)
            grads.append(torch.autograd.grad(out, parameters, seed, allow_unused=True))
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-9, atol=1e-10)
        for mine, theirs in zip(grads[1], grads[0], strict=True):
            if theirs is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


MODELS = {
    "user": Net,
    "nested": Nested,
    "layer": lambda: nn.GCNConv(12, 4),
    "sequential": lambda: nn.Sequential("x, edge_index", [
        (torch.nn.Dropout(0.5), "x -> x"),
        (nn.GCNConv(12, 8), "x, edge_index -> x1"),
        torch.nn.ReLU(),
        (nn.SAGEConv(8, 8), "x1, edge_index -> x2"),
        (lambda a, b: torch.cat([a, b], 1), "x1, x2 -> x"),
        torch.nn.Linear(16, 3),
    ]),
    "gcn": lambda: nn.GCN(12, 8, 3, 5, dropout=0.5, norm="batch", jk="cat"),
    "sage": lambda: nn.GraphSAGE(12, 8, 3, 5, dropout=0.5, norm="layer", jk="lstm"),
    "gin": lambda: nn.GIN(12, 8, 2, 5, dropout=0.5, norm="batch"),
    "gat": lambda: nn.GAT(12, 8, 2, 5, heads=2, jk="max"),
    "sage-last": lambda: nn.GraphSAGE(12, 8, 2, 5, act="elu", act_first=True),
}  # fmt: skip


@pytest.mark.parametrize("run", [optimize, pyg_accel.plan, pyg_accel.explain])
def test_examples_in_another_order_and_arrays_are_refused_by_name(run):
    x, edge_index = torch.randn(20, 4), torch.randint(20, (2, 60))
    with pytest.raises(ValueError, match=r"'edge_index' to be whole numbers \[2, E\].*\[20, 4\]"):
        run(nn.GCN(4, 4, 2), edge_index, x)
    with pytest.raises(ValueError, match=r"'edge_index'.*\[2, E\].*float32"):
        run(nn.GCN(4, 4, 2), x, edge_index=edge_index.float())
    with pytest.raises(ValueError, match=r"'edge_index'.*\[60, 2\]"):
        run(nn.GCN(4, 4, 2), x, edge_index.t())
    with pytest.raises(TypeError, match=r"'x' to be a tensor .*ndarray \[20, 4\]"):
        run(nn.GCN(4, 4, 2), x.numpy(), edge_index.numpy())
    with pytest.raises(TypeError, match=r"'edge_index' to be a tensor"):
        run(nn.GCN(4, 4, 2), x, edge_index.numpy())
    with pytest.raises(TypeError, match=r"'edge_index' to be a tensor \(got a list\)"):
        run(nn.GCN(4, 4, 2), x, edge_index.tolist())


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_results_gradients_names_and_modes_stay(name, train):
    model = MODELS[name]()
    args = inputs()
    fast = optimize(model, *args, train=train)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert set(map(id, fast.parameters())) == set(map(id, model.parameters()))
    same(model, fast, *args)
    assert layers(fast)
    assert all(layer.decisions and not layer.reasons for layer in layers(fast))


def test_a_module_that_is_frozen_stays_frozen():
    model, args = Nested(), inputs()
    fast = optimize(model, *args).train()
    fast.encoder.eval()
    with torch.no_grad():
        a, b = fast(*args), fast(*args)
    torch.testing.assert_close(a, b)


def test_one_decision_serves_graphs_of_about_the_same_size():
    fast = optimize(nn.GCNConv(12, 4), *inputs())
    (layer,) = layers(fast)
    for edges in (E, E + 300, E - 300):
        fast(torch.randn(N, 12), torch.randint(N, (2, edges)))
    # One of the example, one with gradients, and one of all sizes.
    assert len(layer.decisions) <= 3
    known = len(layer.decisions)
    for _ in range(2):  # graphs of either size have a decision then
        fast(torch.randn(3 * N, 12), torch.randint(3 * N, (2, 3 * E)))
        fast(torch.randn(N, 12), torch.randint(N, (2, E)))
        assert len(layer.decisions) == known + 1


def test_calls_with_new_graphs_are_decided_for_new_graphs():
    """Nothing that is computed once per graph pays there, until a graph comes again."""
    conv, (x, edge_index) = nn.GCNConv(12, 4).eval(), inputs()
    fast = optimize(conv, x, edge_index, choose="((((D·A·D)·X)·W) + b)")
    (layer,) = layers(fast)
    with torch.no_grad():
        fast(x, edge_index)
        before = len(layer.decisions)
        for _ in range(5):
            edges = torch.randint(N, (2, E))
            torch.testing.assert_close(fast(x, edges), conv(x, edges))
        assert len(layer.decisions) == before + 1
        for _ in range(3):
            torch.testing.assert_close(fast(x, edges), conv(x, edges))
        assert len(layer.decisions) == before + 2


def test_static_features_are_aggregated_once_until_they_change():
    model, (x, edge_index) = nn.SAGEConv(12, 4), inputs()
    fast = optimize(model, x, edge_index, train=True, static=("x",))
    (layer,) = layers(fast)
    decision = layer.decisions[-1]
    bill = decision.pruned.bills[decision.choice.tree]
    assert [w.name for w in bill.forward if w.once] == ["spmm"]
    same(model, fast, x, edge_index)
    x.mul_(2)
    same(model, fast, x, edge_index)


def test_static_features_of_two_sets_of_nodes():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = layers_of_maxk.MaxKSAGEConv((12, 9), 4, k=3)

        def forward(self, x, y, edge_index):
            return self.conv((x, y), edge_index)

    model, (x, edge_index) = Net(), inputs()
    y = torch.randn(50, 9)
    args = (x, y, edge_index % 50)
    fast = optimize(model, *args, train=True, static=("x", "y"))
    same(model, fast, *args)
    for tensor in (y, x):
        tensor.mul_(-1)
        same(model, fast, *args)


def test_stored_values_of_a_graph_belong_to_one_kind_of_matrix():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.GCNConv(12, 4), nn.GCNConv(12, 4, improved=True)

        def forward(self, x, edge_index, weight):
            return self.a(x, edge_index, weight) - self.b(x, edge_index, weight)

    model, (x, edge_index) = Net(), inputs()
    args = (x, edge_index, torch.rand(E))
    for choose in ("(((D·A·D)·(X·W)) + b)", "((((D·A·D)·X)·W) + b)"):
        same(model, optimize(model, *args, static=("x",), choose=choose), *args)


@pytest.mark.parametrize("make", [nn.GCNConv, nn.SGConv])
def test_a_layer_does_not_cache_the_example(make):
    conv, (x, edge_index) = make(12, 4, cached=True), inputs()
    fast = optimize(conv, x, edge_index)
    args = inputs()
    torch.testing.assert_close(fast(*args), make.forward(copy.deepcopy(conv), *args))
    kept = [v for name, v in vars(conv).items() if name.startswith("_cached")]
    assert any(v is not None for v in kept)  # of the first call of the result


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: optimize(torch.nn.Linear(2, 2), torch.ones(2, 2)), "no message passing layer"),
        (lambda: optimize(lambda x: x), "torch.nn.Module"),
        (lambda: optimize(Net(), *inputs(), static=("y",)), "static"),
        (lambda: optimize(Net(), inputs()[0]), "do not fit Net"),
        (lambda: optimize(Net(), *inputs(), choose="(X·X)"), r"no association '\(X·X\)'"),
    ],
    ids=["no layers", "no module", "static", "examples", "choose"],
)
def test_wrong_arguments_raise_errors(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


def test_a_layer_whose_sizes_are_not_known_yet():
    model, args = nn.GCNConv(-1, 4), inputs()
    fast = optimize(model, *args)
    same(model, fast, *args)
    assert not layers(fast)[0].reasons


def test_under_torch_compile():
    model, args = Net(), inputs()
    fast = optimize(model, *args, train=True)
    same(model, torch.compile(fast, backend="aot_eager"), *args)


def test_beside_patch_and_on_another_backend():
    model, args = Nested(), inputs()
    settings.always = True
    fast = optimize(model, *args)
    with pyg_accel.patched():
        same(model, fast, *args)
    with pyg_accel.use_backend("reference"):
        same(model, fast, *args)


def test_verification_compares_with_the_original(off_by):
    settings.verify = True
    model, args = Net(), inputs()
    optimize(model, *args)
    off_by(1.5)
    with pytest.raises(VerificationError, match="Net, rewritten"):
        optimize(model, *args)


def test_graphs_of_other_kinds_are_left_to_the_layer():
    model, (x, edge_index) = nn.GCNConv(12, 4), inputs()
    fast = optimize(model, x, edge_index)
    adj = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(E), (N, N)).to_sparse_csr()
    torch.testing.assert_close(fast(x, adj), model(x, adj))
    assert list(layers(fast)[0].reasons) == ["a graph that is not a plain edge_index"]


def test_several_graphs_and_edge_weights():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.GCNConv(12, 6), nn.GraphConv((6, 6), 3)

        def forward(self, x, near, weight, far):
            h = self.a(x, near, edge_weight=weight).relu()
            return self.b((h, h[:50]), far)

    model, (x, near) = Two(), inputs()
    far = torch.stack([torch.randint(N, (300,)), torch.randint(50, (300,))])
    args = (x, near, torch.rand(E), far)
    same(model, optimize(model, *args, train=True), *args)


def test_the_report_counts_calls_of_rewritten_layers_and_none_of_optimize_itself(report_of):
    args = torch.randn(N, 12), torch.randint(N, (2, E))
    fast = optimize(Net().eval(), *args)
    assert report_of() == []
    for _ in range(3):
        fast(*args)
    trees = {str(m.decisions[-1].choice.tree) for m in rewritten_layers(fast).values()}
    rows = report_of()
    assert {row.formula for row in rows} >= trees  # beside what a first call is read from
    assert sum(row.calls for row in rows) == 6
    assert {row.layer for row in rows} == {"GCNConv", "SAGEConv"}
    assert all(row.backend and not row.reason for row in rows)


def test_the_report_says_once_why_a_rewritten_layer_was_left_to_pyg(report_of):
    edges = torch.stack([torch.arange(E) % N, torch.arange(E).sort().values // (E // N) % N])
    edges = edges[:, edges[1].argsort()]
    args, layer = (torch.randn(N, 12), edges), nn.SAGEConv(12, 4, aggr="lstm")
    fast = optimize(nn.Sequential("x, e", [(layer, "x, e -> x")]), *args)
    fast(*args)
    (row,) = report_of()
    assert (row.layer, row.formula, row.backend, row.calls) == ("SAGEConv", "", "PyG", 1)
    assert row.reason
    settings.always = True
    with pyg_accel.patched():
        fast(*args)
    # Beside the layer, what its aggregation asks for has a row.
    assert sum(row.calls for row in report_of() if row.layer == "SAGEConv") == 2


def test_an_assertion_without_text_names_what_was_asserted():
    """PyG asserts what it expects of arguments that it cannot use."""
    model, (x, edge_index) = nn.GraphSAGE(12, 8, 2), inputs()
    too_many = (None, None, None, None, 3, 4)
    with pytest.raises(AssertionError) as stock:
        model(x, edge_index, *too_many)
    assert str(stock.value) == ""
    with pytest.raises(ValueError, match=r"do not fit GraphSAGE: assert isinstance"):
        optimize(model, x, edge_index, *too_many)


FIRST = """
import torch, pyg_accel
from torch_geometric.nn import GCNConv

args = torch.randn(30, 12), torch.randint(30, (2, 90))
(layer,) = pyg_accel.plan(pyg_accel.optimize(GCNConv(12, 8), *args)).layers
print(bool(layer.trees), layer.reasons)
"""


def test_the_first_layer_of_a_process_is_rewritten():
    """Backends are loaded before a call is recorded."""
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert run.stdout == "True ()\n", run.stderr
