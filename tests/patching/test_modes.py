"""Modes of torch and subclasses of tensors see of a patched model what they see of PyG's."""

from typing import Any, ClassVar

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 40, 300, 8


class Rounded(TorchFunctionMode):
    """Rounds what is gathered, as simulated low precision does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.round() if getattr(func, "__name__", "") in ("index_select", "linear") else out


class RoundedBelow(TorchDispatchMode):
    """The same of operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.round() if "index_select" in str(func) else out


class Mine(Tensor):
    """A subclass that torch hands on."""


class Noted(Tensor):
    """A subclass that sees functions."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Noted.seen.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def relational(x: Tensor, edges: Tensor) -> Any:
    types = torch.arange(edges.size(1)) % 3
    layer = pyg.RGCNConv(F, 3, 3)
    return lambda x, edges: layer(x, edges, types)


def hetero(x: Tensor, edges: Tensor) -> Any:
    conv = pyg.HeteroConv({("a", str(i), "a"): pyg.SAGEConv(F, 3) for i in range(3)})
    return lambda x, edges: conv({"a": x}, {("a", str(i), "a"): edges for i in range(3)})["a"]


MODELS: dict[str, Any] = {
    "sage": lambda *_: pyg.SAGEConv(F, 3),
    "gcn": lambda *_: pyg.GCNConv(F, 3),
    "gat": lambda *_: pyg.GATConv(F, 3, heads=2),
    "edge": lambda *_: pyg.EdgeConv(torch.nn.Linear(2 * F, 3)),
    "relations": relational,
    "hetero": hetero,
}


@pytest.fixture
def world() -> tuple[Tensor, Tensor]:
    return torch.randn(N, F), torch.randint(0, N, (2, E))


@pytest.mark.parametrize("mode", [Rounded, RoundedBelow])
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_changes_what_it_changes_of_pygs(name, mode, world):
    model = MODELS[name](*world)
    with torch.no_grad(), mode():
        right = model(*world)
    with torch.no_grad(), pyg_accel.patched():
        for before in (False, True):  # the second time there are plans, and remembered results
            if before:
                for _ in range(2):
                    model(*world)
            with mode():
                assert torch.equal(model(*world), right)


@pytest.mark.parametrize("name", MODELS)
def test_a_mode_counts_what_pyg_runs(name, world, dispatched):
    model = MODELS[name](*world)
    model(*world)
    with dispatched() as stock:
        model(*world)
    with pyg_accel.patched():
        model(*world)
        with dispatched() as patched:
            model(*world)
    assert patched.names == stock.names


@pytest.mark.parametrize("cls", [Mine, Noted])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "hetero"])
def test_results_are_of_the_class_of_the_features(name, cls, world):
    model = MODELS[name](*world)
    x, edges = world[0].as_subclass(cls), world[1]
    with torch.no_grad():
        Noted.seen.clear()
        right = model(x, edges)
        stock, Noted.seen = Noted.seen, []
        with pyg_accel.patched():
            for _ in range(3):
                Noted.seen.clear()
                out = model(x, edges)
    assert type(out) is type(right) is cls
    assert torch.equal(out.as_subclass(Tensor), right.as_subclass(Tensor))
    assert set(stock) <= set(Noted.seen)


def test_the_report_names_modes_and_classes(world, report_of):
    layer = pyg.SAGEConv(F, 3)
    with pyg_accel.patched():
        with Rounded():
            layer(*world)
        layer(world[0].as_subclass(Mine), world[1])
    reasons = {row.reason for row in report_of()}
    assert reasons == {"inside a mode of torch: Rounded", "a tensor of the class Mine"}


def test_a_default_device_leaves_calls_accelerated(world, report_of):
    layer = pyg.SAGEConv(F, 3)
    with pyg_accel.patched(), torch.device("cpu"):
        layer(*world)
        layer(*world)
    assert not any(row.reason for row in report_of())


@pytest.mark.one_of(2)
@pytest.mark.parametrize("options", [{}, {"pre_dispatch": True}], ids=str)
@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "edge"])
def test_make_fx_records_no_example(name, options, world):
    model, edges = MODELS[name](*world), torch.randint(0, N, (2, E))
    x = torch.randn(N, F)
    if name in ("gcn", "gat"):  # PyG's own records how many loops there are
        edges = world[1].flip(1)
    with torch.no_grad(), pyg_accel.patched():
        for _ in range(2):
            model(*world)
        traced = make_fx(lambda x, edges: model(x, edges), **options)(*world)
        actual = traced(x, edges)
    with torch.no_grad():
        torch.testing.assert_close(actual, model(x, edges))
