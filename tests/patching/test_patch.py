"""What ``patch()`` changes, and that all of it is undone."""

import copy
import functools
import io
import multiprocessing
import operator
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import gcn_conv

import pyg_accel
from pyg_accel.patching import overrides, programs, reasons
from tests.user_layers import Layer

pytestmark = pytest.mark.usefixtures("always")

N = 20  # nodes, as the fixtures x and edge_index have them


def classes() -> Iterator[type]:
    pending = [pyg.MessagePassing, Aggregation]
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


def test_unpatch_restores_every_class_and_module_attribute(x, edge_index):
    layers = [pyg.GCNConv(6, 4), pyg.GATConv(6, 4), pyg.SAGEConv(6, 4, ["mean", "std"]), Layer()]
    before = snapshot()
    pyg_accel.patch()
    during = snapshot()
    assert during[pyg.SAGEConv]["propagate"] != before[pyg.SAGEConv]["propagate"]
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
    class Parent(pyg.MessagePassing):
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


# -- handles and blocks ---------------------------------------------------------------------------


def test_handles_may_be_removed_in_any_order_and_twice():
    before = snapshot()
    pyg_accel.unpatch()  # does nothing
    assert snapshot() == before
    handles = [pyg_accel.patch() for _ in range(3)]
    for handle in (handles[1], handles[1], handles[0], handles[1]):
        handle.remove()
        assert overrides.installed()
    handles[2].remove()
    handles[2].remove()
    assert snapshot() == before


def test_an_optimized_model_leaves_programs_of_others(x, edge_index):
    """Overrides that are in force stay as they are: guards compare the code of functions."""
    layer, models = pyg.SAGEConv(x.size(1), 4).eval(), []
    with pyg_accel.patched(), torch.no_grad():
        models += [pyg_accel.optimize(pyg.GCN(x.size(1), 4, 2).eval(), x, edge_index)]
        layer(x, edge_index)
        (program,) = programs.find(layer, "call").programs
        code = pyg.SAGEConv.propagate.__code__
        models += [pyg_accel.optimize(pyg.GCN(x.size(1), 4, 2).eval(), x, edge_index)]
        models[1](x, edge_index)
        assert pyg.SAGEConv.propagate.__code__ is code
        assert program.guard.holds()
        layer(x, edge_index)
        assert programs.find(layer, "call").programs == [program]


def test_a_handle_removed_after_unpatch_does_not_disturb_a_later_patch(x, edge_index, ran):
    old = pyg_accel.patch()
    pyg_accel.unpatch()
    with pyg_accel.patched():
        old.remove()
        with pyg_accel.patched():
            pass  # nested blocks end with the outer one
        pyg.SAGEConv(6, 4)(x, edge_index)
        assert ran() == {"SAGEConv": {"mean_j u0"}}
    assert not overrides.installed()


@pytest.mark.parametrize("block", [pyg_accel.patched, pyg_accel.patch])
def test_an_exception_inside_the_block_unpatches(block):
    with pytest.raises(KeyError, match="inside"), block():
        raise KeyError("inside")
    assert not overrides.installed()


def test_an_exception_inside_a_layer_leaves_later_calls_alone(x, edge_index, same_as_stock):
    class Fails(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            raise ZeroDivisionError("in message")

    with pyg_accel.patched(), pytest.raises(ZeroDivisionError, match="in message"):
        Fails()(x, edge_index)
    same_as_stock(pyg.SAGEConv(6, 4), x, edge_index)


def test_patching_one_model_leaves_others_alone(x, edge_index, ran):
    ours, twin, other = pyg.GraphSAGE(6, 8, 2), pyg.GraphSAGE(6, 8, 2), pyg.GCN(6, 8, 2)
    expected = ours(x, edge_index)
    handle = pyg_accel.patch(ours)
    copied = copy.deepcopy(ours)
    for model in (other, twin):
        model(x, edge_index)
    assert ran() == {}
    torch.testing.assert_close(ours(x, edge_index), expected)
    assert ran() == {"SAGEConv": {"mean_j u0"}}
    handle.remove()
    ours(x, edge_index), copied(x, edge_index)
    assert ran() == {}
    assert not any(module in reasons.marked for module in ours.modules())


def test_patching_one_layer_and_everything_at_once_nest_in_any_order(x, edge_index, ran):
    layer, other = pyg.SAGEConv(6, 4), pyg.SAGEConv(6, 4)
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


def test_patch_names_what_it_cannot_patch():
    with pytest.raises(ValueError, match=r"'model' to be a torch\.nn\.Module \(got 3\)"):
        pyg_accel.patch(3)
    with pytest.raises(ValueError, match="Linear has no message passing layer"):
        pyg_accel.patch(torch.nn.Linear(2, 2))
    assert not overrides.installed()


def test_patching_in_one_thread_while_another_runs_gives_stock_results(x, edge_index):
    layer = pyg.SAGEConv(6, 4)
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


# -- functions and what others do to them ---------------------------------------------------------

FUNCTIONS = [
    gcn_conv.gcn_norm, utils.add_self_loops, utils.scatter, utils.segment, utils.softmax,
    utils.spmm, pyg.SAGEConv.forward, Aggregation.__call__,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_functions_are_pickled_and_copied_as_those_of_pyg(function):
    before = pickle.dumps(function)
    with pyg_accel.patched():
        actual = sys.modules[function.__module__]
        for name in function.__qualname__.split("."):
            actual = getattr(actual, name)
        assert actual is function  # imported before or while it is patched
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

    aggregation = pyg.SumAggregation()
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
        ((actual, _),) = pool.map(utils.add_self_loops, [edge_index])
        softmax = pool.apply(operator.attrgetter("__qualname__"), [utils.softmax])
    torch.testing.assert_close(actual, right)
    assert softmax == "softmax"


mine = lambda *_, **__: "mine"  # noqa: E731 - what someone else puts in the place of a function


OWNERS = [
    (utils, "softmax"), (gcn_conv, "gcn_norm"), (pyg.SAGEConv, "propagate"),
    (pyg.GATConv, "edge_updater"), (pyg.SAGEConv, "_jinja_propagate"), (Aggregation, "__call__"),
    (pyg.MessagePassing, "_collect"), (pyg.MessagePassing, "_set_jittable_templates"),
    (pyg.MessagePassing, "_call_impl"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda o: getattr(o, "__name__", o))
def test_what_others_put_in_place_meanwhile_is_theirs(owner, name):
    pyg.SAGEConv(2, 2), pyg.GATConv(2, 2)
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
        del pyg.MessagePassing._call_impl
    assert snapshot() == before


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda o: getattr(o, "__name__", o))
def test_a_mock_that_ends_after_the_patch_leaves_stock(owner, name, x, edge_index, ran):
    layer, _ = pyg.SAGEConv(6, 4), pyg.GATConv(6, 4)
    expected = layer(x, edge_index)
    before = snapshot()
    handle, mocked = pyg_accel.patch(), mock.patch.object(owner, name, mine)
    mocked.start()
    handle.remove()
    mocked.stop()
    assert torch.equal(layer(x, edge_index), expected)
    assert ran() == {}
    if name == "_call_impl":  # what the mock found calls the next base's
        del pyg.MessagePassing._call_impl
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


VALUES = {"none": None, "no dictionary": WithoutDict(),
          "namespace": SimpleNamespace(softmax=1, set_diag=None)}  # fmt: skip


@pytest.mark.parametrize("name", ["torch_sparse", "torch_geometric.nn.other"])
@pytest.mark.parametrize("value", VALUES)
def test_anything_may_be_in_sys_modules(name, value, x, edge_index, as_stock, monkeypatch):
    monkeypatch.setitem(sys.modules, name, VALUES[value])
    assert as_stock(pyg.SAGEConv(6, 4), x, edge_index) == {"SAGEConv": {"mean_j u0"}}


class Counted(torch.nn.Module):
    """Counts calls where torch makes them."""

    calls = 0

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._call_impl(*args, **kwargs)


class Last(Layer, Counted):
    """Its next ``_call_impl`` is that of another base."""


class First(Counted, Layer):
    """The other base comes before MessagePassing."""


@pytest.mark.parametrize("cls", [Last, First])
@pytest.mark.parametrize("always", [True, False])
def test_another_base_with_a_call_of_its_own_is_called(cls, always, x, edge_index, as_stock):
    pyg_accel.settings.always = always
    layer = cls()
    as_stock(layer, x, edge_index, times=3)
    assert layer.calls == 4
