"""Every association of every layer computes what the layer computes, in float64, with gradients."""

import pytest
import torch
from torch import Tensor
from torch_geometric import nn

from pyg_accel import layers
from pyg_accel.rewrite import associations
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options

SOURCES, TARGETS, EDGES = 40, 40, 260


def graph(targets=TARGETS):
    edge_index = torch.stack(
        [torch.randint(SOURCES, (EDGES,)), torch.randint(targets - 3, (EDGES,))]
    )  # the last rows are empty
    edge_index[:, :9] = edge_index[:, 9:18]  # duplicates
    edge_index[0, :5] = edge_index[1, :5]  # self-loops
    return edge_index


def features(rows=SOURCES, width=6):
    return torch.randn(rows, width, dtype=torch.float64)


def weights(**kwargs):
    return torch.rand(EDGES, dtype=torch.float64, **kwargs)


def run(module, args, parameters):
    """Results and gradients of a call; of its floating-point arguments too."""
    leaves = []

    def fresh(value):
        if isinstance(value, tuple):
            return tuple(map(fresh, value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        copy = value.detach().clone().requires_grad_(value.dim() == 2 or value.requires_grad)
        if copy.requires_grad:
            leaves.append(copy)
        return copy

    out = module(*map(fresh, args))
    seed = torch.linspace(0.1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [*leaves, *parameters], seed, allow_unused=True)]


def largest(tensor):
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def check(conv, *args, trees=None, promoted=None):
    """Compare every tree with the layer; return how many there are."""
    conv = conv.double()
    actual = associations(conv, *args, train=True)
    if trees is not None:
        assert (len(actual.all), len(actual.promoted)) == (trees, promoted)
    parameters = list(conv.parameters())
    expected = run(conv, args, parameters)
    priced = OptimizedModel(conv, Options(train=True, price_all=True))
    run(priced, args, parameters)
    assert all(
        seconds > 0
        for seconds in rewritten_layers(priced)[""].decisions[-1].choice.seconds.values()
    )
    for tree in actual.all:
        layer = OptimizedModel(conv, Options(train=True, choose=tree))
        for _ in range(2):  # what is kept for the graph is used the second time
            for mine, theirs in zip(run(layer, args, parameters), expected, strict=True):
                if theirs is None:
                    assert mine is None
                    continue
                scale = max(largest(theirs), 1.0)  # some are zero but for rounding
                assert largest(mine - theirs) <= 1e-11 * scale, str(tree)
        assert not rewritten_layers(layer)[""].reasons
        assert str(rewritten_layers(layer)[""].decisions[-1].choice.tree) == str(tree)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"improved": True}, {"add_self_loops": False}, {"bias": False},
     {"flow": "target_to_source"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gcn(options, weighted):
    extra = (weights(),) if weighted else ()
    check(nn.GCNConv(6, 4, **options), features(), graph(), *extra, trees=12, promoted=4)


def test_gcn_without_normalisation_learns_edge_weights():
    conv = nn.GCNConv(6, 4, normalize=False)
    check(conv, features(), graph(), trees=2, promoted=2)
    check(conv, features(), graph(), weights(requires_grad=True), trees=2, promoted=2)


def test_lightgcn():
    check(nn.LGConv(), features(), graph(), weights(), trees=4, promoted=2)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"aggr": "sum"}, {"normalize": True}, {"project": True}, {"root_weight": False},
     {"bias": False}, {"flow": "target_to_source"}],
    ids=str,
)  # fmt: skip
def test_sage(options):
    check(nn.SAGEConv(6, 4, **options), features(), graph())


def test_bipartite_sage():
    conv = nn.SAGEConv((6, 5), 4)
    check(conv, (features(), features(30, 5)), graph(30), trees=2, promoted=2)


def test_the_targets_of_a_sampled_batch_are_the_first_of_the_sources():
    x = features()
    check(nn.SAGEConv(6, 4), (x, x[:20]), graph(20))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("learned", [False, True])
def test_graph_conv(aggr, learned):
    conv = nn.GraphConv(6, 4, aggr=aggr)
    check(conv, features(), graph(), weights(requires_grad=learned))
    check(conv, features(), graph())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("conv", "args", "reason"),
    [
        (nn.SAGEConv(6, 4, aggr="max"), (), "aggregation by max"),
        (nn.SGConv(6, 4, cached=True), (), "it changes what it reads"),
        (nn.TransformerConv(6, 4, edge_dim=3), (features(EDGES, 3),), "more than its features"),
        (nn.EdgeConv(torch.nn.Linear(12, 4)), (), "aggregation by max"),
    ],
    ids=["max", "cached", "edges", "networks"],
)
def test_unsupported_layers_run_unchanged_and_say_why(conv, args, reason):
    conv = conv.double()
    layer = OptimizedModel(conv, Options())
    x, edge_index = features(), graph()
    for _ in range(2):
        torch.testing.assert_close(layer(x, edge_index, *args), conv(x, edge_index, *args))
    actual = rewritten_layers(layer)[""]
    assert actual.reasons and all(reason in text for text in [*actual.reasons][:1])


class Doubled(nn.GCNConv):
    def message(self, x_j, edge_weight):
        return 2 * super().message(x_j, edge_weight)


def test_a_subclass_with_its_own_message_and_learned_weights_take_part():
    check(Doubled(6, 4), features(), graph())
    check(nn.GCNConv(6, 4), features(), graph(), weights(requires_grad=True))


@pytest.mark.one_of(7, 1)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.SGConv(6, 4, K=2), lambda: nn.SGConv(6, 4, K=3, add_self_loops=False),
     lambda: nn.SSGConv(6, 4, alpha=0.2, K=2), lambda: nn.TAGConv(6, 4, K=2),
     lambda: nn.TAGConv(6, 4, K=2, normalize=False, bias=False),
     lambda: nn.APPNP(3, 0.1), lambda: nn.APPNP(2, 0.2, normalize=False, add_self_loops=False),
     lambda: nn.ChebConv(6, 4, K=2), lambda: nn.ChebConv(6, 4, K=3, normalization="rw"),
     pytest.param(lambda: nn.ChebConv(6, 4, K=4, normalization="rw"), marks=pytest.mark.full)],
)  # fmt: skip
def test_several_hops(make, weighted):
    extra = (weights(),) if weighted else ()
    check(make(), features(), graph(), *extra)


def mlp(*sizes):
    return nn.MLP(list(sizes), norm=None)


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "network",
    [lambda: torch.nn.Linear(6, 4), lambda: mlp(6, 8, 4), lambda: nn.MLP([6, 8, 4]),
     lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), nn.Linear(5, 4)),
     lambda: torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(6, 4))],
)  # fmt: skip
@pytest.mark.parametrize("train_eps", [False, True])
def test_gin(network, train_eps):
    conv = nn.GINConv(network(), eps=0.3, train_eps=train_eps)
    check(conv, features(), graph())
    check(conv, (features(), features(30)), graph(30))


@pytest.mark.one_of(7)
@pytest.mark.parametrize("k", [1, 2, 6, 9])
@pytest.mark.parametrize(
    "make",
    [lambda k: layers.MaxKSAGEConv(6, 4, k=k), lambda k: layers.MaxKSAGEConv(6, 4, "sum", k=k),
     lambda k: layers.MaxKSAGEConv(6, 4, project=True, normalize=True, k=k),
     lambda k: layers.MaxKGCNConv(6, 4, k=k),
     lambda k: layers.MaxKGCNConv(6, 4, normalize=False, bias=False, k=k),
     lambda k: layers.MaxKGINConv(mlp(6, 8, 4), 0.3, True, k=k)],
    ids=["sage", "sum", "project", "gcn", "plain", "gin"],
)  # fmt: skip
def test_maxk(make, k):
    check(make(k), features(), graph())


@pytest.mark.full
def test_maxk_of_two_sets_of_nodes_and_with_weights():
    check(layers.MaxKSAGEConv((6, 5), 4, k=2), (features(), features(30, 5)), graph(30))
    check(layers.MaxKGINConv(mlp(6, 4), k=2), (features(), features(30)), graph(30))
    check(layers.MaxKGCNConv(6, 4, k=2), features(), graph(), weights())
    conv = layers.MaxKGCNConv(6, 4, normalize=False, k=2)
    check(conv, features(), graph(), weights(requires_grad=True))


def test_the_bill_of_maxk_has_its_primitives():
    actual = associations(layers.MaxKSAGEConv(64, 32, k=8), train=True)
    works = {str(tree): [w.name for w in actual.bills[tree].all] for tree in actual.promoted}
    sparse = [names for names in works.values() if "cbsr_spmm" in names]
    assert sparse
    assert all("sspmm" in names and "spmm" not in names for names in sparse)
    assert all(names.count("maxk") == 1 for names in works.values())
    assert any("spmm" in names and "cbsr_spmm" not in names for names in works.values())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("relations", [3, 40])
def test_relations_are_one_operator_and_no_product(relations):
    conv, edge_type = nn.RGCNConv(6, 4, relations), torch.randint(relations, (EDGES,))
    layer, x, edge_index = OptimizedModel(conv, Options()), features().float(), graph()
    for _ in range(2):
        torch.testing.assert_close(layer(x, edge_index, edge_type), conv(x, edge_index, edge_type))
    assert list(rewritten_layers(layer)[""].reasons) == [
        "RGCNConv has no sum of messages that is a product"
    ]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("layer", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3}, {"heads": 3, "concat": False}, {"bias": False, "heads": 2}],
    ids=str,
)
def test_attention(layer, options):
    check(layer(6, 4, **options), features(), graph())
    residual = {} if layer is nn.TransformerConv else {"residual": True, "add_self_loops": False}
    check(layer((6, 5), 4, **options, **residual), (features(), features(30, 5)), graph(30))


@pytest.mark.one_of(11)
@pytest.mark.parametrize("layer", [nn.GATConv, nn.GATv2Conv])
@pytest.mark.parametrize("fill", ["mean", "max", 0.5])
@pytest.mark.parametrize("width", [None, 3])
def test_attention_over_edge_attributes(layer, fill, width):
    attr = weights(requires_grad=True) if width is None else features(EDGES, width)
    conv = layer(6, 4, heads=2, edge_dim=width or 1, fill_value=fill)
    check(conv, features(), graph(), attr)
    check(conv, features(), graph())
    bare = layer((6, 5), 4, heads=2, edge_dim=width or 1, add_self_loops=False)
    check(bare, (features(), features(30, 5)), graph(30), attr)


def test_a_gate_after_attention():
    check(nn.TransformerConv(6, 4, heads=2, beta=True), features(), graph())
    conv = nn.TransformerConv((6, 5), 4, heads=2, beta=True, concat=False)
    check(conv, (features(), features(30, 5)), graph(30))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.GCNConv(6, 4, cached=True, improved=True), lambda: nn.APPNP(2, 0.1, cached=True),
     lambda: layers.MaxKGCNConv(6, 4, cached=True, k=2)],
)  # fmt: skip
def test_a_layer_caches_the_result_of_its_first_call(make):
    conv, other = make().double(), make().double()
    other.load_state_dict(conv.state_dict())
    check(conv, features(), graph(), weights())
    args, later = (features(), graph(), weights()), (features(), graph())
    conv.reset_parameters()
    other.load_state_dict(conv.state_dict())
    layer = OptimizedModel(conv, Options())
    for inputs in (args, later, later):
        torch.testing.assert_close(layer(*inputs), other(*inputs))
    assert rewritten_layers(layer)[""].decisions
    torch.testing.assert_close(conv._cached_edge_index, other._cached_edge_index)


def test_gat_has_the_two_associations_of_the_paper():
    actual = associations(nn.GATConv(6, 4, bias=False))
    assert len(actual.all) == len(actual.promoted) == 2
    assert len(actual.candidates(32, 256)) == 2
    assert len(actual.candidates(256, 32)) == 1


@pytest.mark.parametrize("layer", [nn.GATv2Conv, nn.TransformerConv])
def test_other_attention_has_the_same_choice(layer):
    actual = associations(layer(6, 4))
    assert len(actual.promoted) == 2
    assert len(actual.candidates(32, 256)) == 2


def test_dropout_of_attention_follows_the_mode():
    conv = nn.GATConv(6, 4, dropout=0.5).double()
    layer = OptimizedModel(conv, Options())
    x, edge_index = features(), graph()
    torch.testing.assert_close(layer.eval()(x, edge_index), conv.eval()(x, edge_index))
    outs = [layer.train()(x, edge_index) for _ in range(2)]
    assert not torch.equal(*outs)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("nodes", [0, 9])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.GCNConv(6, 4), lambda: nn.SAGEConv(6, 4), lambda: nn.TAGConv(6, 4, K=2),
     lambda: nn.GINConv(mlp(6, 4))],
)  # fmt: skip
def test_graphs_without_edges_or_nodes(make, nodes):
    check(make(), features(nodes), torch.empty(2, 0, dtype=torch.long))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("nodes", [0, 9])
@pytest.mark.parametrize("layer", [nn.GATConv, nn.GATv2Conv])
def test_attention_without_edges_or_nodes(layer, nodes):
    conv, x, edge_index = layer(6, 4, heads=2), torch.randn(nodes, 6), torch.empty(2, 0).long()
    fast = OptimizedModel(conv, Options())
    for _ in range(2):
        torch.testing.assert_close(fast(x, edge_index), conv(x, edge_index))


@pytest.mark.parametrize("conv", [nn.GATConv, nn.GATv2Conv])
def test_attention_on_a_ring_which_has_as_many_edges_as_nodes(conv):
    layer, node = conv(8, 4, heads=3), torch.arange(20)
    edge_index, x = torch.stack([node, (node + 1) % 20]), torch.randn(20, 8)
    fast = OptimizedModel(layer, Options(train=True))
    torch.testing.assert_close(fast(x, edge_index), layer(x, edge_index))
