"""MaxK layers under transforms, in traces and in TorchScript: PyG's layers on masked features."""

import copy
import io
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, to_hetero

import pyg_accel
from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv, maxk

N, E, F, H, K = 11, 40, 12, 5, 3
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(F, H), torch.nn.Tanh(), torch.nn.Linear(H, H))


LAYERS: dict[str, Any] = {
    "SAGE": (lambda: MaxKSAGEConv(F, H, k=K), lambda: SAGEConv(F, H)),
    "SAGE, many outputs": (lambda: MaxKSAGEConv(F, 40, k=K), lambda: SAGEConv(F, 40)),
    "SAGE, sum, no root": (
        lambda: MaxKSAGEConv(F, H, aggr="sum", root_weight=False, bias=False, k=K),
        lambda: SAGEConv(F, H, aggr="sum", root_weight=False, bias=False),
    ),
    "SAGE, max, normalize": (
        lambda: MaxKSAGEConv(F, H, aggr="max", normalize=True, k=K),
        lambda: SAGEConv(F, H, aggr="max", normalize=True),
    ),
    "GCN": (lambda: MaxKGCNConv(F, H, k=K), lambda: GCNConv(F, H)),
    "GCN, not normalized": (
        lambda: MaxKGCNConv(F, H, normalize=False, bias=False, k=K),
        lambda: GCNConv(F, H, normalize=False, bias=False),
    ),
    "GCN, k > F": (lambda: MaxKGCNConv(F, H, k=F + 1), lambda: GCNConv(F, H)),
    "GIN": (lambda: MaxKGINConv(mlp(), k=K), lambda: GINConv(mlp())),
    "GIN, eps": (
        lambda: MaxKGINConv(mlp(), eps=0.3, train_eps=True, k=K),
        lambda: GINConv(mlp(), eps=0.3, train_eps=True),
    ),
}


class OnMasked(torch.nn.Module):
    """PyG's layer on features that are masked by sorting."""

    def __init__(self, conv: torch.nn.Module, k: int) -> None:
        super().__init__()
        self.conv, self.k = conv, k

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        kept = x.argsort(dim=-1, descending=True, stable=True)[..., : self.k]
        return self.conv(x * torch.zeros_like(x).scatter(-1, kept, 1.0), edge_index)


@pytest.fixture(params=LAYERS)
def pair(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(1)
    ours, stock = (make().double() for make in LAYERS[request.param])
    stock.load_state_dict(ours.state_dict())
    return ours, OnMasked(stock, ours.k)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(N, F, dtype=torch.float64), torch.randint(N, (2, E))


def of_parameters(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Any:
    """Gradients of parameters, by a functional call."""
    named = dict(layer.named_parameters())
    actual = func.grad(
        lambda values: func.functional_call(layer, values, (x, edge_index)).square().sum()
    )(named)
    return [actual[name] for name in named]


def dual(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x.cos()), edge_index)))


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x, e: func.grad(lambda t: f(t, e).square().sum())(x),
    "grad of grad": lambda f, x, e: func.grad(
        lambda s: func.grad(lambda t: f(t, e).square().sum())(s).square().sum()
    )(x),
    "vjp": lambda f, x, e: func.vjp(lambda t: f(t, e).square().sum(), x)[1](
        torch.tensor(2.0).double()
    ),
    "jvp": lambda f, x, e: func.jvp(lambda t: f(t, e), (x,), (x.cos(),)),
    "jacrev": lambda f, x, e: func.jacrev(lambda t: f(t, e).sum(0))(x),
    "jacfwd": lambda f, x, e: func.jacfwd(lambda t: f(t, e).sum(0))(x),
    "vmap": lambda f, x, e: func.vmap(lambda t: f(t, e))(torch.stack([x, -x])),
    "linearize": lambda f, x, e: func.linearize(lambda t: f(t, e), x)[1](x.cos()),
    "parameters": of_parameters,
    "dual level": dual,
}


@pytest.mark.each
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_pygs_on_masked_features(pair, name, patched):
    ours, stock = pair
    x, edge_index = inputs()
    with pyg_accel.patched() if patched else nullcontext():
        actual = TRANSFORMS[name](ours, x, edge_index)
        expected = TRANSFORMS[name](stock, x, edge_index)
        assert type(actual) is type(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours(x, edge_index), stock(x, edge_index))  # by kernels again


@pytest.mark.each
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("how", ["trace", "script", "script, saved", "script, copied", "export"])
def test_compiled_forms_equal_pygs_on_masked_features(pair, how, patched):
    ours, stock = pair
    x, edge_index = inputs()
    with pyg_accel.patched() if patched else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")
        if how == "trace":
            compiled = torch.jit.trace(ours, (x, edge_index))
        elif how == "export":
            compiled = torch.export.export(ours, (x, edge_index)).module()
        else:
            compiled = torch.jit.script(copy.deepcopy(ours) if how == "script, copied" else ours)
        if how == "script, saved" and not isinstance(ours, GCNConv):  # of which PyG's fails too
            file = io.BytesIO()
            torch.jit.save(compiled, file)
            compiled = torch.jit.load(io.BytesIO(file.getvalue()))
        for values in (x, -x):  # others are selected
            actual, expected = compiled(values, edge_index), stock(values, edge_index)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_a_trace_serves_graphs_of_other_sizes(pair):
    ours, stock = pair
    x, edge_index = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message=".*deprecated")
        traced = torch.jit.trace(ours, (x, edge_index))
    more = torch.cat([x, x.sin()]), torch.randint(2 * N, (2, 3 * E))
    torch.testing.assert_close(traced(*more), stock(*more), rtol=1e-9, atol=1e-12)


def test_script_takes_pairs_of_features():
    ours, x, edge_index = MaxKSAGEConv((F, F), H, k=K).double(), *inputs()
    scripted = torch.jit.script(ours)
    for sides in ((x, x[:4]), (x, None)):
        given = edge_index % 4, (N, 4)
        torch.testing.assert_close(scripted(sides, *given), ours(sides, *given))
    gin = MaxKGINConv(mlp(), k=K).double()
    given = (x, x[:4]), edge_index % 4, (N, 4)
    torch.testing.assert_close(torch.jit.script(gin)(*given), gin(*given))


def test_maxk_of_a_projection_is_scripted_and_differentiated():
    ours, x, edge_index = MaxKSAGEConv(F, H, project=True, k=K).double(), *inputs()
    expected = ours(x, edge_index)
    torch.testing.assert_close(torch.jit.script(ours)(x, edge_index), expected)
    of_x = x.clone().requires_grad_()
    ours(of_x, edge_index).square().sum().backward()
    actual = func.grad(lambda t: ours(t, edge_index).square().sum())(x)
    torch.testing.assert_close(actual, of_x.grad)


@pytest.mark.parametrize("make", [lambda: MaxK(K), lambda: MaxK(F + 2)], ids=["k", "all"])
def test_the_nonlinearity_itself(make):
    module = make()
    x, _ = inputs()
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    x[1] = 0.5  # ties go to the lowest columns
    expected = module(x)
    for compiled in (torch.jit.script(module), torch.jit.trace(module, (x.sin(),))):
        torch.testing.assert_close(compiled(x), expected, equal_nan=True)
    finite = x[1:]
    grads = func.vmap(func.grad(lambda row: module(row[None]).sum()))(finite)

    leaf = finite.clone().requires_grad_()
    module(leaf).sum().backward()
    assert torch.equal(grads, leaf.grad)


def test_heterogeneous_models_take_the_layers():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = MaxKSAGEConv(F, F, k=K), MaxKSAGEConv(F, H, k=K)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index), edge_index)

    x, edge_index = inputs()
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    model = to_hetero(Net().double(), (["a", "b"], kinds))
    out = model({"a": x, "b": -x}, dict.fromkeys(kinds, edge_index))
    assert {name: tuple(rows.shape) for name, rows in out.items()} == {"a": (N, H), "b": (N, H)}


def test_compressed_features_stay_with_the_kernels():
    conv, (x, edge_index) = MaxKSAGEConv(F, H, k=K).double(), inputs()
    compressed = maxk(x, K)
    expected = conv(x, edge_index)
    torch.testing.assert_close(conv(compressed, edge_index), expected)
    torch.testing.assert_close(conv((compressed, x), edge_index), expected)
