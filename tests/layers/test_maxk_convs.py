"""MaxK layers are PyG's layers on masked features: outputs and all gradients, whatever comes in."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Sequential
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.nn.aggr import SumAggregation

import pyg_accel
from pyg_accel.errors import VerificationError
from pyg_accel.graph import CBSR
from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv, aggregation, maxk

N, E, F, H, K = 23, 90, 12, 5, 2  # H is small enough that layers multiply first
TOLERANCE = 1e-12  # float64: sums in another order


def mask(x: Tensor, k: int = K) -> Tensor:
    """Ones at the k largest features of each row, by sorting; ties to the lowest column."""
    order = x.detach().argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(x).scatter(-1, order[..., :k], 1.0)


def masked(x: Tensor, k: int = K) -> Tensor:
    return x * mask(x, k)


def features(rows: int = N, width: int = F) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, requires_grad=True)


def edges(rows: int = N, cols: int = N, count: int = E) -> Tensor:
    """Any order, with duplicates, self-loops and nodes without edges."""
    return torch.stack([torch.randint(cols, (count,)), torch.randint(max(rows - 3, 1), (count,))])


def mlp(width: int = F) -> Sequential:
    return Sequential(Linear(width, 9), torch.nn.ReLU(), Linear(9, H)).double()


def pair_of(
    kind: str, k: int = K, width: int = F, **options: object
) -> tuple[torch.nn.Module, ...]:
    """The MaxK layer and PyG's with the same parameters."""
    if kind == "SAGE":
        ours, stock = MaxKSAGEConv(width, H, k=k, **options), SAGEConv(width, H, **options)
    elif kind == "GCN":
        ours, stock = MaxKGCNConv(width, H, k=k, **options), GCNConv(width, H, **options)
    else:
        nn = mlp(width)
        ours, stock = MaxKGINConv(nn, k=k, **options), GINConv(copy.deepcopy(nn), **options)
    stock.load_state_dict(ours.state_dict())
    return ours.double(), stock.double()


def gradients(out: Tensor, layer: torch.nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    given = [t for t in (*layer.parameters(), *inputs) if t.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), given, allow_unused=True))


def assert_same(
    out: Tensor, truth: Tensor, layers: tuple[torch.nn.Module, ...], *inputs: Tensor
) -> None:
    torch.testing.assert_close(out, truth, rtol=TOLERANCE, atol=TOLERANCE)
    actual, expected = (gradients(t, m, *inputs) for t, m in zip((out, truth), layers, strict=True))
    for ours, stock in zip(actual, expected, strict=True):
        if stock is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, stock, rtol=TOLERANCE, atol=TOLERANCE)


VARIANTS = [
    pytest.param("SAGE", {}, id="sage"),
    pytest.param("SAGE", {"aggr": "sum"}, id="sage-sum"),
    pytest.param("SAGE", {"aggr": "add", "bias": False}, id="sage-add-no-bias"),
    pytest.param("SAGE", {"normalize": True}, id="sage-normalize"),
    pytest.param("SAGE", {"root_weight": False}, id="sage-no-root"),
    pytest.param("SAGE", {"aggr": "max"}, id="sage-max"),
    pytest.param("SAGE", {"aggr": ["mean", "max"]}, id="sage-list"),
    pytest.param("SAGE", {"flow": "target_to_source"}, id="sage-flow"),
    pytest.param("GCN", {}, id="gcn"),
    pytest.param("GCN", {"improved": True, "bias": False}, id="gcn-improved-no-bias"),
    pytest.param("GCN", {"add_self_loops": False}, id="gcn-no-loops"),
    pytest.param("GCN", {"normalize": False}, id="gcn-no-norm"),
    pytest.param("GCN", {"cached": True}, id="gcn-cached"),
    pytest.param("GCN", {"aggr": "mean"}, id="gcn-mean"),
    pytest.param("GCN", {"decomposed_layers": 2}, id="gcn-decomposed"),
    pytest.param("GCN", {"aggr": "max"}, id="gcn-max"),
    pytest.param("GCN", {"flow": "target_to_source"}, id="gcn-flow"),
    pytest.param("GIN", {}, id="gin"),
    pytest.param("GIN", {"eps": 0.3, "train_eps": True}, id="gin-eps"),
    pytest.param("GIN", {"aggr": "mean"}, id="gin-mean"),
    pytest.param("GIN", {"aggr": "min"}, id="gin-min"),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_a_layer_is_pygs_on_masked_features(kind, options):
    layers, x, edge_index = pair_of(kind, **options), features(), edges()
    for _ in range(2):  # the second call finds what the first has remembered
        out, truth = layers[0](x, edge_index), layers[1](masked(x), edge_index)
        assert_same(out, truth, layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 1), (7, 6), (33, 32), (33, 40), (257, 31)])
def test_any_width_and_any_k(kind, width, k):
    layers, x, edge_index = pair_of(kind, k, width), features(width=width), edges()
    assert_same(layers[0](x, edge_index), layers[1](masked(x, k), edge_index), layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
@pytest.mark.parametrize("rows", [0, 1, N], ids=["no-nodes", "one-node", "no-edges"])
def test_graphs_with_nothing_in_them(kind, rows):
    layers, x, edge_index = pair_of(kind), features(rows), torch.empty(2, 0, dtype=torch.int64)
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GIN"])
@pytest.mark.parametrize("size", [None, (N, 7)], ids=["size-found", "size-given"])
def test_bipartite_graphs(kind, size):
    layers, source, target = pair_of(kind), features(), features(7)
    edge_index = edges(rows=7)
    out = layers[0]((source, target), edge_index, size)
    truth = layers[1]((masked(source), masked(target)), edge_index, size)
    assert_same(out, truth, layers, source, target)


@pytest.mark.parametrize("kind", ["SAGE", "GIN"])
def test_targets_without_features(kind):
    layers, source, edge_index = pair_of(kind), features(), edges(rows=7)
    out = layers[0]((source, None), edge_index, (N, 7))
    assert_same(out, layers[1]((masked(source), None), edge_index, (N, 7)), layers, source)
    assert out.shape == (7, H)


def test_sides_of_different_widths():
    ours, stock = MaxKSAGEConv((F, 9), H, k=K).double(), SAGEConv((F, 9), H).double()
    stock.load_state_dict(ours.state_dict())
    source, target, edge_index = features(), features(7, 9), edges(rows=7)
    out, truth = (
        ours((source, target), edge_index),
        stock((masked(source), masked(target)), edge_index),
    )
    assert_same(out, truth, (ours, stock), source, target)


def test_with_projection_maxk_replaces_the_relu_after_it():
    layers, x, edge_index = pair_of("SAGE", project=True), features(), edges()
    stock = copy.deepcopy(layers[1])
    stock.project = False
    h = masked(layers[1].lin(x))
    stock.lin_l, stock.lin_r = layers[1].lin_l, layers[1].lin_r
    out, truth = layers[0](x, edge_index), stock((h, x), edge_index)
    torch.testing.assert_close(out, truth, rtol=TOLERANCE, atol=TOLERANCE)
    grads = [
        torch.autograd.grad(t.square().sum(), (x, m.lin.weight))
        for t, m in zip((out, truth), layers, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=TOLERANCE, atol=TOLERANCE)


def matrix(layout: str, edge_index: Tensor, weight: Tensor) -> Tensor:
    adj = torch.sparse_coo_tensor(edge_index.flip(0), weight, (N, N))
    if layout == "coo, not coalesced":
        return adj
    adj = adj.coalesce()
    return {"coo": adj, "csr": adj.to_sparse_csr(), "csc": adj.to_sparse_csc()}[layout]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "coo, not coalesced", "csr", "csc"])
@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_sparse_matrices_of_torch(kind, layout):
    if kind == "GCN" and layout == "csc":
        pytest.skip("PyG's gcn_norm takes no CSC matrix")
    options = {"SAGE": {"aggr": "sum"}, "GCN": {}, "GIN": {}}[kind]
    layers, x = pair_of(kind, **options), features()
    adj = matrix(layout, edges(), torch.rand(E, dtype=torch.float64))
    truth = layers[1](masked(x), adj.coalesce() if "not" in layout else adj)
    assert_same(layers[0](x, adj), truth, layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_edge_index_as_an_edge_index(kind):
    layers, x, edge_index = pair_of(kind), features(), edges()
    truth = layers[1](masked(x), edge_index)
    assert_same(layers[0](x, EdgeIndex(edge_index, sparse_size=(N, N))), truth, layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_edge_index_of_32_bits(kind):
    options = {"normalize": False} if kind == "GCN" else {}  # gcn_norm itself wants 64
    layers, x, edge_index = pair_of(kind, **options), features(), edges()
    assert_same(layers[0](x, edge_index.int()), layers[1](masked(x), edge_index), layers, x)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("hidden", [2, 64], ids=["multiplies-first", "aggregates-first"])
def test_edge_weights_of_gcn_and_their_gradient(normalize, hidden):
    ours = MaxKGCNConv(F, hidden, normalize=normalize, k=K).double()
    stock = GCNConv(F, hidden, normalize=normalize).double()
    stock.load_state_dict(ours.state_dict())
    x, edge_index = features(), edges()
    weight = torch.rand(E, dtype=torch.float64, requires_grad=True)
    out, truth = ours(x, edge_index, weight), stock(masked(x), edge_index, weight)
    assert_same(out, truth, (ours, stock), x, weight)


@pytest.mark.parametrize(
    ("kind", "formula"), [(MaxKGCNConv, "sum_j mul({},e1)"), (MaxKSAGEConv, "mean_j {}")]
)
def test_the_bracketing_is_the_cheaper_one(kind, formula, report_of):
    x, edge_index = features(), edges()
    for hidden in (2, 64):
        kind(F, hidden, k=K).double()(x, edge_index)
    actual = {row.formula for row in report_of()}
    assert actual == {formula.format("u0"), formula.format("maxk(u0,2)")}


@pytest.mark.parametrize("options", [{}, {"aggr": "sum"}, {"bias": False}, {"normalize": True}])
def test_many_outputs_of_sage(options):
    ours, stock = MaxKSAGEConv(F, 64, k=K, **options), SAGEConv(F, 64, **options)
    stock.load_state_dict(ours.state_dict())
    layers, x, edge_index = (ours.double(), stock.double()), features(), edges()
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)


def test_hooks_of_the_linear_map_are_called():
    conv, seen = MaxKSAGEConv(F, 2, k=K).double(), []
    conv.lin_l.register_forward_hook(lambda *_: seen.append(1))
    conv(features(), edges())
    assert seen == [1]


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_features_that_are_cbsr_already(kind):
    layers, x, edge_index = pair_of(kind), features(), edges()
    assert_same(layers[0](maxk(x, 3), edge_index), layers[1](masked(x, 3), edge_index), layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_strided_features(kind):
    layers, x, edge_index = pair_of(kind), features(F, N), edges()
    assert_same(layers[0](x.t(), edge_index), layers[1](masked(x.t()), edge_index), layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GIN"])
def test_features_with_a_batch_dimension(kind):
    layers, edge_index = pair_of(kind), edges()
    x = torch.randn(3, N, F, dtype=torch.float64, requires_grad=True)
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
def test_under_patch_results_are_the_same_and_the_graph_is_shared(kind, stored_graphs):
    layers, x, edge_index = pair_of(kind), features(), edges()
    truth = layers[1](masked(x), edge_index)
    pyg_accel.settings.settings.always = True
    with pyg_accel.patched():
        assert_same(layers[0](x, edge_index), truth, layers, x)
        before = stored_graphs()
        layers[1](masked(x), edge_index)
        assert stored_graphs() == before


def test_the_report_names_the_layer_and_its_formula(report_of):
    MaxKSAGEConv(F, 64, k=K).double()(features(), edges())
    (row,) = report_of()
    assert (row.layer, row.formula, row.calls) == ("MaxKSAGEConv", "mean_j maxk(u0,2)", 1)
    assert row.backend not in ("", "PyG")


def hooked(conv):
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)


def explained(conv):
    conv.explain = True
    conv._edge_mask, conv._loop_mask, conv._apply_sigmoid = (
        torch.ones(E),
        torch.ones(E).bool(),
        False,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [(hooked, "a message forward hook"), (explained, "an explainer is active")],
)
def test_hooks_and_explainers_see_messages(change, reason, report_of):
    layers, x, edge_index = pair_of("SAGE"), features(), edges()
    for layer in layers:
        change(layer)
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)
    assert reason in {row.reason for row in report_of()}


def test_other_aggregations_say_that_pyg_did_it(report_of):
    MaxKSAGEConv(F, H, aggr="max", k=K).double()(features(), edges())
    (row,) = report_of()
    assert row.backend == "PyG" and row.reason.startswith("aggr=MaxAggregation()")


def test_an_aggregation_that_was_replaced():
    layers, x, edge_index = pair_of("SAGE"), features(), edges()
    for layer in layers:
        layer.aggr_module = SumAggregation()
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)


def test_maxk_as_a_module():
    x = features()
    torch.testing.assert_close(MaxK(K)(x), masked(x))
    torch.testing.assert_close(MaxK(K)(x.view(1, N, F)), masked(x)[None])
    assert MaxK(99)(x) is x
    assert repr(MaxK(K)) == "MaxK(k=2)"
    (grad,) = torch.autograd.grad(MaxK(K)(x).sum(), x)
    torch.testing.assert_close(grad, mask(x))


@pytest.mark.parametrize("k", [0, -1, 2.0, True, None])
def test_k_has_to_be_a_number_of_features(k):
    for build in (
        lambda: MaxK(k),
        lambda: MaxKSAGEConv(F, H, k=k),
        lambda: MaxKGCNConv(F, H, k=k),
        lambda: MaxKGINConv(mlp(), k=k),
    ):
        with pytest.raises(ValueError, match="expected 'k' to be a whole number"):
            build()


def test_wrong_arguments_raise_the_errors_of_pyg():
    x, edge_index, other = features(), edges(), torch.eye(5, dtype=torch.float64).to_sparse()
    with pytest.raises(ValueError, match="one set of nodes"):
        MaxKGCNConv(F, H, k=K).double()((x, x), edge_index)
    calls = [
        ({}, (x, None), edge_index, (5, 5)),
        ({}, x, edge_index[0]),
        ({}, x, edge_index + N),
        ({"flow": "target_to_source"}, x, torch.eye(N, dtype=torch.float64).to_sparse()),
        ({}, x, other),
    ]
    for options, given, *others in calls:
        ours, stock = pair_of("SAGE", **options)
        hidden = (masked(x), None) if isinstance(given, tuple) else masked(x)
        with pytest.raises(Exception) as expected:
            stock(hidden, *others)
        with pytest.raises(expected.type) as actual:
            ours(given, *others)
        assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GIN"])
@pytest.mark.parametrize("k", [K, 11])
def test_under_patch_each_graph_has_its_own_result(kind, k):
    layers, x = pair_of(kind, k), features()
    pyg_accel.settings.settings.always = True
    with pyg_accel.patched():
        for _ in range(3):
            edge_index = edges()
            out, truth = layers[0](x, edge_index), layers[1](masked(x, k), edge_index)
            assert_same(out, truth, layers, x)


def test_calls_are_verified(off_by, report_of):
    pyg_accel.settings.settings.verify = True
    layers, x, edge_index = pair_of("SAGE"), features(), edges()
    assert_same(layers[0](x, edge_index), layers[1](masked(x), edge_index), layers, x)
    assert [row.calls for row in report_of()] == [1]
    off_by(1.5, kernel="cbsr_spmm")
    with pytest.raises(VerificationError):
        MaxKSAGEConv(F, 64, k=K).double()(x, edge_index)


@pytest.mark.parametrize("kind", ["SAGE", "GIN"])
@pytest.mark.parametrize("width", [F, 2 * H])
def test_a_reverse_flow_gathers_the_same_member_of_a_pair_as_in_pyg(kind, width):
    ours, stock = pair_of(kind, width=width, flow="target_to_source")
    x, y, edge_index = features(width=width), features(width=width), edges()
    expected = stock((masked(x), masked(y)), edge_index)
    torch.testing.assert_close(ours((x, y), edge_index), expected)
    fast = pyg_accel.optimize(ours, (x, y), edge_index)
    torch.testing.assert_close(fast((x, y), edge_index), expected)


@pytest.mark.parametrize(("k", "kind"), [(42, CBSR), (43, Tensor)])
def test_features_are_compressed_where_their_sums_take_less_time(k, kind):
    assert isinstance(aggregation.compress(torch.randn(3, 256), k), kind)
