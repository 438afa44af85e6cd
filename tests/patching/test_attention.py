"""Attention layers under ``patch()``: weights that wait, and those that leave their layer."""

import copy
import pickle
from typing import Optional

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import functional as fn
from torch_geometric.utils import softmax

import pyg_accel
from pyg_accel.patching.attention import Weights

OptInt = Optional[int]  # noqa: UP045 - as PyG writes it
pytestmark = pytest.mark.usefixtures("always")
N, E, F = 30, 200, 6
X = torch.randn(N, F, dtype=torch.float64)
EDGES = torch.randint(N, (2, E))
ATTRIBUTES = torch.randn(E, 3, dtype=torch.float64)
LAYERS = {
    "gat": lambda **k: pyg.GATConv(F, 4, heads=3, **k),
    "gatv2": lambda **k: pyg.GATv2Conv(F, 4, heads=3, **k),
    "transformer": lambda **k: pyg.TransformerConv(F, 4, heads=3, **k),
}


@pytest.fixture(params=LAYERS)
def make(request):
    return lambda **k: LAYERS[request.param](**k).double()


def x() -> Tensor:
    return X.clone().requires_grad_()


@pytest.mark.parametrize("asked", [True, False])
def test_returned_weights_are_those_of_stock(make, asked, same_as_stock):
    same_as_stock(make(), x(), EDGES, return_attention_weights=asked)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("options", [{"concat": False}, {"bias": False}, {"edge_dim": 3}], ids=str)
def test_options_do_not_matter(make, options, same_as_stock):
    edges = {"edge_attr": ATTRIBUTES.clone().requires_grad_()} if "edge_dim" in options else {}
    same_as_stock(make(**options), x(), EDGES, **edges)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("p", [0.3, 0.9, 1.0])
def test_dropout_draws_the_numbers_of_stock(make, p, same_as_stock):
    """In the backward pass too: gradients are compared."""
    same_as_stock(make(dropout=p).train(), x(), EDGES)
    same_as_stock(make(dropout=p).train(), x(), EDGES, return_attention_weights=True)
    same_as_stock(make(dropout=p).eval(), x(), EDGES)


def test_dropout_keeps_the_share_it_should():
    """Of equal weights, so that the sum of values of 1 counts what is left."""
    layer = pyg.GATConv(1, 1, heads=4, dropout=0.4, add_self_loops=False, bias=False)
    nodes = 500
    edges = torch.stack([torch.arange(nodes).repeat_interleave(40), torch.arange(40).repeat(nodes)])
    with pyg_accel.patched(), torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.lin.weight.fill_(1.0)
        out = layer(torch.ones(nodes, 1), edges)[:40]  # the mean of mask / 0.6 over 500 edges
        assert (
            torch.equal(layer.eval()(torch.ones(nodes, 1), edges)[:40], torch.ones(40, 4))
            or (layer(torch.ones(nodes, 1), edges)[:40] - 1).abs().max() < 1e-5
        )
    kept = float(out.mean()) * 0.6
    deviation = (0.6 * 0.4 / out.numel() / nodes) ** 0.5
    assert abs(kept - 0.6) < 5 * deviation
    assert 0.5 < float(out.std()) / (0.4 / 0.6 / nodes) ** 0.5 < 2


def test_verification_follows_dropout(make):
    pyg_accel.settings.verify = True
    with pyg_accel.patched():
        make(dropout=0.5).train()(X, EDGES)


def weights_of(layer: pyg.MessagePassing, inputs: Tensor) -> Tensor:
    with pyg_accel.patched():
        return layer(inputs, EDGES, return_attention_weights=True)[1][1]


def test_returned_weights_are_tensors_to_everyone():
    layer = pyg.GATConv(F, 4, heads=3).double()
    right = layer(X, EDGES, return_attention_weights=True)[1][1].detach()
    alpha = weights_of(layer, X)
    assert type(alpha) is Tensor
    assert alpha.shape == right.shape
    assert (alpha.dtype, alpha.device, len(alpha)) == (right.dtype, right.device, len(right))
    assert alpha.requires_grad
    assert alpha.grad_fn is not None
    for look in (
        lambda a: a.detach(),
        lambda a: a + 0,
        lambda a: a[:],
        lambda a: torch.stack([a, a])[1],
        lambda a: a.unsqueeze(-1).squeeze(-1) * 1,
        lambda a: a.view(-1, 3, 1)[..., 0],
        lambda a: torch.from_numpy(a.detach().numpy()),
        lambda a: copy.deepcopy(a.detach()),
        lambda a: pickle.loads(pickle.dumps(a.detach())),
        lambda a: torch.utils.dlpack.from_dlpack(a.detach()),
        lambda a: torch.tensor(a.tolist(), dtype=a.dtype),
    ):
        torch.testing.assert_close(look(weights_of(layer, X)).detach(), right)
    assert repr(alpha).startswith("tensor(")
    assert f"{alpha.sum():.3f}" == f"{right.sum():.3f}"
    out = torch.zeros(right.shape, dtype=right.dtype)
    out.copy_(alpha.detach())
    torch.testing.assert_close(out, right)


def test_a_loss_on_the_weights_reaches_the_parameters():
    layer = pyg.GATv2Conv(F, 4, heads=3).double()

    def gradients() -> list[Tensor]:
        out, (_, alpha) = layer(X, EDGES, return_attention_weights=True)
        loss = out.square().sum() + (alpha * alpha.clamp(min=1e-9).log()).sum()
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    stock = gradients()
    with pyg_accel.patched():
        torch.testing.assert_close(gradients(), stock)


def test_weights_survive_a_step_of_the_optimiser():
    layer = pyg.GATv2Conv(F, 4, heads=3, share_weights=True).double()
    right = layer(X, EDGES, return_attention_weights=True)[1][1].detach()
    alpha = weights_of(layer, X)
    torch.optim.SGD(layer.parameters(), lr=1.0).zero_grad()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(1.0)
    torch.testing.assert_close(alpha.detach(), right)


class Bare(pyg.MessagePassing):
    def forward(self, score: Tensor, edge_index: Tensor) -> Tensor:
        return self.edge_updater(edge_index, score=score, size=(N, N))

    def edge_update(self, score_j: Tensor, index: Tensor) -> Tensor:
        return softmax(score_j, index, num_nodes=N)


def test_weights_of_features_that_were_changed_in_place_are_those_of_before():
    score = torch.randn(N, 2)
    right = Bare()(score, EDGES)
    with pyg_accel.patched():
        alpha = Bare()(score, EDGES)
        score.add_(1.0)
        assert type(alpha) is Tensor
        torch.testing.assert_close(alpha, right)


class Stores(pyg.MessagePassing):
    """A user's attention layer that leaves its weights in an attribute."""

    def __init__(self) -> None:
        super().__init__(node_dim=0)
        self.lin = torch.nn.Linear(F, F)

    def forward(self, inputs: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        out = self.propagate(edge_index, x=self.lin(inputs))
        return out, self.alpha

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, dim_size: OptInt) -> Tensor:
        self.alpha = softmax((x_i * x_j).sum(-1), index, num_nodes=dim_size)
        return self.alpha.unsqueeze(-1) * x_j


class StoresGates(Stores):
    """Its weights are no softmax."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.alpha = (x_i + x_j).tanh()
        return self.alpha * x_j


class Lists(Stores):
    """It leaves its weights in a list."""

    def forward(self, inputs: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.propagate(edge_index, x=self.lin(inputs)), self.all[0]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, dim_size: OptInt) -> Tensor:
        self.all = [softmax((x_i * x_j).sum(-1), index, num_nodes=dim_size)]
        return self.all[0].unsqueeze(-1) * x_j


class Clears(Stores):
    """It returns weights that it has cleared, and nobody has to ask."""

    def forward(self, inputs: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        out, alpha = super().forward(inputs, edge_index)
        self.alpha = None
        return out, alpha


class AsksItself(pyg.GATConv):
    """A layer whose base is asked whatever the caller says."""

    def forward(
        self,
        inputs: Tensor,
        edge_index: Tensor,
        return_attention_weights: Optional[bool] = None,  # noqa: UP045
    ) -> tuple[Tensor, Tensor]:
        out, (_, alpha) = super().forward(inputs, edge_index, return_attention_weights=True)
        return out, alpha


LEAVE = {name: (make, {"return_attention_weights": True}) for name, make in LAYERS.items()} | {
    "dropout": (
        lambda: pyg.GATv2Conv(F, 4, heads=2, dropout=0.5), {"return_attention_weights": True}),
    "fa": (lambda: Both(pyg.FAConv(F)), {"return_attention_weights": True}),
    "rgat": (lambda: Typed(pyg.RGATConv(F, 4, 3, heads=2)), {"return_attention_weights": True}),
    "stores": (Stores, {}),
    "stores gates": (StoresGates, {}),
    "lists": (Lists, {}),
    "clears": (Clears, {}),
    "asks itself": (lambda: AsksItself(F, 4), {}),
}  # fmt: skip


class Both(torch.nn.Module):
    """A layer of two kinds of features, given one."""

    def __init__(self, layer: pyg.MessagePassing) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor, edge_index: Tensor, **options: bool) -> Tensor:
        return self.layer(inputs, inputs, edge_index, **options)


class Typed(Both):
    """A layer of typed edges."""

    def forward(self, inputs: Tensor, edge_index: Tensor, **options: bool) -> Tensor:
        return self.layer(inputs, edge_index, torch.arange(E) % 3, **options)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("case", LEAVE)
def test_the_result_is_made_of_the_weights_that_leave(case):
    make, options = LEAVE[case]
    layer = make().double()

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        out, alpha = layer(x(), EDGES, **options)
        alpha = alpha[1] if isinstance(alpha, tuple) else alpha
        assert type(alpha) is Tensor
        seen: list[Tensor] = []
        alpha.register_hook(seen.append)
        actual = torch.autograd.grad(out.square().sum(), (alpha, *layer.parameters()),
                                    materialize_grads=True)  # fmt: skip
        torch.nn.Parameter(alpha.detach())
        return [out, alpha, *seen, *actual]

    stock = run()
    assert len(stock) == 4 + len(list(layer.parameters()))
    with pyg_accel.patched():
        for _ in range(3):  # traced, and as it is known from then on
            torch.testing.assert_close(run(), stock)
            with torch.no_grad():
                _, alpha = layer(X, EDGES, **options)
                assert type(alpha[1] if isinstance(alpha, tuple) else alpha) is Tensor


@pytest.mark.parametrize("case", ["gat", "gatv2", "transformer"])
def test_weights_that_leave_in_one_call_are_fused_in_the_next(case, report_of):
    layer = LAYERS[case]().double()
    with pyg_accel.patched():
        for _ in range(2):
            layer(x(), EDGES, return_attention_weights=True)
            pyg_accel.reset_report()
            layer(x(), EDGES, None, None) if case != "transformer" else layer(x(), EDGES)
            assert any("mul(softmax_j(" in row.formula for row in report_of())


class Own(pyg.MessagePassing):
    """A user's attention: a gate on the values, weights that are scaled, an edge's own factor."""

    def __init__(self) -> None:
        super().__init__(node_dim=0)
        self.q, self.k = torch.nn.Linear(F, 8), torch.nn.Linear(F, 8)

    def forward(self, inputs: Tensor, edge_index: Tensor, factor: Tensor) -> Tensor:
        q, k = self.q(inputs).view(-1, 2, 4), self.k(inputs).view(-1, 2, 4)
        return self.propagate(edge_index, q=q, k=k, factor=factor)

    def message(
        self, q_i: Tensor, k_j: Tensor, factor: Tensor, index: Tensor, dim_size: OptInt
    ) -> Tensor:
        score = fn.leaky_relu((q_i - k_j).square().sum(-1).neg() * 0.5 + factor)
        alpha = softmax(score, index, num_nodes=dim_size)
        return -alpha.view(-1, 2, 1) * factor.unsqueeze(-1) * (k_j + q_i) / 3


def test_a_users_own_layer_becomes_attention(same_as_stock, report_of):
    factor = torch.rand(E, 2, dtype=torch.float64, requires_grad=True)
    same_as_stock(Own().double(), x(), EDGES, factor)
    (row,) = report_of()
    assert row.formula.startswith("sum_j mul(softmax_j(leaky_relu(add(mul(neg(sum(")


class TwoUses(Own):
    """The weights leave by another way too."""

    def message(
        self, q_i: Tensor, k_j: Tensor, factor: Tensor, index: Tensor, dim_size: OptInt
    ) -> Tensor:
        alpha = softmax((q_i * k_j).sum(-1), index, num_nodes=dim_size)
        self.entropy = -(alpha * (alpha + 1e-9).log()).sum()
        return alpha.unsqueeze(-1) * k_j + alpha.unsqueeze(-1) ** 2


def test_weights_that_are_used_otherwise_are_written_out(same_as_stock):
    same_as_stock(TwoUses().double(), x(), EDGES, torch.zeros(E, 2, dtype=torch.float64))


def test_supergat_in_training(same_as_stock):
    layer = pyg.SuperGATConv(F, 4, heads=2, dropout=0.2, edge_sample_ratio=1.0).double().train()
    same_as_stock(layer, x(), EDGES)


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_kept_alive(make, grad):
    layer = make()
    with pyg_accel.patched(), torch.set_grad_enabled(grad):
        layer(X, EDGES.clone())
    assert not any(isinstance(value, (Weights, Tensor)) for value in vars(layer).values())


def test_weights_are_not_computed_when_nobody_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(Weights, "ordinary", lambda self: asked.append(self))
    with pyg_accel.patched():
        for layer in LAYERS.values():
            layer(dropout=0.5).double().train()(X, EDGES)
    assert not asked
