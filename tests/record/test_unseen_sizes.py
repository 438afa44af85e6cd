"""Sizes that a layer passes to code which reads the number of a size unseen."""

import importlib.util
import math
import operator
import sys
from math import isqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.patching import programs

pytestmark = pytest.mark.usefixtures("always")

TABLE, WIDTH, EDGES = [5, 6, 7, 8], 6, 300
SCALES = {
    "isqrt": lambda n: isqrt(n),
    "math under another name": lambda n, other=math: other.isqrt(n),
    "getitem": lambda n: operator.getitem(TABLE, n // 30),
    "list.__getitem__": lambda n: list.__getitem__(TABLE, n // 30),
    "map": lambda n: next(map(TABLE.__getitem__, [n // 30])),
    "pop": lambda n: TABLE.copy().pop(n // 30),
    "pow": lambda n: pow(2, n // 30, 7),
    "shift": lambda n: (1).__lshift__(n // 30),
    "a text": lambda n: 1 if "%d" % n == "60" else 2,  # noqa: UP031
    "ljust": lambda n: len("a".ljust(n // 30 + 1)),
    "bytes": lambda n: len(bytes(n // 30 + 1)),
    "slice of a list": lambda n: sum(TABLE[n // 30 :]),
    "slice of a tuple": lambda n: len((1, 2, 3, 4)[n // 30 :]) + 1,
    "type": lambda n: 2 if type(n) is int else 3,
    "class": lambda n: 2 if n.__class__ is int else 3,
}


class Sums(MessagePassing):
    """Sums of features."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Scaled(Sums):
    """Sums of features, times a number that is computed from the number of nodes."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * self.scale(x.size(0))


def graph(nodes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(nodes, (2, EDGES), generator=generator)


def assert_like_stock(layer: MessagePassing, *sizes: int) -> None:
    """Call a layer on graphs of these numbers of nodes, stock and patched."""
    calls = [graph(nodes) for nodes in sizes]
    expected = [layer(*call) for call in calls]
    with pyg_accel.patched():
        for call, right in zip(calls, expected, strict=True):
            torch.testing.assert_close(layer(*call), right)


@pytest.mark.parametrize("name", SCALES)
def test_numbers_of_sizes_are_never_constants(name):
    assert_like_stock(Scaled(SCALES[name]), 40, 41, 60, 61, 90, 40, 33)


class Compared(Sums):
    """Sums of features, twice as large for graphs from a size on that is computed with floats."""

    def forward(self, x: Tensor, edge_index: Tensor, *parts: Any, **options: Any) -> Tensor:
        share = options["share"] if options else parts[0][0]
        return self.propagate(edge_index, x=x) * (2 if share * x.size(0) > 20 else 1)


@pytest.mark.parametrize(("args", "kwargs"), [((), {"share": 0.5}), (((0.5, 1),), {})])
def test_comparisons_with_floats_among_the_arguments_see_each_size(args, kwargs):
    layer, sizes = Compared(), (36, 37, 38, 60, 61)
    expected = [layer(*graph(nodes), *args, **kwargs) for nodes in sizes]
    with pyg_accel.patched():
        for nodes, right in zip(sizes, expected, strict=True):
            torch.testing.assert_close(layer(*graph(nodes), *args, **kwargs), right)


def test_one_program_for_several_sizes_computes_numbers_of_them():
    layer, later = Scaled(lambda n: n * 2 + n // 7), (60, 61, 90, 40, 33)
    assert_like_stock(layer, 40, 41)  # at the second size it is recorded for all
    with traces() as entered:
        assert_like_stock(layer, *later)
        with pyg_accel.patched():
            layer(*graph(later[0]))
            assert len(programs.find(layer, "call").programs) == 1
            assert not programs.why(layer, "call")
    assert not entered


class Depth(Sums):
    """As many linear layers as the number of nodes says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers[: x.size(0) // 20]:
            x = layer(x)
        return self.propagate(edge_index, x=x)


def test_as_many_modules_run_as_a_size_says():
    assert_like_stock(Depth(), 40, 41, 65, 90)


class Counting(Sums):
    """Counts its calls in a buffer, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        torch.add(self.seen, 1, out=self.seen)
        return self.propagate(edge_index, x=x)


def test_results_that_are_written_elsewhere_are_not_dropped():
    layer = Counting()
    with pyg_accel.patched():
        for _ in range(5):
            layer(*graph(40))
    assert layer.seen.item() == 5


class Normalised(MessagePassing):
    """Has effects, then normalises edges, which raises for invalid ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(x)
        edge_index, weight = gcn_norm(edge_index, None, x.size(0), False, True)
        return self.propagate(edge_index, x=x, weight=weight.double())

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


def test_effects_before_an_error_happen():
    counts = []
    for patched in (False, True):
        layer = Normalised()
        x, edges = graph(40)
        bad = edges.clone()
        bad[1, -1] = 40
        with pyg_accel.patched(layer) if patched else torch.enable_grad():
            for _ in range(3):
                layer(x, edges)
            with pytest.raises((RuntimeError, IndexError)):
                layer(x, bad)
        counts.append(layer.norm.num_batches_tracked.item())
    assert counts == [4, 4]


def test_files_whose_path_begins_like_the_package_are_followed(tmp_path, monkeypatch):
    folder = str(Path(pyg_accel.__file__).parent)
    source = tmp_path / "helper.py"
    source.write_text("K = [2]\ndef scaled(x):\n    return x * K[0]\n")
    spec = importlib.util.spec_from_file_location("helper", source)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "helper", module)
    exec(compile(source.read_text(), f"{folder}_of_a_user.py", "exec"), vars(module))
    layer, call = Scaled(lambda n: module.scaled(n)), graph(40)
    with pyg_accel.patched():
        first = [layer(*call) for _ in range(3)][-1]
        module.K[0] = 3
        torch.testing.assert_close(layer(*call), first * 1.5)
