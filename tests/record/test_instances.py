"""Layers of one class share programs where their code reads the same, and die as PyG's do."""

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import GAT, GCN, GCNConv, GINConv, MessagePassing

import pyg_accel
from pyg_accel.layers import to_maxk
from pyg_accel.patching import programs

pytestmark = pytest.mark.usefixtures("always")

N, E, WIDTH = 20, 80, 8
X = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(N, (2, E), generator=torch.Generator().manual_seed(0))


class Box:
    def __init__(self, a: float = 2.0) -> None:
        self.a = a


CONFIG, ITEMS, BUFFER = Box(), [2.0], torch.ones(WIDTH)


class Scaled(MessagePassing):
    """Multiplies features by a number that a function reads of the layer and the features."""

    def __init__(self, read: Callable[..., Any] | None = None, **attributes: Any) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, WIDTH)
        for name, value in {"read": read, **attributes}.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x) * self.read(self, x))


def closure(v: float) -> Callable[..., float]:
    return lambda s, x: v


def default(v: float) -> Callable[..., float]:
    def read(s: Any, x: Tensor, v: float = v) -> float:
        return v

    return read


def with_globals(v: float) -> Callable[..., float]:
    return types.FunctionType((lambda s, x: A).__code__, {"A": v})  # type: ignore[name-defined] # noqa: F821


def tied(**others: Any) -> Scaled:
    layer = Scaled(lambda s, x: 2.0 if s.w is s.lin.weight else 5.0, **others)
    if not others:
        layer.w = layer.lin.weight
    return layer


def two_buffers(u: Tensor, v: Tensor) -> Scaled:
    def read(s: Any, x: Tensor) -> Tensor:
        s.u.add_(1.0)
        return s.v.sum()

    return Scaled(read, u=u, v=v)


def one_buffer(u: Tensor) -> Scaled:
    def read(s: Any, x: Tensor) -> Tensor:
        s.u.add_(1.0)
        return BUFFER.sum()

    return Scaled(read, u=u)


def alike(read: Callable[..., Any], *values: Any) -> Callable[[], list[Scaled]]:
    return lambda: [Scaled(read, c=value) for value in values]


ones, a = torch.ones(3), lambda s, x: s.c.a
SETS: dict[str, Callable[[], list[Scaled]]] = {
    "a global": alike(lambda s, x: 2.0 if s.c is CONFIG else 5.0, CONFIG, Box(), CONFIG),
    "a global, later": alike(lambda s, x: 2.0 if s.c is CONFIG else 5.0, Box(), CONFIG),
    "a global list": alike(lambda s, x: 2.0 if s.c is ITEMS else 5.0, [2.0], ITEMS, [2.0]),
    "a global tensor": alike(lambda s, x: 2.0 if s.c is BUFFER else 5.0, BUFFER, ones, BUFFER),
    "closures": lambda: [Scaled(closure(2.0)), Scaled(closure(5.0))],
    "defaults": lambda: [Scaled(default(2.0)), Scaled(default(5.0))],
    "globals": lambda: [Scaled(with_globals(2.0)), Scaled(with_globals(5.0))],
    "classes": alike(a, Box(2.0), type("Box", (Box,), {})(5.0), types.SimpleNamespace(a=7.0)),
    "classes as values": alike(a, type("K", (), {"a": 2.0}), type("K", (), {"a": 5.0})),
    "equal objects": alike(a, Box(2.0), Box(2.0), Box(5.0)),
    "the layer": lambda: [copy.deepcopy(s) for s in alike(
        lambda s, x: 2.0 if s.c is s else 5.0, 1.0, 2.0)()],
    "one object twice": alike(lambda s, x: 2.0 if s.c[0] is s.c[1] else 5.0,
                              [CONFIG, CONFIG], [CONFIG, Box()], [Box(), Box()]),
    "a parameter twice": lambda: [tied(), tied(w=Parameter(torch.ones(WIDTH, WIDTH)))],
    "buffers": lambda: [two_buffers(*[torch.ones(3)] * 2), two_buffers(ones.clone(), ones.clone())],
    "views": lambda: [two_buffers(ones.clone(), ones.clone()),
                      (lambda t: two_buffers(t, t[:]))(ones.clone())],
    "a buffer that is a global": lambda: [one_buffer(ones.clone()), one_buffer(BUFFER.fill_(1))],
    "a global that is a buffer": lambda: [one_buffer(BUFFER.fill_(1)), one_buffer(ones.clone())],
    "order of keys": alike(lambda s, x: next(iter(s.c)), {2.0: 1, 5.0: 1}, {5.0: 1, 2.0: 1}),
    "no attribute": lambda: [Scaled(lambda s, x: getattr(s, "b", 2.0), **k)
                             for k in ({}, {"b": 5.0})],
    "None": alike(lambda s, x: 2.0 if s.c is None else s.c.a, None, Box(5.0)),
    "shapes": alike(lambda s, x: float(s.c.shape[0]), torch.ones(2), torch.ones(5)),
    "strides": alike(lambda s, x: 2.0 if s.c.is_contiguous() else 5.0, torch.ones(3, 2),
                     torch.ones(2, 3).t()),
    "requires_grad": alike(lambda s, x: 2.0 if s.c.requires_grad else 5.0, Parameter(ones),
                           Parameter(ones, requires_grad=False)),
    "types": alike(lambda s, x: 1.0 / s.c if s.c else 7.0, 1.0, True, 1, 2, 4.0, -4.0, 0.0, -0.0),
    "children": lambda: [Scaled(lambda s, x: float(len([*s.parameters()])), **k)
                         for k in ({}, {"w": Parameter(ones)})],
    "itself in a list": lambda: [(lambda s: (setattr(s, "c", [s]), s)[1])(
        Scaled(lambda s, x: s.c[0].a, a=v)) for v in (2.0, 5.0)],
}  # fmt: skip


def results(layers: list[Any]) -> list[Tensor]:
    """Outputs and gradients of layers in turns, and of copies of them."""
    torch.manual_seed(0)
    seen: list[Tensor] = []
    for lap in range(3):
        for layer in layers:
            for _ in range(2):
                layer.zero_grad()
                out = layer(X, EDGES)
                out.square().sum().backward()
                seen += [out.detach(), *(p.grad.clone() for p in layer.parameters()
                                         if p.grad is not None)]  # fmt: skip
        if lap == 0:
            layers = [*layers, *map(copy.deepcopy, layers), *map(copy.copy, layers)]
    return seen


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", SETS)
def test_layers_of_a_class_read_what_is_theirs(name: str) -> None:
    torch.manual_seed(0)
    expected = results(SETS[name]())
    with pyg_accel.patched():
        torch.manual_seed(0)
        actual = results(SETS[name]())
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


# What calls with arguments of one shape and dtype need not have in common.
FACTS: dict[str, Callable[[Any, Tensor], float]] = {
    "stride": lambda s, x: float(x.stride(0)),
    "is_contiguous": lambda s, x: 2.0 if x.is_contiguous() else 5.0,
    "storage_offset": lambda s, x: float(x.storage_offset()),
    "_version": lambda s, x: 2.0 if x.is_inference() else float(x._version),
    "is_leaf": lambda s, x: 2.0 if x.is_leaf else 5.0,
    "grad_fn": lambda s, x: 2.0 if x.grad_fn is None else 5.0,
    "_base": lambda s, x: 2.0 if x._base is None else 5.0,
    "is_inference": lambda s, x: 2.0 if x.is_inference() else 5.0,
    "is_neg": lambda s, x: 2.0 if x.is_neg() else 5.0,
    "is_shared": lambda s, x: 2.0 if x.is_shared() else 5.0,
    "an attribute": lambda s, x: getattr(x, "tag", 2.0),
    "data_ptr": lambda s, x: 2.0 if x.data_ptr() == X.data_ptr() else 5.0,
    "identity": lambda s, x: 2.0 if x is X else 5.0,
    "identity of an attribute": lambda s, x: 2.0 if x is s.c else 5.0,
    "a key": lambda s, x: s.d.get(x, 2.0),
    "hash": lambda s, x: 2.0 if hash(x) == hash(X) else 5.0,
    "nbytes": lambda s, x: float(x.untyped_storage().nbytes()),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("fact", FACTS)
def test_arguments_differ_in_more_than_shapes(fact: str) -> None:
    tagged, other = X + 0, torch.randn(N, WIDTH)
    tagged.tag = 5.0  # type: ignore[attr-defined]
    with torch.inference_mode():
        inferred = X + 0
    values = [X, X, X, X + 0, other, other, torch.randn(WIDTH, N).t(),
              torch.randn(2 * N, WIDTH)[N:], tagged, inferred,
              (torch.randn(N, WIDTH) * 1j).conj().imag, X,
              torch.randn(N, WIDTH, requires_grad=True) * 2]  # fmt: skip
    layer = Scaled(FACTS[fact], c=other, d={other: 5.0}).requires_grad_(False)
    expected = [layer(x, EDGES).detach() for x in values]
    with pyg_accel.patched():
        actual = [layer(x, EDGES).detach() for x in values]
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def of_function() -> torch.nn.Module:
    class Own(Scaled):
        pass

    return Own(lambda s, x: 2.0)


def of_itself() -> torch.nn.Module:
    layer = Scaled()
    layer.read = lambda s, x: layer.lin.bias.sum()
    return layer


def in_parts() -> torch.nn.Module:
    return Scaled(lambda s, x: float(x.sum()))  # no program of the whole call


KINDS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: GCNConv(WIDTH, WIDTH),
    "GINConv": lambda: GINConv(torch.nn.Linear(WIDTH, WIDTH)),
    "GCN": lambda: GCN(WIDTH, WIDTH, 2),
    "GAT": lambda: GAT(WIDTH, WIDTH, 2),
    "class of a function": of_function,
    "function that refers to the layer": of_itself,
    "propagate alone": in_parts,
    "optimize": lambda: pyg_accel.optimize(GCN(WIDTH, WIDTH, 2).eval(), X, EDGES),
    "to_maxk": lambda: to_maxk(GCN(WIDTH, WIDTH, 2), 2),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_their_copies_die(kind: str) -> None:
    with pyg_accel.patched():
        model = KINDS[kind]()
        models = [model, *([] if kind == "optimize" else [copy.deepcopy(model), copy.copy(model)])]
        for each in models:
            for _ in range(3):
                each(X, EDGES).sum().backward()
        layers = [part for each in models for part in each.modules()]
        watched = [weakref.ref(owner) for owner in (*models, *layers)]
        if kind == "class of a function":
            watched.append(weakref.ref(type(model)))
        del model, models, each, layers
        gc.collect()
        assert [ref() for ref in watched if ref() is not None] == []


def test_programs_of_new_models_are_not_stored_for_each() -> None:
    with pyg_accel.patched():
        sizes = []
        for number in range(60):
            layer = GCNConv(WIDTH, WIDTH)
            layer(X, EDGES).sum().backward()
            assert programs.find(layer, "call") is not None
            if number % 20 == 19:
                del layer
                gc.collect()
                sizes.append(len(gc.get_objects()))
        assert sizes[-1] - sizes[-2] < 100


class Told(MessagePassing):
    """Does more with its arguments and result than a call of torch does."""

    def forward(self, x: Tensor, edge_index: Tensor, seen: Any = None, **scales: float) -> Tensor:
        for scale in scales.values():
            x = (x + 1) * scale
        out: Tensor = self.propagate(edge_index, x=x)
        if seen is None:
            out.tag = 5.0  # type: ignore[attr-defined]
        else:
            seen.append(out)
        return out


def test_arguments_and_results_change_as_in_pyg() -> None:
    layer = Told()

    def told() -> list[Any]:
        actual: list[Any] = [layer(X, EDGES).tag for _ in range(3)]  # type: ignore[attr-defined]
        for scales in ({"a": 2.0, "b": 3.0}, {"a": 2.0, "b": 3.0}, {"b": 3.0, "a": 2.0}):
            seen: list[Tensor] = []
            layer(X, EDGES, seen, **scales)
            actual += [len(seen), round(float(seen[0].sum()))]
        return actual

    expected = told()
    with pyg_accel.patched():
        assert told() == expected
