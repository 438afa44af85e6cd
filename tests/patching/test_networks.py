"""Networks on every edge: matrices of edges by algebra, and the rest in blocks of target rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.aggr import MaxAggregation

import pyg_accel
from benchmarks.layers.modes import traces
from tests.patching.edge_networks import LAYERS, X_E, Mine, N, case, mlp, world


@pytest.mark.one_of(5)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_equal_stock(name, same_as_stock, report_of):
    layer, args = case(name)
    same_as_stock(layer, *args)
    assert any("network" in row.formula or "outer" in row.formula for row in report_of())


class Sloped(Mine):
    """Reads numbers of the layer and of the module, and a buffer."""

    def __init__(self) -> None:
        super().__init__(mlp(41, 20, 24))
        self.slope = 0.1
        self.register_buffer("shift", torch.randn(24))

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        out = nn.functional.leaky_relu(super().message(x_i, x_j, w), self.slope)
        return nn.functional.layer_norm(out, (24,), None, self.shift.to(out.dtype), EPSILON)


EPSILON = 1e-5


def scale_parameters(layer: nn.Module) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(1.5)


def replace_a_weight(layer: nn.Module) -> None:
    part = next(m for m in layer.modules() if isinstance(m, nn.Linear))
    part.weight = nn.Parameter(part.weight.detach() * 2)


def turn_a_network_off(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, part in module._modules.items():
            if isinstance(part, nn.ReLU):
                module._modules[name] = nn.Identity()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parameters": scale_parameters,
    "a weight": replace_a_weight,
    "an activation": turn_a_network_off,
    "a number": lambda layer: setattr(layer, "slope", 0.7),
    "a buffer": lambda layer: layer.register_buffer("shift", torch.ones(24)),
    "a buffer in place": lambda layer: layer.shift.mul_(3),
    "a global": lambda layer: globals().__setitem__("EPSILON", EPSILON * 1e4),
    "no gradients": lambda layer: layer.requires_grad_(False),
    "another reduction": lambda layer: setattr(layer, "aggr_module", MaxAggregation()),
}  # fmt: skip


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_network_reads_may_change_between_warm_calls(change, monkeypatch, same_as_stock):
    monkeypatch.setitem(globals(), "EPSILON", 1e-5)
    layer, args = Sloped().double(), world(*X_E)
    with pyg_accel.patched():
        for _ in range(3):
            before = layer(*args)
        with traces() as entered:
            layer(*args)
        assert not entered
        CHANGES[change](layer)
        same_as_stock(layer, *args)
        with traces() as entered:
            assert not torch.equal(layer(*args), before) or change == "no gradients"
        assert not entered


@pytest.mark.one_of(3)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", LAYERS)
def test_programs_serve_graphs_of_other_sizes(name, train):
    make, names = LAYERS[name]
    layer = make().double()
    stock = copy.deepcopy(layer)
    sizes = (40, 300), (40, 300), (60, 300), (60, 500), (45, 501), (90, 333), (40, 900)
    for nodes, edges in sizes:
        args = world(*names, nodes=nodes, edges=edges)
        with pyg_accel.patched(), torch.set_grad_enabled(train), traces() as entered:
            out = layer(*args)
        with torch.set_grad_enabled(train):
            right = stock(*args)
        torch.testing.assert_close(out, right)
        if train:
            leaves = [t for t in (*args, *layer.parameters()) if t.requires_grad]
            others = [t for t in (*args, *stock.parameters()) if t.requires_grad]
            for mine, true in zip(torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True),
                                  torch.autograd.grad(right.sin().sum(), others, allow_unused=True),
                                  strict=True):  # fmt: skip
                torch.testing.assert_close(mine, true)
        assert not entered or edges < 900


@pytest.mark.usefixtures("pieces")
def test_layers_of_a_class_share_a_program_if_their_numbers_are_equal(same_as_stock):
    one, other, third = (Sloped().double() for _ in range(3))
    third.slope = 0.7
    args = world(*X_E)
    with pyg_accel.patched():
        for _ in range(3):
            one(*args)
        with traces() as entered:
            other(*args)
        assert not entered
        same_as_stock(other, *args)
        same_as_stock(third, *args)


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "nn-mean", "nn-max", "edge", "mine"])
@pytest.mark.parametrize("edges", [0, 1])
def test_graphs_with_next_to_nothing_in_them_equal_stock(name, edges, same_as_stock):
    make, names = LAYERS[name]
    x, edge_index, *rest = world(*names)
    rest = [t.detach()[:edges].requires_grad_() for t in rest]
    same_as_stock(make().double(), x, edge_index[:, :edges], *rest)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", ["nn", "nn-max", "edge", "mine-max"])
def test_blocks_of_targets_without_edges_equal_stock(name, same_as_stock, report_of):
    make, names = LAYERS[name]
    args = [torch.cat([t.detach(), t.detach()]).requires_grad_() if name in ("x", "pos") else t
            for name, t in zip(names, world(*names), strict=True)]  # fmt: skip
    same_as_stock(make().double(), *args)
    assert any("in blocks" in row.formula for row in report_of())


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "edge", "mine"])
def test_the_other_flow_and_two_kinds_of_nodes_equal_stock(name, same_as_stock):
    make, names = LAYERS[name]
    layer = make().double()
    layer.flow = "target_to_source"
    same_as_stock(layer, *world(*names))
    if name != "mine":
        layer.flow = "source_to_target"
        x, edge_index, *rest = world(*names)
        edge_index[1] %= 11
        same_as_stock(layer, (x, x.detach()[:11].clone().requires_grad_()), edge_index, *rest)


@pytest.mark.each
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["nn", "nn-max", "edge-mean", "mine", "product"])
def test_gradients_have_gradients(name):
    layer, args = case(name)

    def twice() -> list[Tensor]:
        leaves = [t for t in args if t.requires_grad]
        (first,) = torch.autograd.grad(layer(*args).sin().sum(), leaves[:1], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [*leaves, *layer.parameters()],
                                        allow_unused=True))  # fmt: skip

    expected = twice()
    with pyg_accel.patched():
        actual = twice()
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("blocks")
def test_features_that_no_edge_reads_do_not_matter():
    """Rows of few edges are filled up with zeros, not with what happens to be in memory."""
    layer = pyg.NNConv(18, 20, mlp(5, 7, 360)).double()
    x, edges, e = (t.detach() for t in world(*X_E))
    x[0], x[N - 1] = torch.inf, torch.nan
    reached = layer(x, edges, e)
    with pyg_accel.patched():
        actual = layer(x, edges, e)
    torch.testing.assert_close(actual, reached, equal_nan=True)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nn", "edge-mean"])
def test_other_dtypes_stay_close_to_stock(name, dtype, same_as_stock):
    make, names = LAYERS[name]
    args = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t
            for t in world(*names)]  # fmt: skip
    same_as_stock(make().to(dtype), *args, rtol=5e-2 if dtype == torch.bfloat16 else 1e-4)


# -- precision ------------------------------------------------------------------------------------


# -- memory ---------------------------------------------------------------------------------------


# -- what has to look at all edges ----------------------------------------------------------------


# -- at default settings --------------------------------------------------------------------------
