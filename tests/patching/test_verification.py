"""PYG_ACCEL_VERIFY: no wrong result passes, and no right one is complained of."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCN, HeteroConv, PNAConv, RGCNConv, SAGEConv, SimpleConv

import pyg_accel
from pyg_accel.errors import VerificationError
from pyg_accel.patching import gate, programs
from pyg_accel.settings import settings

pytestmark = pytest.mark.usefixtures("always")

N, E = 20, 90


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, 6)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, N, (2, E))


def test_verify_passes_on_right_results_and_draws_no_other_random_numbers(x, edge_index):
    model = GCN(6, 8, 2, dropout=0.5).train()
    torch.manual_seed(1)
    expected = model(x, edge_index)
    settings.verify = True
    with pyg_accel.patched():
        torch.manual_seed(1)
        torch.testing.assert_close(model(x, edge_index), expected)


def test_verify_raises_on_a_wrong_result(x, edge_index, off_by):
    off_by(1.5)
    settings.verify = True
    with (
        pyg_accel.patched(),
        pytest.raises(VerificationError, match="SAGEConv: accelerated and PyG"),
    ):
        SAGEConv(6, 4)(x, edge_index)


@pytest.mark.parametrize("scale", [1e-4, 1e4], ids=str)
@pytest.mark.parametrize("infinite", [False, True])
def test_small_results_and_those_beside_infinite_ones_are_compared_too(
    scale, infinite, x, edge_index, off_by
):
    x = x * scale
    x[0, 0] = float("inf") if infinite else scale
    settings.verify = True
    with pyg_accel.patched():
        SimpleConv()(x, edge_index)
        off_by(1.1)
        with pytest.raises(VerificationError, match="SimpleConv"):
            SimpleConv()(x, edge_index)


def pna(aggregators: list[str]) -> PNAConv:
    return PNAConv(6, 4, aggregators, ["identity"], torch.bincount(torch.arange(9)))


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4], ids=str)
def test_deviations_of_large_numbers_lose_digits_and_that_is_no_mistake(offset, x, edge_index):
    """Their variance is a difference of squares: wrong in PyG by as much."""
    layer = pna(["std"])
    settings.verify = True
    with pyg_accel.patched():
        layer(offset + x, edge_index)
        SAGEConv(6, 4, aggr=["var", "std"])(offset + x, edge_index)


def test_a_deviation_is_on_either_side_of_the_limit_below_which_it_is_0():
    """PyG rounds to one side, and the kernels to the other: it is the root of 1e-5, or 0."""
    star = torch.stack([torch.arange(1, 9), torch.zeros(8, dtype=torch.long)])
    layer = SAGEConv(1, 4, aggr=["mean", "std"])
    settings.verify = True
    with pyg_accel.patched():
        for seed in range(60):
            torch.manual_seed(seed)
            x = torch.randn(9, 1, dtype=torch.float64)
            x[1:] = (x[1:] - x[1:].mean()) / x[1:].std(correction=0)
            layer((1 + 1e-5**0.5 * x).float(), star)


def test_a_weight_of_two_parts_is_converted_in_both(x, edge_index):
    class Tied(SAGEConv):
        def __init__(self) -> None:
            super().__init__(6, 6, aggr="std")
            self.lin_r.weight = self.lin_l.weight

        def message(self, x_j: Tensor) -> Tensor:
            return self.lin_r(torch.nn.functional.linear(x_j, self.lin_l.weight))

    settings.verify, layer = True, Tied()
    torch.nn.init.eye_(layer.lin_l.weight)
    with pyg_accel.patched():
        layer(1e3 + x, edge_index)


@pytest.mark.parametrize("offset", [0.0, 1e2], ids=str)
def test_a_deviation_that_is_wrong_by_more_than_that_is_found(offset, x, edge_index, off_by):
    off_by(1.1)
    settings.verify = True
    with pyg_accel.patched(), pytest.raises(VerificationError, match="PNAConv"):
        pna(["std"])(offset + x, edge_index)


def test_a_layer_that_cannot_run_in_double_is_held_to_the_tolerance(x, edge_index, off_by):
    class Scales(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return torch.nn.functional.linear(x_j, self.kept["weight"])

    layer = Scales(6, 4)
    layer.kept = {"weight": torch.randn(6, 6)}
    settings.verify = True
    with pyg_accel.patched():
        layer(x, edge_index)
        off_by(1.5)
        with pytest.raises(VerificationError, match="Scales"):
            layer(x, edge_index)


def test_a_program_that_goes_on_with_an_old_value_is_found(x, edge_index, monkeypatch):
    class Scaled(SAGEConv):
        scale = 1.0

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, edge_index) * self.scale

    settings.verify, layer = True, Scaled(6, 4)
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, edge_index)
        assert programs.find(layer, "call").programs[0].state.used
        layer.scale = 2.0
        layer(x, edge_index)
        monkeypatch.setattr(gate, "unchanged", lambda parts: True)
        layer.scale = 3.0
        with pytest.raises(VerificationError, match="Scaled"):
            layer(x, edge_index)


EDGE_TYPES = [("a", f"to {i}", "a") for i in range(3)]
OF_RELATIONS = {
    "RGCNConv": lambda x, edges: (RGCNConv(6, 4, 3), (x, edges, torch.arange(E) % 3)),
    "HeteroConv": lambda x, edges: (
        HeteroConv({kind: SAGEConv(6, 4) for kind in EDGE_TYPES}),
        ({"a": x}, dict.fromkeys(EDGE_TYPES, edges)),
    ),
}


@pytest.mark.parametrize("name", OF_RELATIONS)
def test_a_wrong_result_of_stacked_relations_is_found(name, x, edge_index, off_by, report_of):
    layer, args = OF_RELATIONS[name](x, edge_index)
    settings.verify = True
    with pyg_accel.patched():
        layer(*args)
        assert "mean_j u0, 3 relations" in {row.formula for row in report_of()}
        off_by(1.5, above=N)  # not of the layer of a relation, whose calls are verified too
        with pytest.raises(VerificationError, match=name):
            layer(*args)
