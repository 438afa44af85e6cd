"""``torch.compile`` of rewritten models: whole graphs, one for all sizes, and the same numbers."""

import pytest
import torch
from torch import Tensor
from torch_geometric import nn

from pyg_accel import layers, optimize

pytestmark = pytest.mark.slow
F = 6


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Two(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(F, 8), make(8, 4)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        x = torch.nn.functional.dropout(x, 0.5, self.training)
        return self.second(x, edge_index)


MODELS = {
    "gcn": lambda: nn.GCN(F, 8, 2, norm="batch"),
    "sage": lambda: nn.GraphSAGE(F, 8, 3, jk="cat"),
    "gat": lambda: nn.GAT(F, 8, 2, heads=2),
    "gin": lambda: nn.GIN(F, 8, 2),
    "gatv2": lambda: Two(lambda i, o: nn.GATv2Conv(i, o // 2, heads=2)),
    "transformer": lambda: Two(lambda i, o: nn.TransformerConv(i, o // 2, heads=2)),
    "tag": lambda: Two(lambda i, o: nn.TAGConv(i, o, K=2)),
    "sgc": lambda: Two(lambda i, o: nn.SGConv(i, o, K=2)),
    "maxk": lambda: Two(lambda i, o: layers.MaxKSAGEConv(i, o, k=2)),
}


def batches():
    for nodes, edges in ((20, 70), (30, 90), (12, 20), (40, 300)):
        edge_index = torch.randint(nodes, (2, edges))
        edge_index[:, :7] = edge_index[:1, :7]  # self-loops, more than one at some nodes
        edge_index[:, 7:9] = edge_index[:, 5:7]
        yield torch.randn(nodes, F, requires_grad=True), edge_index


def results(run, model, *args):
    torch.manual_seed(0)
    out = run(*args)
    leaves = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    return out, *torch.autograd.grad(out.sin().sum(), [*leaves, *model.parameters()])


def whole(fast, **kwargs):
    return torch.compile(fast, backend="aot_eager", fullgraph=True, dynamic=True, **kwargs)


@pytest.mark.heavy("gat", True)
@pytest.mark.heavy("gcn")
@pytest.mark.heavy("tag")
@pytest.mark.heavy("maxk")
@pytest.mark.heavy("gatv2")
@pytest.mark.heavy("transformer")
@pytest.mark.heavy("gin")
@pytest.mark.heavy("sgc")
@pytest.mark.each
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_is_one_graph_for_all_sizes(name, train):
    model = MODELS[name]().train(train)
    fast = optimize(model, *next(batches()), train=train)
    compiled = whole(fast)
    for batch in batches():
        with torch.set_grad_enabled(train):
            if train:
                actual, right = (results(run, model, *batch) for run in (compiled, fast))
                torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)
            else:
                torch.testing.assert_close(compiled(*batch), model(*batch), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_graph_without_edges(name):
    model = MODELS[name]()
    compiled = whole(optimize(model, *next(batches())))
    batch = torch.randn(9, F, requires_grad=True), torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(results(compiled, model, *batch), results(model, model, *batch))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("tree", ["((D·(A·(D·(X·W)))) + b)", "(((D·A·D)·(X·W)) + b)"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_way_to_normalise(tree, weighted):
    conv = nn.GCNConv(F, 4, improved=True).double()
    x, edge_index = list(batches())[3]
    weight = (torch.rand(300).double(),) if weighted else ()
    for each in weight:  # of several loops at a node PyG takes any
        each[edge_index[0] == edge_index[1]] = 0.5
    args = (x.detach().double().requires_grad_(), edge_index, *weight)
    compiled = whole(optimize(conv, *args, choose=tree))
    torch.testing.assert_close(results(compiled, conv, *args), results(conv, conv, *args))


@pytest.mark.full
def test_modes_and_numbers_of_the_layer_are_those_of_the_call():
    conv, (x, edge_index) = nn.GINConv(torch.nn.Linear(F, 4), eps=0.5), next(batches())
    compiled = whole(optimize(conv, x, edge_index))
    for eps in (0.5, 2.0):
        conv.eps.fill_(eps)
        torch.testing.assert_close(compiled(x, edge_index), conv(x, edge_index))
    gat = nn.GATConv(F, 4, dropout=0.5)
    compiled = whole(optimize(gat, x, edge_index))
    torch.testing.assert_close(compiled.eval()(x, edge_index), gat.eval()(x, edge_index))
    a, b = (compiled.train()(x, edge_index) for _ in range(2))
    assert not torch.equal(a, b)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("conv", "args"),
    [(nn.RGCNConv(F, 4, 2), (torch.randint(2, (70,)),)), (nn.ChebConv(F, 4, 3), ())],
    ids=["relations", "chebyshev"],
)
def test_code_that_cannot_be_compiled_breaks_the_graph_and_is_right(conv, args):
    x, edge_index = next(batches())
    fast = optimize(conv, x, edge_index, *args)
    compiled = torch.compile(fast, backend="aot_eager")
    actual, right = (results(run, conv, x, edge_index, *args) for run in (compiled, conv))
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


def test_a_layer_that_was_not_lifted_is_compiled_as_it_is():
    model, (x, edge_index) = Two(lambda i, o: nn.SAGEConv(i, o, aggr="max")).eval(), next(batches())
    compiled = whole(optimize(model, x, edge_index))
    torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))


def test_arguments_of_a_new_kind_break_the_graph_and_are_right():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.GraphConv(F, 4)

        def forward(self, x, edge_index):
            weight = x[:, 0].abs()[edge_index[0]] if self.training else None
            return self.conv(x, edge_index, weight)

    model, (x, edge_index) = Net().eval(), next(batches())
    compiled = torch.compile(optimize(model, x, edge_index), backend="aot_eager")
    for mode in (False, True):
        actual, right = (run.train(mode)(x, edge_index) for run in (compiled, model))
        torch.testing.assert_close(actual, right)


def test_exports_and_traces_run_without_this_package():
    model, (x, edge_index) = nn.GraphSAGE(F, 8, 2).eval(), next(batches())
    x = x.detach()
    fast = optimize(model, x, edge_index)
    exported = torch.export.export(fast, (x, edge_index))
    assert not any("pyg_accel" in str(node.target) for node in exported.graph.nodes)
    for run in (exported.module(), torch.jit.trace(fast, (x, edge_index))):
        torch.testing.assert_close(run(x, edge_index), model(x, edge_index))
