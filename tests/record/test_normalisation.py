"""Normalisation by degrees of nodes in programs for a GPU: the results of weights of edges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    GCN2Conv,
    GCNConv,
    LGConv,
    SGConv,
    SSGConv,
    TAGConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_accel
from pyg_accel.patching import programs
from pyg_accel.record.normalisation import node_scales
from pyg_accel.record.program import LayerProgram

N, F = 40, 6
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: GCNConv(F, F),
    "gcn, target to source": lambda: GCNConv(F, F, flow="target_to_source"),
    "gcn without loops": lambda: GCNConv(F, F, add_self_loops=False),
    "sg": lambda: SGConv(F, F, K=2),
    "ssg": lambda: SSGConv(F, F, 0.1, K=2),
    "tag": lambda: TAGConv(F, F, K=2),
    "appnp": lambda: APPNP(2, 0.1),
    "light": lambda: LGConv(),
    "gcn2": lambda: GCN2Conv(F, 0.1),
}


def graph() -> Tensor:
    """Edges with loops, several of one node too, duplicates and nodes without edges."""
    edges = torch.randint(N - 3, (2, 150))
    edges[0, :12] = edges[1, :12]
    edges[:, 1] = edges[:, 0]
    edges[:, 21] = edges[:, 20]
    return edges


@pytest.fixture
def by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a CPU that are made like those for a GPU."""
    finish = LayerProgram.__post_init__

    def post_init(program: LayerProgram) -> None:
        program.by_nodes = True
        finish(program)

    monkeypatch.setattr(LayerProgram, "__post_init__", post_init)


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_pyg(name: str, by_nodes: None) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().double(), torch.randn(N, F, dtype=torch.float64)
    graphs = [graph() for _ in range(4)]

    def run(edges: Tensor) -> list[Tensor]:
        features = x.clone().requires_grad_()
        args = (features, features) if isinstance(layer, GCN2Conv) else (features,)
        out = layer(*args, edges)
        return [out, *torch.autograd.grad(out.square().sum(), [features, *layer.parameters()])]

    expected = [run(edges) for edges in graphs]
    with pyg_accel.patched(layer):
        for edges, right in zip(graphs, expected, strict=True):
            torch.testing.assert_close(run(edges), right)
        known = programs.own(layer, "call")
    assert known is not None
    assert any("mul(v0,mul(u1,u2))" in str(p._functions[0].__code__.co_consts)
               for p in known.programs)  # fmt: skip


def test_weights_that_the_layer_returns_stay(by_nodes: None) -> None:
    class Returns(GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Any = None) -> Any:
            edges, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
            return self.propagate(edges, x=x, edge_weight=weight), weight

    layer, x, edges = Returns(F, F), torch.randn(N, F), graph()
    expected = layer(x, edges)
    with pyg_accel.patched(layer):
        for _ in range(3):
            torch.testing.assert_close(layer(x, edges), expected)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("target", [0, 1])
def test_scales_are_products_of_weights(target: int, loops: bool) -> None:
    edges = graph()
    flow = "source_to_target" if target else "target_to_source"
    scale, own = node_scales(edges, N, target, loops, torch.float64)
    weighted, weight = gcn_norm(edges, None, N, False, loops, flow, torch.float64)
    right = torch.zeros(N, N, dtype=torch.float64)
    right.index_put_((weighted[target], weighted[1 - target]), weight, accumulate=True)
    found = torch.zeros(N, N, dtype=torch.float64)
    ones = torch.ones(edges.size(1), dtype=torch.float64)
    found.index_put_((edges[target], edges[1 - target]), ones, accumulate=True)
    torch.testing.assert_close(scale * found * scale.t() + torch.diag(own[:, 0]), right)
