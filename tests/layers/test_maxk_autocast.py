"""The dtype of a MaxK layer's result is that of PyG's layer, in either order of products."""

import pytest
import torch
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from pyg_accel import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

LAYERS = {
    "sage": (MaxKSAGEConv, SAGEConv, {}),
    "sage-normalize": (MaxKSAGEConv, SAGEConv, {"normalize": True}),
    "gcn": (MaxKGCNConv, GCNConv, {}),
    "gcn-plain": (MaxKGCNConv, GCNConv, {"normalize": False}),
    "gin": (MaxKGINConv, GINConv, None),
}
NODES, EDGES, WIDTH = 60, 500, 64


def layer(kind, options, width, *, bias, **given):
    if options is None:
        return kind(torch.nn.Linear(WIDTH, width, bias=bias), **given)
    return kind(WIDTH, width, bias=bias, **options, **given)


@pytest.mark.parametrize("k", [4, 32])
@pytest.mark.parametrize("width", [8, 200])  # fewer and more than what is stored of a row
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast_gives_the_dtype_that_pyg_gives(name, bias, width, k):
    maxk, plain, options = LAYERS[name]
    ours, theirs = layer(maxk, options, width, bias=bias, k=k), layer(plain, options, width,
                                                                      bias=bias)  # fmt: skip
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(NODES, WIDTH, requires_grad=True)
    edge_index = torch.randint(NODES, (2, EDGES))
    exact = theirs(MaxK(k)(x), edge_index)
    allowed = {"rtol": 2e-2, "atol": 2e-2 * float(exact.detach().abs().max())}
    with torch.autocast("cpu", torch.bfloat16):
        actual, right = ours(x, edge_index), theirs(MaxK(k)(x), edge_index)
        half = x.bfloat16()
        found_half, right_half = ours(half, edge_index), theirs(MaxK(k)(half), edge_index)
    assert actual.dtype == right.dtype
    torch.testing.assert_close(actual.float(), exact, **allowed)
    torch.testing.assert_close(found_half, right_half, **allowed)
    actual.float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 200])
def test_weights_of_edges_widen_the_result_as_in_pyg(width, dtype, autocast):
    ours = MaxKGCNConv(WIDTH, width, bias=False, k=4)
    theirs = GCNConv(WIDTH, width, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x, edge_index = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))
    weight = torch.rand(EDGES, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = ours(x, edge_index, weight)
        right = theirs(MaxK(4)(x), edge_index, weight)
    assert actual.dtype == right.dtype == dtype
    allowed = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(actual, right, rtol=allowed, atol=allowed)
