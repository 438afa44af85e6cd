"""``x += conv(x)``: trains under patch() where it does in PyG, and raises where it does not."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear

import pyg_accel
from pyg_accel.settings import settings

N, E, F = 40, 200, 8
LAYERS: dict[str, Callable[[], pyg.MessagePassing]] = {
    "cg": lambda: pyg.CGConv(F),
    "edge": lambda: pyg.EdgeConv(Linear(2 * F, F)),
    "feast": lambda: pyg.FeaStConv(F, F),
    "gcn": lambda: pyg.GCNConv(F, F),
    "gin": lambda: pyg.GINConv(Linear(F, F)),
    "gine": lambda: pyg.GINEConv(Linear(F, F)),
    "sage": lambda: pyg.SAGEConv(F, F),
    "std": lambda: pyg.SimpleConv("std"),
    "transformer": lambda: pyg.TransformerConv(F, F),
}


def outcome(
    layer: pyg.MessagePassing, x: Tensor, extra: tuple[Tensor, ...], *, times: int
) -> object:
    """Gradients of the last of some calls, or the error."""
    edge_index = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))
    for _ in range(times):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        state = leaf * 2.0
        state += layer(state, edge_index, *extra)
        try:
            state.pow(2).sum().backward()
        except RuntimeError as error:
            return str(error).splitlines()[0][:60]
    return [leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("times", [1, 2, 3])  # recorded, with other sizes, and by a program
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_read_may_be_changed_where_pyg_copies_it(name, times):
    settings.always = True
    layer, x = LAYERS[name](), torch.randn(N, F)
    extra = (torch.randn(E, F),) if name == "gine" else ()
    right = outcome(copy.deepcopy(layer), x, extra, times=times)
    with pyg_accel.patched():
        actual = outcome(layer, x, extra, times=times)
    if isinstance(right, str):
        assert actual == right
    else:
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4)
