"""What ``patch()`` changes, what it leaves alone, and that all of it is undone."""

import copy
import functools
import io
import multiprocessing
import operator
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_geometric import utils
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    GCN,
    GATConv,
    GCNConv,
    GINConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,
    global_mean_pool,
)
from torch_geometric.nn.aggr import Aggregation, SumAggregation
from torch_geometric.nn.conv import gcn_conv

import pyg_accel
from pyg_accel.patching import overrides, programs, reasons

pytestmark = pytest.mark.usefixtures("always")

N = 20  # nodes, as the fixtures x and edge_index have them


@pytest.fixture
def ran(report_of) -> Any:
    """What ran, by layer, since it was asked last: formulas, or reasons in brackets."""

    def rows() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in report_of():
            found.setdefault(row.layer, set()).add(row.formula or f"[{row.reason}]")
        pyg_accel.reset_report()
        return found

    return rows


class UserSum(MessagePassing):
    """A layer outside of PyG."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class OwnPropagate(MessagePassing):
    """A layer that overrides propagate itself."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return kwargs["x"] * 3


def classes() -> Iterator[type]:
    pending = [MessagePassing, Aggregation]
    while pending:
        cls = pending.pop()
        yield cls
        pending += cls.__subclasses__()


def state(value: Any) -> Any:
    """What makes a function what it is: the object itself, and what a patch may change of it."""
    if not isinstance(value, FunctionType):
        return id(value)
    return id(value), value.__code__, dict(value.__kwdefaults__ or {}), dict(vars(value))


def snapshot() -> dict[Any, dict[str, Any]]:
    held = {cls: {k: state(v) for k, v in vars(cls).items()} for cls in classes()}
    modules = {
        name: {k: state(v) for k, v in vars(module).items() if callable(v)}
        for name, module in list(sys.modules.items())
        if name.startswith("torch_geometric") and hasattr(module, "__dict__")
    }
    overloads = {"find": state(torch.jit._script._get_overloads)}
    return {**held, **modules, "overloads": overloads}


# -- nothing is left behind -----------------------------------------------------------------------


def test_unpatch_restores_every_class_and_module_attribute(x, edge_index):
    layers = [GCNConv(6, 4), GATConv(6, 4), SAGEConv(6, 4, aggr=["mean", "std"]), UserSum()]
    before = snapshot()
    pyg_accel.patch()
    during = snapshot()
    assert during[SAGEConv]["propagate"] != before[SAGEConv]["propagate"]
    module = "torch_geometric.nn.conv.gcn_conv"
    assert during[module]["gcn_norm"] != before[module]["gcn_norm"]
    for layer in layers:
        layer(x, edge_index)
    pyg_accel.unpatch()
    after = snapshot()
    for owner, attributes in before.items():
        assert after[owner].keys() == attributes.keys(), owner
        changed = [name for name, value in attributes.items() if after[owner][name] != value]
        assert changed == [], owner


def test_a_class_rendered_under_patch_is_as_stock_would_have_made_it(x, edge_index):
    class Parent(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    Parent()

    def child() -> type:
        class Child(Parent):
            def message(self, x_j: Tensor) -> Tensor:
                return 2 * x_j

        return Child

    stock, ours = child(), child()
    stock()
    with pyg_accel.patched():
        made = ours()
        made(x, edge_index)
    pyg_accel.unpatch()  # programs stay until then
    assert vars(ours).keys() == vars(stock).keys()
    assert vars(ours)["_orig_propagate"] is vars(stock)["_orig_propagate"]
    assert not any(hasattr(value, "__original_fn") for value in vars(ours).values())
    torch.testing.assert_close(made(x, edge_index), stock()(x, edge_index))


def test_handles_may_be_removed_in_any_order_and_twice(x, edge_index, ran):
    before = snapshot()
    handles = [pyg_accel.patch() for _ in range(3)]
    for handle in (handles[1], handles[1], handles[0], handles[1]):
        handle.remove()
        assert overrides.installed()
    handles[2].remove()
    handles[2].remove()
    assert snapshot() == before


def test_an_optimized_model_leaves_programs_of_others(always, x, edge_index):
    """Overrides that are in force stay as they are: guards compare the code of functions."""
    layer, models = SAGEConv(x.size(1), 4).eval(), []
    with pyg_accel.patched(), torch.no_grad():
        models += [pyg_accel.optimize(GCN(x.size(1), 4, 2).eval(), x, edge_index)]
        layer(x, edge_index)
        (program,) = programs.find(layer, "call").programs
        code = SAGEConv.propagate.__code__
        models += [pyg_accel.optimize(GCN(x.size(1), 4, 2).eval(), x, edge_index)]
        models[1](x, edge_index)
        assert SAGEConv.propagate.__code__ is code
        assert program.guard.holds()
        layer(x, edge_index)
        assert programs.find(layer, "call").programs == [program]


def test_unpatch_without_patch_does_nothing():
    before = snapshot()
    pyg_accel.unpatch()
    pyg_accel.unpatch()
    assert snapshot() == before


def test_a_handle_removed_after_unpatch_does_not_disturb_a_later_patch(x, edge_index, ran):
    old = pyg_accel.patch()
    pyg_accel.unpatch()
    with pyg_accel.patched():
        old.remove()
        SAGEConv(6, 4)(x, edge_index)
        assert ran() == {"SAGEConv": {"mean_j u0"}}


def test_nested_blocks_end_with_the_outer_one(x, edge_index, ran):
    layer = SAGEConv(6, 4)
    with pyg_accel.patched():
        with pyg_accel.patched():
            pass
        layer(x, edge_index)
        assert ran() == {"SAGEConv": {"mean_j u0"}}
    assert not overrides.installed()


def test_an_exception_inside_the_block_unpatches():
    with pytest.raises(KeyError, match="inside"), pyg_accel.patched():
        raise KeyError("inside")
    assert not overrides.installed()
    with pytest.raises(KeyError, match="inside"), pyg_accel.patch():
        raise KeyError("inside")
    assert not overrides.installed()


def test_an_exception_inside_a_layer_leaves_later_calls_alone(x, edge_index, same_as_stock):
    class Fails(UserSum):
        def message(self, x_j: Tensor) -> Tensor:
            raise ZeroDivisionError("in message")

    failing = Fails()
    with pyg_accel.patched(), pytest.raises(ZeroDivisionError, match="in message"):
        failing(x, edge_index)
    same_as_stock(SAGEConv(6, 4), x, edge_index)


FUNCTIONS = [
    gcn_conv.gcn_norm, utils.add_self_loops, utils.scatter, utils.segment, utils.softmax,
    utils.spmm, SAGEConv.forward, Aggregation.__call__,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_functions_are_pickled_and_copied_as_those_of_pyg(function):
    before = pickle.dumps(function)
    with pyg_accel.patched():
        found = sys.modules[function.__module__]
        for name in function.__qualname__.split("."):
            found = getattr(found, name)
        assert found is function  # imported before or while it is patched
        assert pickle.dumps(function) == before
        assert copy.deepcopy(function) is copy.copy(function) is function
        inside = pickle.dumps(functools.partial(function, 1))
        torch.save(torch.nn.Module().__dict__ | {"norm": function}, io.BytesIO())
    assert pickle.loads(inside).func is function
    assert pickle.dumps(function) == before


def test_frames_of_functions_can_be_looked_at(x):
    seen: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)
            assert isinstance(frame.f_locals, dict)  # as debuggers and tracebacks do

    aggregation = SumAggregation()
    for name in ("before", "during", "after"):
        with pyg_accel.patched() if name == "during" else nullcontext():
            sys.setprofile(trace)
            try:
                aggregation(x, torch.zeros(N, dtype=torch.long))
                utils.scatter(x, torch.zeros(N, dtype=torch.long))
            finally:
                sys.setprofile(None)
    assert seen.count("scatter") > 3


def test_spawned_workers_get_the_functions_of_pyg(edge_index):
    right = utils.add_self_loops(edge_index)[0]
    with pyg_accel.patched(), multiprocessing.get_context("spawn").Pool(1) as pool:
        ((found, _),) = pool.map(utils.add_self_loops, [edge_index])
        softmax = pool.apply(operator.attrgetter("__qualname__"), [utils.softmax])
    torch.testing.assert_close(found, right)
    assert softmax == "softmax"


mine = lambda *_, **__: "mine"  # noqa: E731 - what someone else puts in the place of a function


OWNERS = [
    (utils, "softmax"), (gcn_conv, "gcn_norm"), (SAGEConv, "propagate"),
    (GATConv, "edge_updater"), (SAGEConv, "_jinja_propagate"), (Aggregation, "__call__"),
    (MessagePassing, "_collect"),
    (MessagePassing, "_set_jittable_templates"), (MessagePassing, "_call_impl"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda o: getattr(o, "__name__", o))
def test_what_others_put_in_place_meanwhile_is_theirs(owner, name):
    SAGEConv(2, 2), GATConv(2, 2)
    before, code = snapshot(), mine.__code__
    with pytest.MonkeyPatch.context() as patch:
        with pyg_accel.patched():
            patch.setattr(owner, name, mine)
        assert getattr(owner, name) is mine
        with pyg_accel.patched():
            assert getattr(owner, name) is mine
            assert mine.__code__ is code
        assert getattr(owner, name) is mine
    if name == "_call_impl":  # was not there before
        del MessagePassing._call_impl
    assert snapshot() == before


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda o: getattr(o, "__name__", o))
def test_a_mock_that_ends_after_the_patch_leaves_stock(owner, name, x, edge_index, ran):
    layer, _ = SAGEConv(6, 4), GATConv(6, 4)
    expected = layer(x, edge_index)
    before = snapshot()
    handle, mocked = pyg_accel.patch(), mock.patch.object(owner, name, mine)
    mocked.start()
    handle.remove()
    mocked.stop()
    assert torch.equal(layer(x, edge_index), expected)
    assert ran() == {}
    if name == "_call_impl":  # what the mock found calls the next base's
        del MessagePassing._call_impl
    assert snapshot() == before


def test_code_that_others_give_a_function_is_theirs():
    def other(x: Tensor, index: Any = None) -> str:
        return "other"

    stock = utils.softmax.__code__
    with pyg_accel.patched():
        utils.softmax.__code__ = other.__code__
    try:
        assert utils.softmax(torch.ones(2)) == "other"
    finally:
        utils.softmax.__code__ = stock
        utils.softmax.__kwdefaults__ = None
        for name in ("__wrapped__", "__original_fn", "__script_if_tracing_wrapper"):
            vars(utils.softmax).pop(name, None)


class WithoutDict:
    __slots__ = ()


@pytest.mark.parametrize("name", ["torch_sparse", "torch_geometric.nn.other"])
@pytest.mark.parametrize(
    "value",
    [None, WithoutDict(), SimpleNamespace(softmax=1, set_diag=None)],
    ids=["none", "no dictionary", "namespace"],
)
def test_anything_may_be_in_sys_modules(name, value, x, edge_index, ran):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, value)
        with pyg_accel.patched():
            SAGEConv(6, 4)(x, edge_index)
            assert ran() == {"SAGEConv": {"mean_j u0"}}


class Counted(torch.nn.Module):
    """Counts calls where torch makes them."""

    calls = 0

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._call_impl(*args, **kwargs)


class Last(UserSum, Counted):
    """Its next ``_call_impl`` is that of another base."""


class First(Counted, UserSum):
    """The other base comes before MessagePassing."""


@pytest.mark.parametrize("cls", [Last, First])
@pytest.mark.parametrize("always", [True, False])
def test_another_base_with_a_call_of_its_own_is_called(cls, always, x, edge_index):
    pyg_accel.settings.always = always
    layer = cls()
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        for _ in range(3):
            torch.testing.assert_close(layer(x, edge_index), expected)
    assert layer.calls == 4


# -- which calls are reached ----------------------------------------------------------------------


def test_a_class_first_built_under_patch_is_accelerated_and_works_after_it(x, edge_index, ran):
    class Late(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    with pyg_accel.patched():
        layer = Late()
        ours = layer(x, edge_index)
        assert ran() == {"Late": {"sum_j u0"}}
    torch.testing.assert_close(layer(x, edge_index), ours)
    assert ran() == {}
    with pyg_accel.patched():
        layer(x, edge_index)
        assert ran() == {"Late": {"sum_j u0"}}


@pytest.mark.parametrize("when", ["before", "after"])
def test_subclasses_of_layers_are_accelerated(when, x, edge_index, ran):
    class MySage(SAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j * 2

    class Plain(GCNConv):
        pass

    layers = [MySage(6, 4), Plain(6, 4)] if when == "before" else []
    expected = [layer(x, edge_index) for layer in layers]
    with pyg_accel.patched():
        layers = layers or [MySage(6, 4), Plain(6, 4)]
        outs = [layer(x, edge_index) for layer in layers]
        assert ran() == {"MySage": {"mean_j u0"}, "Plain": {"sum_j mul(e0,u1)"}}
    expected = expected or [layer(x, edge_index) for layer in layers]
    torch.testing.assert_close(outs, expected)


def test_a_deep_copy_is_accelerated_and_unpatched_like_its_original(x, edge_index, ran):
    layer = GCNConv(6, 4)
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer(x, edge_index)
        copied = copy.deepcopy(layer)
        ran()
        torch.testing.assert_close(copied(x, edge_index), expected)
        assert ran() == {"GCNConv": {"sum_j mul(e0,u1)"}}
    torch.testing.assert_close(copied(x, edge_index), expected)
    assert ran() == {}


def test_models_survive_pickle_and_torch_save_across_patch(x, edge_index):
    model = GraphSAGE(6, 8, 2).eval()
    expected = model(x, edge_index)
    with pyg_accel.patched():
        model(x, edge_index)
        inside = pickle.dumps(model)
        torch.testing.assert_close(pickle.loads(inside)(x, edge_index), expected)
        file = io.BytesIO()
        torch.save(model, file)
    torch.testing.assert_close(pickle.loads(inside)(x, edge_index), expected)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x, edge_index), expected)


def test_a_propagate_written_by_the_user_is_left_alone(x, edge_index, ran):
    layer = OwnPropagate()
    own = vars(OwnPropagate)["propagate"]
    with pyg_accel.patched():
        assert vars(OwnPropagate)["propagate"] is own
        assert torch.equal(layer(x, edge_index), 3 * x)
        assert torch.equal(OwnPropagate()(x, edge_index), 3 * x)
    assert vars(OwnPropagate)["propagate"] is own
    assert ran() == {}


def test_patching_one_model_leaves_others_alone(x, edge_index, ran):
    ours, other = GraphSAGE(6, 8, 2), GCN(6, 8, 2)
    twin = GraphSAGE(6, 8, 2)
    expected = ours(x, edge_index)
    handle = pyg_accel.patch(ours)
    for model in (other, twin):
        model(x, edge_index)
    assert ran() == {}
    torch.testing.assert_close(ours(x, edge_index), expected)
    assert ran() == {"SAGEConv": {"mean_j u0"}}
    handle.remove()
    ours(x, edge_index)
    assert ran() == {}
    assert not any(module in reasons.marked for module in ours.modules())


def test_patching_one_layer_and_everything_at_once_nest_in_any_order(x, edge_index, ran):
    layer, other = SAGEConv(6, 4), SAGEConv(6, 4)
    one, everything = pyg_accel.patch(layer), pyg_accel.patch()
    one.remove()
    layer(x, edge_index)
    assert ran() == {"SAGEConv": {"mean_j u0"}}
    one = pyg_accel.patch(layer)
    everything.remove()
    other(x, edge_index)
    assert ran() == {}
    layer(x, edge_index)
    assert ran() == {"SAGEConv": {"mean_j u0"}}
    one.remove()


def test_a_deep_copy_of_a_patched_model_does_not_outlive_the_patch(x, edge_index, ran):
    layer = SAGEConv(6, 4)
    with pyg_accel.patched(layer):
        copied = copy.deepcopy(layer)
    copied(x, edge_index)
    assert ran() == {}


def test_patch_names_what_it_cannot_patch():
    with pytest.raises(ValueError, match=r"'model' to be a torch\.nn\.Module \(got 3\)"):
        pyg_accel.patch(3)
    with pytest.raises(ValueError, match="Linear has no message passing layer"):
        pyg_accel.patch(torch.nn.Linear(2, 2))
    assert not overrides.installed()


# -- what declines --------------------------------------------------------------------------------

HOOKS = {
    "propagate_forward_pre": lambda layer, seen: layer.register_propagate_forward_pre_hook(
        lambda module, inputs: seen.append(len(inputs))
    ),
    "propagate_forward": lambda layer, seen: layer.register_propagate_forward_hook(
        lambda module, inputs, out: seen.append(tuple(out.shape))
    ),
    "message_forward_pre": lambda layer, seen: layer.register_message_forward_pre_hook(
        lambda module, inputs: seen.append(tuple(inputs[-1]["x_j"].shape))
    ),
    "message_forward": lambda layer, seen: layer.register_message_forward_hook(
        lambda module, inputs, out: out * 2
    ),
    "aggregate_forward_pre": lambda layer, seen: layer.register_aggregate_forward_pre_hook(
        lambda module, inputs: seen.append(len(inputs))
    ),
    "aggregate_forward": lambda layer, seen: layer.register_aggregate_forward_hook(
        lambda module, inputs, out: out + 1
    ),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_run_as_in_stock_and_are_named_as_the_reason(hook, x, edge_index, ran):
    layer, seen = UserSum(), []
    handle = HOOKS[hook](layer, seen)
    expected, noted = layer(x, edge_index), list(seen)
    with pyg_accel.patched():
        assert torch.equal(layer(x, edge_index), expected)
        assert seen == noted * 2
        assert ran() == {"UserSum": {f"[a {hook.replace('_', ' ')} hook]"}}
        handle.remove()
        layer(x, edge_index)
        assert ran() == {"UserSum": {"sum_j u0"}}


def test_switching_explain_on_and_off_keeps_results_and_the_patch(x, edge_index, ran):
    layer = SAGEConv(6, 4)
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer.explain = True
        layer._edge_mask = torch.zeros(90)
        layer._loop_mask = torch.ones(90, dtype=torch.bool)
        layer._apply_sigmoid = True
        assert not torch.allclose(layer(x, edge_index), expected)  # messages are halved
        assert all(text.startswith("[") for text in ran()["SAGEConv"])
        layer.explain = None
        torch.testing.assert_close(layer(x, edge_index), expected)
        assert ran() == {"SAGEConv": {"mean_j u0"}}
    torch.testing.assert_close(layer(x, edge_index), expected)
    assert ran() == {}


def test_an_explainer_gives_the_masks_of_stock(x, edge_index):
    model = GCN(6, 8, 2, 3).eval()

    def masks() -> dict[str, Tensor]:
        torch.manual_seed(3)
        explainer = Explainer(
            model, GNNExplainer(epochs=4), explanation_type="model", node_mask_type="object",
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node",
                          "return_type": "raw"},
        )  # fmt: skip
        found = explainer(x, edge_index)
        return {"nodes": found.node_mask, "edges": found.edge_mask}

    stock = masks()
    with pyg_accel.patched():
        ours = masks()
    for name, mask in stock.items():
        torch.testing.assert_close(ours[name], mask, rtol=1e-4, atol=1e-5)


def test_decomposed_layers_give_stock_results_with_a_reason(x, edge_index, ran):
    layer = GCNConv(6, 4, decomposed_layers=2)
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edge_index), expected)
        assert ran() == {"GCNConv": {"[decomposed_layers > 1]"}}
        built = GCNConv(6, 4, decomposed_layers=2)
        built.load_state_dict(layer.state_dict())
        torch.testing.assert_close(built(x, edge_index), expected)
        assert ran() == {"GCNConv": {"[decomposed_layers > 1]"}}
        layer.decomposed_layers = 1
        torch.testing.assert_close(layer(x, edge_index), expected)


def thrice(module: Any, inputs: Any, out: Tensor) -> Tensor | None:
    return 3 * out if isinstance(module, Aggregation) else None


def replace_forward(module: torch.nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: 3 * forward(*args, **kwargs)


# What somebody may do to an aggregation, to see its calls or to change them.
WATCHES: dict[str, Callable[[Aggregation], Any]] = {
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


class InTheMessage(MessagePassing):
    """Aggregates by a module that is not its own aggregation."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.other = SumAggregation()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return self.other(inputs, index, dim_size=dim_size, dim=0)


WATCHED: dict[str, tuple[Callable[[], MessagePassing], Callable[[Any], Aggregation]]] = {
    "simple": (lambda: SAGEConv(6, 4), lambda layer: layer.aggr_module),
    "several": (lambda: SAGEConv(6, 4, ["mean", "std"]), lambda layer: layer.aggr_module),
    "one of several": (
        lambda: SAGEConv(6, 4, ["mean", "std"]),
        lambda layer: layer.aggr_module.aggrs[0],
    ),
    "another": (InTheMessage, lambda layer: layer.other),
}


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


class WithoutSize(MessagePassing):
    """Leaves the number of targets to the aggregation."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return self.aggr_module(inputs, index)


def test_readouts_are_pygs_and_so_are_quantiles_of_messages(x, edge_index, ran):
    groups, layer = edge_index[1].sort().values[:N], SAGEConv(x.size(1), 3, aggr="median")
    expected = global_mean_pool(x, groups), layer(x, edge_index)
    with pyg_accel.patched():
        assert torch.equal(global_mean_pool(x, groups), expected[0])
        assert ran() == {}
        assert torch.equal(layer(x, edge_index), expected[1])
    assert [text[:1] for text in ran()["SAGEConv"]] == ["["]


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "std"])
def test_an_aggregation_without_a_size_has_that_of_stock(aggr, x, same_as_stock):
    x, edge_index = x.double().requires_grad_(), torch.randint(0, N - 5, (2, 90))
    same_as_stock(WithoutSize(aggr), x, edge_index)


def test_tensors_without_data_take_the_path_of_pyg(ran):
    with pyg_accel.patched(), FakeTensorMode():
        layer, edge_index = SAGEConv(6, 4), torch.zeros(2, 50, dtype=torch.long)
        assert layer(torch.randn(N, 6), edge_index).shape == (N, 4)
    assert ran() == {"SAGEConv": {"[tensors without data]"}}


class Linear(MessagePassing):
    """A module inside of the message."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="sum")
        self.inner = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.inner(x_j)


@pytest.mark.parametrize("width", [6, 32])
@pytest.mark.parametrize("kind", ["full", "full_pre"])
def test_backward_hooks_inside_of_a_layer_see_the_gradients_of_messages(
    kind, width, edge_index, ran, same_as_stock
):
    layer, seen = Linear(width).double(), []
    if kind == "full":
        layer.inner[0].register_full_backward_hook(
            lambda module, grads, _: (seen.append(grads[0].shape), (2 * grads[0],))[1]
        )
    else:
        layer.inner[0].register_full_backward_pre_hook(
            lambda module, grads: (seen.append(grads[0].shape), (2 * grads[0],))[1]
        )
    x = torch.randn(N, width, dtype=torch.float64, requires_grad=True)
    same_as_stock(layer, x, edge_index)
    assert seen == [(90, width)] * 2
    assert ran() == {"Linear": {"[a backward hook inside of the layer]"}}


def test_forward_hooks_of_modules_still_run(x, edge_index):
    layer, seen = SAGEConv(6, 4), []
    layer.register_forward_hook(lambda module, inputs, out: seen.append(type(out)))
    layer.lin_l.register_forward_hook(lambda module, inputs, out: seen.append(type(inputs[0])))
    with pyg_accel.patched():
        layer(x, edge_index)
    assert seen == [Tensor, Tensor]


# -- torch's own machinery ------------------------------------------------------------------------


def test_a_model_can_be_scripted_while_patched(x, edge_index):
    layer = SAGEConv(6, 4)
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        scripted = torch.jit.script(layer)
        torch.testing.assert_close(scripted(x, edge_index), expected)


class WithLoops(UserSum):
    """Calls a function that has overloads for TorchScript."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        # propagate_type: (x: Tensor)
        return self.propagate(edge_index, x=x)


def test_scripting_under_patch_neither_needs_nor_leaves_anything(x, edge_index):
    """Compiled overloads are kept under the function they are of, by torch, for ever."""
    layer = WithLoops()
    expected = layer(x, edge_index)
    for _ in range(2):
        torch.testing.assert_close(torch.jit.script(layer)(x, edge_index), expected)
        with pyg_accel.patched():
            layer(x, edge_index)
            torch.testing.assert_close(torch.jit.script(layer)(x, edge_index), expected)
            copied = copy.deepcopy(layer)
            torch.testing.assert_close(torch.jit.script(copied)(x, edge_index), expected)


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


def test_a_class_that_was_given_its_reference_propagate_is_rendered_again(x, edge_index, ran):
    class Sum(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    expected = Sum()(x, edge_index)
    with pyg_accel.patched():
        Sum.propagate = Sum._orig_propagate
        assert Sum.propagate is MessagePassing.propagate
        torch.testing.assert_close(Sum()(x, edge_index), expected)
        assert ran() == {"Sum": {"sum_j u0"}}
    torch.testing.assert_close(Sum()(x, edge_index), expected)


@pytest.mark.parametrize("make", [lambda: SAGEConv(6, 4), WithLoops], ids=["sage", "loops"])
def test_a_model_can_be_traced_while_patched(make, x, edge_index):
    layer = make()
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        layer(x, edge_index)  # what it remembers must not become a constant of the trace
        traced = torch.jit.trace(layer, (x, edge_index))
    torch.testing.assert_close(traced(x, edge_index), expected)
    for given in ((2 * x, edge_index), (x, edge_index.flip(0))):
        torch.testing.assert_close(traced(*given), layer(*given))


def test_functional_transforms_give_stock_results(x, edge_index, ran):
    layer = GINConv(torch.nn.Linear(6, 4))

    def of(features: Tensor) -> Tensor:
        return layer(features, edge_index).sin().sum()

    batch = torch.randn(3, N, 6)
    expected = torch.func.grad(of)(x), torch.func.vmap(torch.func.grad(of))(batch)
    with pyg_accel.patched():
        torch.testing.assert_close(torch.func.grad(of)(x), expected[0])
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(of))(batch), expected[1])
    assert ran() == {"GINConv": {"[inside a torch.func transform]"}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: SAGEConv(6, 4),
        lambda: SAGEConv(6, 4, "max"),
        lambda: GCNConv(6, 4),
        lambda: GATConv(6, 4, heads=2),
    ],
    ids=["mean", "max", "weighted", "attention"],
)
def test_gradients_of_many_outputs_at_once_equal_stock(make, x, edge_index, ran):
    layer = make().double()
    x = x.double().requires_grad_()

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

    expected = batched()
    with pyg_accel.patched():
        for one, other in zip(batched(), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert "[" not in "".join(ran()[type(layer).__name__])


def test_forward_mode_differentiation_gives_stock_results(x, edge_index):
    layer, tangent = GINConv(torch.nn.Linear(6, 4)), torch.randn(N, 6)

    def of(features: Tensor) -> Tensor:
        return layer(features, edge_index)

    expected = torch.func.jvp(of, (x,), (tangent,))
    with pyg_accel.patched():
        torch.testing.assert_close(torch.func.jvp(of, (x,), (tangent,)), expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            found = torch.autograd.forward_ad.unpack_dual(of(dual))
    torch.testing.assert_close(found.tangent, expected[1])


def test_deterministic_algorithms_are_honoured(x, edge_index):
    model = GraphSAGE(6, 8, 2)
    torch.use_deterministic_algorithms(True)
    try:
        with pyg_accel.patched():
            first = torch.autograd.grad(model(x, edge_index).sum(), model.parameters())
            second = torch.autograd.grad(model(x, edge_index).sum(), model.parameters())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_patching_in_one_thread_while_another_runs_gives_stock_results(x, edge_index):
    layer = SAGEConv(6, 4)
    expected = layer(x, edge_index).detach()
    outs, stop = [], threading.Event()

    def work() -> None:
        while not stop.is_set() and len(outs) < 2000:
            outs.append(layer(x, edge_index).detach())

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        with pyg_accel.patched():
            layer(x, edge_index)
    stop.set()
    thread.join()
    assert outs
    for out in outs:
        torch.testing.assert_close(out, expected)


def test_arguments_that_cannot_be_compared_or_hashed_are_passed_on(x, edge_index):
    class Odd(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, extra: Any) -> Tensor:
            return self.propagate(edge_index, x=x, extra=extra)

        def message(self, x_j: Tensor, extra: Any) -> Tensor:
            return x_j * extra["scale"][0]

    layer, extra = Odd(), {"scale": [2.0], "more": {1, 2}}
    expected = layer(x, edge_index, extra)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edge_index, extra), expected)


def test_positional_arguments_of_propagate_work_as_in_stock(x, edge_index):
    class Positional(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, (N, N), x=x)

    class Named(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index=edge_index, x=x, size=None)

    def results() -> list[Any]:
        found: list[Any] = []
        for layer in (Positional(), Named()):
            try:
                found.append(layer(x, edge_index))
            except TypeError as error:
                found.append(type(error))
        return found

    expected = results()
    with pyg_accel.patched():
        ours = results()
    for found, right in zip(ours, expected, strict=True):
        if isinstance(right, Tensor):
            torch.testing.assert_close(found, right)
        else:
            assert found is right
