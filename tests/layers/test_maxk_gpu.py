"""MaxK layers on a GPU: PyG's results, compiled and captured, without waiting for the device."""

import pytest
import torch
from torch.nn import Linear
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N, E, F, K = 3_000, 40_000, 256, 32
TOLERANCE = 1e-4  # of the largest element: float32 sums in another order, through a product
KINDS = ("SAGE", "GCN", "GIN")


def pair_of(kind):
    if kind == "SAGE":
        ours, stock = MaxKSAGEConv(F, 64, k=K), SAGEConv(F, 64)
    elif kind == "GCN":
        ours, stock = MaxKGCNConv(F, 64, k=K), GCNConv(F, 64)
    else:
        ours, stock = MaxKGINConv(Linear(F, 64), k=K), GINConv(Linear(F, 64))
    stock.load_state_dict(ours.state_dict())
    return ours.cuda(), stock.cuda()


def inputs():
    x = torch.randn(N, F, device="cuda", requires_grad=True)
    return x, torch.randint(N, (2, E), device="cuda")


def masked(x):
    return x * torch.zeros_like(x).scatter(1, x.topk(K, dim=1).indices, 1.0)


def gradients(out, layer, x):
    return torch.autograd.grad(out.square().mean(), [x, *layer.parameters()])


def assert_close(actual, truth):
    for ours, stock in zip(actual, truth, strict=True):
        torch.testing.assert_close(
            ours.detach(),
            stock.detach(),
            rtol=0,
            atol=TOLERANCE * float(stock.detach().abs().max()),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_pygs_on_masked_features(kind):
    (ours, stock), (x, edge_index) = pair_of(kind), inputs()
    out, truth = ours(x, edge_index), stock(masked(x), edge_index)
    assert_close([out, *gradients(out, ours, x)], [truth, *gradients(truth, stock, x)])


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_same_bits_every_time(kind):
    (ours, _), (x, edge_index) = pair_of(kind), inputs()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (ours(x, edge_index) for _ in range(2))
        assert torch.equal(first, second)
        grads = [gradients(out, ours, x)[0] for out in (first, second)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_neither_waits_for_the_device_nor_resists_capture(kind):
    (ours, _), (x, edge_index) = pair_of(kind), inputs()

    def step():  # nothing of an earlier step's graph may be alive while one is captured
        out = ours(x, edge_index)
        return [t.detach() for t in (out, *gradients(out, ours, x))]

    truth = [t.clone() for t in step()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert_close(captured, truth)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_whole(kind):
    (ours, _), (x, edge_index) = pair_of(kind), inputs()
    if kind == "GCN":
        ours.normalize = False  # PyG's self-loops are a mask, whose size no graph can know
    out = ours(x, edge_index)
    actual = torch.compile(ours, fullgraph=True)(x, edge_index)
    assert_close([actual, *gradients(actual, ours, x)], [out, *gradients(out, ours, x)])
