"""Rewritten models on a GPU: every tree of some layers, a step of training, other graphs."""

import pytest
import torch
import torch_geometric.nn as nn

import pyg_accel
from pyg_accel import layers, optimize
from pyg_accel.rewrite import associations
from pyg_accel.rewrite.optimized import rewritten_layers
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N, E = 3000, 60_000

LAYERS = {
    "gcn": lambda: nn.GCNConv(33, 20),
    "sage": lambda: nn.SAGEConv(33, 20),
    "gin": lambda: nn.GINConv(nn.MLP([33, 20, 20])),
    "tag": lambda: nn.TAGConv(33, 20, K=2),
    "gat": lambda: nn.GATConv(20, 33, heads=2),
    "gatv2": lambda: nn.GATv2Conv(20, 33, heads=2),
    "transformer": lambda: nn.TransformerConv(20, 33, heads=2),
    "gate": lambda: nn.TransformerConv(20, 33, heads=2, beta=True),
    "maxk-sage": lambda: layers.MaxKSAGEConv(33, 20, k=5),
    "maxk-gcn": lambda: layers.MaxKGCNConv(33, 20, k=5),
}


def inputs(width=33):
    x = torch.randn(N, width, device="cuda")
    return x, torch.randint(N, (2, E), device="cuda")


def outcome(module, x, edge_index):
    x = x.clone().requires_grad_()
    out = module(x, edge_index)
    seed = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], seed)]


@pytest.mark.parametrize("name", LAYERS)
def test_every_tree_agrees_with_float64(name):
    conv = LAYERS[name]().cuda()
    x, edge_index = inputs(conv.in_channels if hasattr(conv, "in_channels") else 33)
    expected = outcome(conv.double(), x.double(), edge_index)
    conv.float()
    for tree in associations(conv, x, edge_index).all:
        fast = optimize(conv, x, edge_index, train=True, choose=tree)
        for mine, theirs in zip(outcome(fast, x, edge_index), expected, strict=True):
            scale = float(theirs.detach().abs().max())
            assert float((mine - theirs).detach().abs().max()) <= 2e-4 * max(scale, 1.0), str(tree)


def test_a_model_is_trained_as_before():
    torch.manual_seed(0)
    model = nn.GraphSAGE(33, 64, 3, 7, dropout=0.0, norm="batch").cuda()
    x, edge_index = inputs()
    y = torch.randint(7, (N,), device="cuda")
    losses = []
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for module in (model, optimize(model, x, edge_index, train=True, static=("x",))):
        model.load_state_dict(state)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x, edge_index), y)
            loss.backward()
            optimiser.step()
        losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("model", [nn.GCN, nn.GraphSAGE, nn.GAT], ids=lambda m: m.__name__)
def test_a_compiled_model_is_one_graph(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model(33, 16, 2, 4).cuda()
    fast = optimize(model, *inputs(), train=True)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True, dynamic=True)
    for nodes in (N, N // 2):
        x, edge_index = torch.randn(nodes, 33, device="cuda"), inputs()[1] % nodes
        actual, right = (outcome(run, x, edge_index) for run in (compiled, model))
        for mine, theirs in zip(actual, right, strict=True):
            scale = max(float(theirs.detach().abs().max()), 1.0)
            assert float((mine - theirs).detach().abs().max()) <= 1e-3 * scale
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_sample_is_that_of_patched_layers(name):
    conv, settings.always = LAYERS[name]().cuda().eval(), True
    x, edge_index = inputs(conv.in_channels)
    fast = optimize(conv, x, edge_index)
    with torch.no_grad(), pyg_accel.patched(), pyg_accel.sampled(5):
        torch.testing.assert_close(fast(x, edge_index), conv(x, edge_index), rtol=1e-3, atol=1e-3)


def test_a_model_can_move_to_the_gpu():
    model = nn.GCN(33, 16, 2, 4)
    x, edge_index = torch.randn(N, 33), torch.randint(N, (2, E))
    fast = optimize(model, x, edge_index).eval()
    with torch.no_grad():
        expected = fast(x, edge_index)
        actual = fast.cuda()(x.cuda(), edge_index.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)
    assert not any(layer.reasons for layer in rewritten_layers(fast).values())
