"""Which calls ``patch()`` reaches, which it leaves to PyG with a reason, and torch's machinery."""

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric import utils
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn.aggr import Aggregation

import pyg_accel
from tests.user_layers import Layer, says, written

pytestmark = pytest.mark.usefixtures("always")

N = 20  # nodes, as the fixtures x and edge_index have them


def test_a_class_first_built_under_patch_is_accelerated_and_works_after_it(x, edge_index, ran):
    with pyg_accel.patched():
        layer = written()()
        ours, accelerated = layer(x, edge_index), {type(layer).__name__: {"sum_j u0"}}
        assert ran() == accelerated
    torch.testing.assert_close(layer(x, edge_index), ours)
    assert ran() == {}
    with pyg_accel.patched():
        layer(x, edge_index)
        assert ran() == accelerated


def test_a_class_that_was_given_its_reference_propagate_is_rendered_again(x, edge_index, ran):
    cls = written(pyg.MessagePassing, propagate_type=dict(x=Any), forward=Layer.forward)
    expected = cls()(x, edge_index)
    with pyg_accel.patched():
        cls.propagate = cls._orig_propagate
        assert cls.propagate is pyg.MessagePassing.propagate
        torch.testing.assert_close(cls()(x, edge_index), expected)
        assert ran() == {cls.__name__: {"sum_j u0"}}
    torch.testing.assert_close(cls()(x, edge_index), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_subclasses_of_layers_are_accelerated(when, x, edge_index, ran):
    class MySage(pyg.SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j * 2

    class Plain(pyg.GCNConv):
        pass

    layers = [MySage(6, 4), Plain(6, 4)] if when == "before" else []
    expected = [layer(x, edge_index) for layer in layers]
    with pyg_accel.patched():
        layers = layers or [MySage(6, 4), Plain(6, 4)]
        outs = [layer(x, edge_index) for layer in layers]
        assert ran() == {"MySage": {"mean_j u0"}, "Plain": {"sum_j mul(e0,u1)"}}
    expected = expected or [layer(x, edge_index) for layer in layers]
    torch.testing.assert_close(outs, expected)


def loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), loaded,
], ids=["deepcopy", "pickle", "save"])  # fmt: skip
def test_copies_are_accelerated_and_unpatched_like_their_original(copied, x, edge_index, ran):
    model = pyg.GCN(6, 8, 2).eval()
    expected = model(x, edge_index)
    with pyg_accel.patched():
        model(x, edge_index)
        other = copied(model)
        ran()
        torch.testing.assert_close(other(x, edge_index), expected)
        assert ran() == {"GCNConv": {"sum_j mul(e0,u1)"}}
    torch.testing.assert_close(other(x, edge_index), expected)
    torch.testing.assert_close(copied(other)(x, edge_index), expected)
    assert ran() == {}


def test_a_propagate_written_by_the_user_is_left_alone(x, edge_index, as_stock):
    own = lambda self, edge_index, size=None, **kwargs: kwargs["x"] * 3  # noqa: E731
    cls = written(propagate=own)
    assert as_stock(cls(), x, edge_index) == as_stock(lambda *a: cls()(*a), x, edge_index) == {}
    with pyg_accel.patched():
        assert vars(cls)["propagate"] is own
        assert torch.equal(cls()(x, edge_index), 3 * x)
    assert vars(cls)["propagate"] is own


# -- arguments ------------------------------------------------------------------------------------


def test_arguments_that_cannot_be_compared_or_hashed_are_passed_on(x, edge_index, as_stock):
    odd = written(
        propagate_type=dict(x=Any, extra=Any),
        forward=lambda self, x, edge_index, extra: self.propagate(edge_index, x=x, extra=extra),
        message=lambda self, x_j, extra: x_j * extra["scale"][0],
    )
    as_stock(odd(), x, edge_index, {"scale": [2.0], "more": {1, 2}})


def test_positional_and_named_arguments_of_propagate_work_as_in_stock(x, edge_index, as_stock):
    positional = written(forward=lambda self, x, edges: self.propagate(edges, (N, N), x=x))()
    named = written(forward=lambda self, x, edges: self.propagate(edge_index=edges, x=x, size=None))

    def results(*args: Tensor) -> list[Tensor]:
        actual = []
        for layer in (positional, named()):
            try:
                actual.append(layer(*args))
            except TypeError:
                actual.append(torch.tensor(torch.nan))
        return actual

    as_stock(results, x, edge_index, equal_nan=True)


def test_tensors_without_data_take_the_path_of_pyg(ran):
    with pyg_accel.patched(), FakeTensorMode():
        layer, edge_index = pyg.SAGEConv(6, 4), torch.zeros(2, 50, dtype=torch.long)
        assert layer(torch.randn(N, 6), edge_index).shape == (N, 4)
    assert ran() == {"SAGEConv": {"[tensors without data]"}}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "std"])
def test_an_aggregation_without_a_size_has_that_of_stock(aggr, x, same_as_stock):
    x, edge_index = x.double().requires_grad_(), torch.randint(0, N - 5, (2, 90))
    own = written(aggregate=lambda self, inputs, index: self.aggr_module(inputs, index))
    same_as_stock(own(aggr), x, edge_index)


def test_readouts_are_pygs_and_so_are_quantiles_of_messages(x, edge_index, as_stock):
    groups, exactly = edge_index[1].sort().values[:N], {"rtol": 0, "atol": 0}
    assert as_stock(pyg.global_mean_pool, x, groups, **exactly) == {}
    actual = as_stock(pyg.SAGEConv(x.size(1), 3, aggr="median"), x, edge_index, **exactly)
    assert [text[:1] for text in actual["SAGEConv"]] == ["["]


# -- hooks and explanations -----------------------------------------------------------------------

HOOKS = {
    "propagate_forward_pre": lambda seen: lambda module, inputs: seen.append(len(inputs)),
    "propagate_forward": lambda seen: lambda module, inputs, out: seen.append(tuple(out.shape)),
    "message_forward_pre": lambda seen: lambda _, inputs: seen.append(inputs[-1]["x_j"].shape),
    "message_forward": lambda seen: lambda module, inputs, out: out * 2,
    "aggregate_forward_pre": lambda seen: lambda module, inputs: seen.append(len(inputs)),
    "aggregate_forward": lambda seen: lambda module, inputs, out: out + 1,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_run_as_in_stock_and_are_named_as_the_reason(hook, x, edge_index, as_stock):
    layer, seen = Layer(), []
    handle = getattr(layer, f"register_{hook}_hook")(HOOKS[hook](seen))
    actual = as_stock(layer, x, edge_index, rtol=0, atol=0)
    assert seen[: len(seen) // 2] * 2 == seen
    assert bool(seen) == ("pre" in hook or "propagate" in hook)
    assert actual == {"Layer": {f"[a {hook.replace('_', ' ')} hook]"}}
    handle.remove()
    assert as_stock(layer, x, edge_index) == {"Layer": {"sum_j u0"}}


def test_switching_explain_on_and_off_keeps_results_and_the_patch(x, edge_index, ran):
    layer = pyg.SAGEConv(6, 4)
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer.explain = layer._apply_sigmoid = True
        layer._edge_mask, layer._loop_mask = torch.zeros(90), torch.ones(90, dtype=torch.bool)
        assert not torch.allclose(layer(x, edge_index), expected)  # messages are halved
        assert all(text.startswith("[") for text in ran()["SAGEConv"])
        layer.explain = None
        torch.testing.assert_close(layer(x, edge_index), expected)
        assert ran() == {"SAGEConv": {"mean_j u0"}}
    torch.testing.assert_close(layer(x, edge_index), expected)
    assert ran() == {}


def test_an_explainer_gives_the_masks_of_stock(x, edge_index, as_stock):
    def masks() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        explainer = Explainer(
            model, GNNExplainer(epochs=4), explanation_type="model", node_mask_type="object",
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node",
                          "return_type": "raw"},
        )  # fmt: skip
        actual = explainer(x, edge_index)
        return actual.node_mask, actual.edge_mask

    model = pyg.GCN(6, 8, 2, 3).eval()
    as_stock(masks, rtol=1e-4, atol=1e-5)


def test_decomposed_layers_give_stock_results_with_a_reason(x, edge_index, as_stock):
    layer = pyg.GCNConv(6, 4, decomposed_layers=2)

    def built(*args: Tensor) -> Tensor:
        other = pyg.GCNConv(6, 4, decomposed_layers=2)
        other.load_state_dict(layer.state_dict())
        return other(*args)

    for run in (layer, built):
        assert as_stock(run, x, edge_index) == {"GCNConv": {"[decomposed_layers > 1]"}}
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer.decomposed_layers = 1
        torch.testing.assert_close(layer(x, edge_index), expected)


def thrice(module: Any, inputs: Any, out: Tensor) -> Tensor | None:
    return 3 * out if isinstance(module, Aggregation) else None


def replace_forward(module: torch.nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: 3 * forward(*args, **kwargs)


# What somebody may do to an aggregation, to see its calls or to change them.
WATCHES = {
    "forward": lambda aggr: aggr.register_forward_hook(thrice),
    "forward_pre": lambda aggr: aggr.register_forward_pre_hook(
        lambda module, args: (args[0] * 2, *args[1:])
    ),
    "backward": lambda aggr: aggr.register_full_backward_hook(
        lambda module, grads, _: tuple(grad if grad is None else 2 * grad for grad in grads)
    ),
    "backward_pre": lambda aggr: aggr.register_full_backward_pre_hook(
        lambda module, grads: tuple(2 * grad for grad in grads)
    ),
    "of all modules": lambda _: torch.nn.modules.module.register_module_forward_hook(thrice),
    "replaced forward": replace_forward,
}
IN_THE_MESSAGE = written(aggregate=lambda self, inputs, index, dim_size: self.other(
    inputs, index, dim_size=dim_size, dim=0))  # fmt: skip
WATCHED = {
    "simple": (lambda: pyg.SAGEConv(6, 4), lambda layer: layer.aggr_module),
    "several": (lambda: pyg.SAGEConv(6, 4, ["mean", "std"]), lambda layer: layer.aggr_module),
    "one of several": (
        lambda: pyg.SAGEConv(6, 4, ["mean", "std"]), lambda layer: layer.aggr_module.aggrs[0]),
    "another": (lambda: IN_THE_MESSAGE(other=pyg.SumAggregation()), lambda layer: layer.other),
}  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("kind", WATCHED)
def test_whoever_waits_for_calls_of_an_aggregation_gets_them(
    kind, watch, x, edge_index, ran, same_as_stock
):
    make, aggregation_of = WATCHED[kind]
    layer = make().double()
    handle = WATCHES[watch](aggregation_of(layer))
    try:
        same_as_stock(layer, x.double().requires_grad_(), edge_index)
    finally:
        if handle is not None:
            handle.remove()
    reason = "a hook on the aggregation, or a method of its own"
    if kind == "another" and "backward" in watch:
        reason = "a backward hook inside of the layer"
    assert ran() == {type(layer).__name__: {f"[{reason}]"}}
    if handle is not None:
        with pyg_accel.patched():
            layer(x.double(), edge_index)
        assert "[" not in "".join(ran()[type(layer).__name__])


@pytest.mark.parametrize("width", [6, 32])
@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_inside_of_a_layer_see_the_gradients_of_messages(
    kind, width, edge_index, ran, same_as_stock
):
    inner = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
    layer, seen = says(lambda self, x_j: self.inner(x_j), inner=inner)().double(), []

    def hook(module: Any, grads: Any, _: Any = None) -> tuple[Tensor]:
        seen.append(grads[0].shape)
        return (2 * grads[0],)

    getattr(inner[0], f"register_{kind}")(hook)
    same_as_stock(layer, torch.randn(N, width).double().requires_grad_(), edge_index)
    assert seen == [(90, width)] * 2
    assert ran() == {type(layer).__name__: {"[a backward hook inside of the layer]"}}


def test_forward_hooks_of_modules_still_run(x, edge_index):
    layer, seen = pyg.SAGEConv(6, 4), []
    for module in (layer, layer.lin_l):
        module.register_forward_hook(lambda module, inputs, out: seen.append(type(out)))
    with pyg_accel.patched():
        layer(x, edge_index)
    assert seen == [Tensor, Tensor]


# -- torch's own machinery ------------------------------------------------------------------------


class WithLoops(pyg.MessagePassing):
    """Calls a function that has overloads for TorchScript."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        # propagate_type: (x: Tensor)
        return self.propagate(edge_index, x=x)


MODELS = {"sage": lambda: pyg.SAGEConv(6, 4), "loops": WithLoops}


@pytest.mark.parametrize("name", MODELS)
def test_scripting_under_patch_neither_needs_nor_leaves_anything(name, x, edge_index):
    """Compiled overloads are kept under the function they are of, by torch, for ever."""
    layer = MODELS[name]()
    expected = layer(x, edge_index)
    for _ in range(2):
        with pyg_accel.patched():
            layer(x, edge_index)
            for one in (layer, copy.deepcopy(layer)):
                torch.testing.assert_close(torch.jit.script(one)(x, edge_index), expected)
        torch.testing.assert_close(torch.jit.script(layer)(x, edge_index), expected)


@pytest.mark.full
def test_overloads_first_scripted_under_patch_are_there_after_it():
    """In a process of its own: torch compiles the overloads of a function once."""
    code = """
import torch, pyg_accel
from torch_geometric.nn import GCNConv
with pyg_accel.patched():
    torch.jit.script(GCNConv(6, 4))
torch.jit.script(GCNConv(6, 4))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_can_be_traced_while_patched(name, x, edge_index):
    layer = MODELS[name]()
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer(x, edge_index)  # what it remembers must not become a constant of the trace
        traced = torch.jit.trace(layer, (x, edge_index))
    torch.testing.assert_close(traced(x, edge_index), expected)
    for given in ((2 * x, edge_index), (x, edge_index.flip(0))):
        torch.testing.assert_close(traced(*given), layer(*given))


def test_functional_transforms_give_stock_results(x, edge_index, as_stock):
    layer, tangent = pyg.GINConv(torch.nn.Linear(6, 4)), torch.randn(N, 6)
    grad = torch.func.grad(lambda x: layer(x, edge_index).sin().sum())
    for run, given in ((grad, x), (torch.func.vmap(grad), torch.randn(3, N, 6))):
        assert as_stock(run, given) == {"GINConv": {"[inside a torch.func transform]"}}
    run = lambda x: layer(x, edge_index)  # noqa: E731
    as_stock(lambda: torch.func.jvp(run, (x,), (tangent,)))

    def dual() -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            out = run(torch.autograd.forward_ad.make_dual(x, tangent))
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    as_stock(dual)


LAYERS = {
    "mean": lambda: pyg.SAGEConv(6, 4), "max": lambda: pyg.SAGEConv(6, 4, "max"),
    "weighted": lambda: pyg.GCNConv(6, 4), "attention": lambda: pyg.GATConv(6, 4, heads=2),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_many_outputs_at_once_equal_stock(name, x, edge_index, as_stock):
    layer, x = LAYERS[name]().double(), x.double().requires_grad_()

    def batched() -> list[Tensor]:
        out = layer(x, edge_index).square().sum(0)
        seeds = torch.eye(len(out), dtype=out.dtype)
        (together,) = torch.autograd.grad(
            out, x, seeds, is_grads_batched=True, retain_graph=True, create_graph=True
        )
        (twice,) = torch.autograd.grad(together.square().sum(), x, retain_graph=True)
        mapped = torch.func.vmap(
            lambda seed: torch.autograd.grad(out, x, seed, retain_graph=True)[0]
        )(seeds)
        whole = torch.autograd.functional.jacobian(
            lambda given: layer(given, edge_index).sum(0), x, vectorize=True
        )
        return [together.detach(), twice, mapped, whole]

    assert "[" not in "".join(as_stock(batched)[type(layer).__name__])


def test_deterministic_algorithms_are_honoured(x, edge_index):
    model = pyg.GraphSAGE(6, 8, 2)
    torch.use_deterministic_algorithms(True)
    try:
        with pyg_accel.patched():
            first, second = (
                torch.autograd.grad(model(x, edge_index).sum(), model.parameters())
                for _ in range(2)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
