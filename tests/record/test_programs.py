"""Calls that are made again without a trace, of each kind of layer."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import PointTransformerConv, SAGEConv

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.patching import programs
from pyg_accel.patching.reasons import is_active
from tests.record.layers import ATTENTION, LAYERS

from tests.record.steps import (  # isort: skip
    EDGES, FEW, MORE_NODES, OTHER_EDGES, WIDTH, E, N, Step, X, autocast, call, features,
    first, frozen, gradient_of, graph, hooked, inference, of, replaced, setting, under
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("always")


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", LAYERS)
def test_new_graphs_features_and_modes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    changed = EDGES.clone()

    def change(layer: Any) -> Any:
        changed[:, :5] = changed[:, 5:10]
        return layer(X, changed, *more)

    def narrow(layer: Any) -> Any:
        # The gradients of torch's own index_select by int32 are wrong in three dimensions.
        return layer(X, EDGES.int() if is_active() else EDGES, *more)

    run, few, none = call(X, EDGES, *more), tuple(t[:7] for t in more), tuple(t[:0] for t in more)
    without_grad = under(of(torch.no_grad), run=run)
    gradients, half = gradient_of(0, X, EDGES, *more), autocast(torch.bfloat16, *more)
    # A graph of its own for each: one more node, another number of edges, int32, changed in place.
    ways = like_stock(
        make(), run, run, call(X, OTHER_EDGES, *more), call(MORE_NODES, EDGES, *more),
        call(X, FEW, *few), call(X, graph(0), *none), call(X, graph(0), *none), narrow, narrow,
        call(features(WIDTH, N, seed=3).t(), EDGES, *more), change, change, gradients, gradients,
        without_grad, inference(*more), inference(*more), half, half, run,
    )  # fmt: skip
    assert ways[-1] == "p" and ways.count("p") > 7


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_and_dtypes(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    run = call(X, EDGES, *more)

    def freeze(layer: Any) -> Any:
        p, *_ = layer.parameters()
        p.requires_grad_(not p.requires_grad)
        return run(layer)

    def replace(layer: Any) -> Any:
        for module in layer.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = nn.Parameter(p.detach() * 1.5)
        return run(layer)

    def double(layer: Any) -> Any:
        return layer.double()(X.double(), EDGES, *[t.double() for t in more])

    def functional(layer: Any) -> Any:
        values = {key: p.detach() * 2 for key, p in layer.named_parameters()}
        return torch.func.functional_call(layer, values, (X, EDGES, *more))

    ways = like_stock(make(), run, run, freeze, run, freeze, replace, functional, replace,
                      functional, double, double)  # fmt: skip
    assert ways[-1] == "p"


@pytest.mark.one_of(3, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_and_transforms(name: str, like_stock: Any) -> None:
    make, more = LAYERS[name]
    wide, more = X.double(), tuple(t.double() for t in more)

    def again(reentrant: bool) -> Step:
        def step(layer: Any) -> Any:
            x = wide.clone().requires_grad_()
            return checkpoint(layer, x, EDGES, *more, use_reentrant=reentrant)

        return step

    def twice(layer: Any) -> Any:
        x = wide.clone().requires_grad_()
        (grad,) = torch.autograd.grad(layer(x, EDGES, *more).pow(3).sum(), [x], create_graph=True)
        return grad, *torch.autograd.grad(grad.square().sum(), [x], retain_graph=True)

    def batched(layer: Any) -> Any:
        x = wide.clone().requires_grad_()
        out = layer(x, EDGES, *more)
        seeds = features(3, *out.shape).double()
        return torch.autograd.grad(out, [x], seeds, is_grads_batched=True)

    def transformed(layer: Any) -> Any:
        return torch.func.grad(lambda x: layer(x, EDGES, *more).square().sum())(wide)

    run = call(wide, EDGES, *more)
    steps = [run, run, again(False), again(False), again(True), twice, twice, batched, transformed]
    if name == "sage max":  # the mask of a maximum: PyG's own has no rule for batches
        steps.remove(batched)
    assert like_stock(make().double(), *steps, run)[-1] == "p"


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("name", "path"),
    [("gine edge_dim", "lin"), *((f"{name} edge_dim", "lin_edge") for name in ATTENTION)],
)
def test_a_linear_layer_that_a_message_calls(name: str, path: str, like_stock: Any) -> None:
    """What it is and has is changed between calls that have a plan."""
    make, (edge_attr,) = LAYERS[name]
    run, layer = call(X, EDGES, edge_attr), make()
    kind, shape = type(layer.get_submodule(path)), layer.get_submodule(path).weight.shape
    out = shape[0]

    def put(module: nn.Module, then: Step = run) -> Step:
        return under(replaced("", path, module), run=then)

    @contextmanager
    def parametrized(layer: Any) -> Iterator[None]:
        module = parametrize.register_parametrization(
            layer.get_submodule(path), "weight", nn.Tanh()
        )
        yield
        parametrize.remove_parametrizations(module, "weight", False)

    def own_forward(layer: Any) -> AbstractContextManager[None]:
        module = layer.get_submodule(path)
        return replaced(path, "forward", lambda x: F.linear(x, module.weight).abs())(layer)

    wider = call(features(N, WIDTH, seed=9), EDGES, features(E, 5, seed=8))
    gradients = gradient_of(2, X, EDGES, edge_attr)
    half = [autocast(dtype, edge_attr) for dtype in (torch.bfloat16, torch.float16)]
    ways = like_stock(
        layer, run, run, first(lambda s: s.get_submodule(path).weight.mul_(-0.5), run), run,
        lambda s: setting(f"{path}.weight", nn.Parameter(features(*shape)), run)(s), run,
        under(frozen(path), run=run, times=1), run,
        put(nn.Linear(3, out)), run, put(nn.Linear(5, out, bias=False), wider), run,
        put(Doubled(3, out)), put(nn.Sequential(Doubled(3, out))),
        under(hooked(path), run=run), run,
        under(own_forward, run=run), run,
        under(replaced(kind, "forward", lambda s, x: F.linear(x, s.weight) - 1), run=run), run,
        *half, *half, gradients, gradients, run, under(parametrized, run=run), run, run,
    )  # fmt: skip
    assert ways[-1] == "p" and ways.count("p") >= 10


def test_a_first_call_in_a_checkpoint(like_stock: Any) -> None:
    def step(layer: Any) -> Any:
        return checkpoint(layer, X.clone().requires_grad_(), EDGES, use_reentrant=False)

    for name in ("sage", "sage max", *ATTENTION):
        like_stock(LAYERS[name][0](), step, step, call(), step)


def sampled_call(layer: nn.Module, inputs: tuple[Any, ...], **how: Any) -> Tensor:
    torch.manual_seed(5)
    with torch.no_grad(), pyg_accel.sampled(**how) if how else contextlib.nullcontext():
        out: Tensor = layer(X, EDGES, *inputs)
    return out


@pytest.mark.one_of(3, 1)
@pytest.mark.parametrize("name", LAYERS)
def test_samples_of_edges(name: str, report_of: Any) -> None:
    """Calls with a plan compute what traced ones do, with each sample of its own."""
    make, inputs = LAYERS[name]
    layer = make().eval()
    ways: list[dict[str, Any]] = [
        {"width": 2}, {"width": 2, "rescale": "none"}, {"width": 3, "strategy": "bucket"},
        {"width": E}, {},
    ]  # fmt: skip
    with pyg_accel.patched():
        expected = []
        for how in ways:
            programs.forget()
            expected.append(sampled_call(layer, inputs, **how))
        told = {(row.formula, row.backend) for row in report_of()}
        pyg_accel.reset_report()
        programs.forget()
        for lap in range(2):
            with traces() as entered:
                for how, out in zip(ways, expected, strict=True):
                    actual = sampled_call(layer, inputs, **how)
                    torch.testing.assert_close(actual, out, rtol=0, atol=0)
            # A softmax and a sum over a sample are two formulas.
            assert not lap or not entered or name.startswith("transformer")
    assert {(row.formula, row.backend) for row in report_of()} == told
    sampled = any("over 2 edges" in formula for formula, _ in told)
    assert sampled or name not in ("sage", "gcn", "graph", "gat", "tag")
    # Attention that is not sampled runs as its two formulas, which round in another way.
    assert sampled == any(not torch.allclose(expected[-1], out, atol=1e-5) for out in expected[:-2])


def test_features_of_one_set_of_nodes_given_twice() -> None:
    """They are recorded apart from those of two sets: the graph of functions is another one."""
    layer, other, x = SAGEConv((WIDTH, WIDTH), 4), torch.randn(N + 9, WIDTH), torch.randn(N, WIDTH)
    calls = [((other, x), EDGES), ((x, x), EDGES)] * 2
    expected = [layer(*call) for call in calls]
    with pyg_accel.patched():
        for call, out in zip(calls, expected, strict=True):
            torch.testing.assert_close(layer(*call), out)
        with traces() as entered:
            for call in calls:
                layer(*call)
    assert not entered


class NotesScores(SAGEConv):
    """Stores scores of its edges in training, as SuperGATConv does."""

    def forward(self, x: Tensor, edge_index: Tensor, *args: Any) -> Tensor:
        out: Tensor = super().forward(x, edge_index, *args)
        if self.training and float(out.detach().sum()) < torch.inf:  # not recorded as a whole
            self.scores = (out[edge_index[0]] * out[edge_index[1]]).sum(-1)
        return out


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
def test_tensors_that_training_replaces_do_not_lead_to_new_records(
    grad: bool, like_stock: Any
) -> None:
    def training(layer: Any) -> Any:
        return layer.train()(X, EDGES)

    def evaluation(layer: Any) -> Any:
        with torch.set_grad_enabled(grad):
            return layer.eval()(X, EDGES)

    ways = like_stock(NotesScores(WIDTH, WIDTH), *(training, evaluation) * 6)
    assert set(ways[3::2]) == {"p"}


def test_a_softmax_of_wide_networks_is_recorded_for_all_sizes(like_stock: Any) -> None:
    def step(nodes: int) -> Step:
        x, pos = features(nodes, WIDTH), features(nodes, 3, seed=1)
        return call(x, pos, graph(4 * nodes, nodes))

    # The first call of a process may import what a record must not.
    ways = like_stock(PointTransformerConv(WIDTH, 64), *map(step, (10, 10, 20, 30, 40)))
    assert ways[-2:] == "pp"
