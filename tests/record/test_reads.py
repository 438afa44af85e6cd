"""A program that has run goes on as PyG after anything that code of the layer reads has changed."""

import importlib
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pyg_accel

N, E, WIDTH = 12, 60, 4
WARM = 3
_names = count()
HEAD = """
import abc, argparse, array, builtins, collections, contextvars, copy, dataclasses, enum, functools
import importlib, inspect, itertools, operator, os, pickle, random, sys, threading, types, weakref
import numpy as np
import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, SumAggregation
class Box:
    def __init__(self, a=2.0):
        self.a = a
class Plain(torch.nn.Module):
    def forward(self, x):
        return x
def fake():
    package, module = types.ModuleType("fake_pkg"), types.ModuleType("fake_pkg.conf")
    package.__path__, package.conf, module.A = [], module, 2.0
    sys.modules |= {"fake_pkg": package, "fake_pkg.conf": module}
    return package
"""


class Read(NamedTuple):
    """A way to read a number: code of the module, of the constructor, of the read, of changes."""

    read: str
    change: str
    init: str = ""
    module: str = ""
    back: str = ""


def reads() -> dict[str, Read]:
    """The table of ``reads.txt``."""
    entries, entry, key = dict[str, dict[str, str]](), dict[str, str](), ""
    for line in Path(__file__).with_name("reads.txt").read_text().splitlines()[4:]:
        if line.startswith("    "):
            entry[key] += line[3:].replace(" ", "\n", 1)
            continue
        for part in line.split(" | "):
            if part.startswith("# "):
                entry = entries[part[2:]] = {}
            else:
                key, _, entry[key] = part.partition(" ")
    for entry in entries.values():
        if "change" not in entry:
            target = entry.pop("set", entry["read"].replace("self.", "o."))
            entry |= {"change": f"{target} = 5.0", "back": f"{target} = 2.0"}
    return {name: Read(**entry) for name, entry in entries.items()}


READS = reads()
# The code around a read: of the base of the layer, of the layer, of its child and its aggregation.
PLACES: dict[str, dict[str, str]] = {
    "forward": {"forward": "x = x * ({})"},
    "message": {"message": "x_j = x_j * ({})"},
    "aggregate": {"layer": "def aggregate(self, inputs, index, ptr=None, dim_size=None):\n"
                           "    return super().aggregate(inputs, index, ptr, dim_size) * ({})"},
    "update": {"layer": "def update(self, inputs):\n    return inputs * ({})"},
    "edge_update": {"forward": "e = self.edge_updater(edge_index, x=x)",
                    "layer": "def edge_update(self, x_j):\n    return x_j.sum(-1) * ({})"},
    "child": {"forward": "x = self.child(x)",
              "child": "def forward(self, x):\n    return x * ({})"},
    "aggregation": {"aggregation": "def forward(self, x, *args, **kwargs):\n"
                                   "    return super().forward(x, *args, **kwargs) * ({})"},
    "property": {"forward": "x = x * self.prop",
                 "layer": "@property\ndef prop(self):\n    return {}"},
    "super": {"forward": "x = x * super().helped()", "base": "def helped(self):\n    return {}"},
    "function": {"forward": "x = x * helper(self)", "module": "def helper(self):\n    return {}"},
    "nested function": {"message": "def inner():\n    return {}\nx_j = x_j * inner()"},
    "comprehension": {"message": "x_j = sum([x_j * ({}) for _ in range(1)])"},
    "lambda": {"init": "self.fn = lambda: {}", "message": "x_j = x_j * self.fn()"},
}  # fmt: skip
OWNERS = {"child": "child", "aggregation": "aggr_module"}


def text_of(read: Read, place: str) -> str:
    """The module of a layer that reads a number at a place."""
    parts = {key: code.format(read.read) for key, code in PLACES[place].items()}
    init = f"{read.init}\n" if read.init else ""
    of_layer = init if place not in OWNERS else ""

    def cls(name: str, base: str, init: str, body: str, call: str = "") -> str:
        start = f"def __init__(self):\n    super().__init__({call})\n{indent(init, '    ')}"
        return f"class {name}({base}):\n{indent(start + body, '    ')}\n"

    aggregation = "Sum()" if place == "aggregation" else "'sum'"
    body = f"""
def forward(self, x, edge_index):
    x, e = self.lin(x), None
{indent(parts.get("forward", "pass"), "    ")}
    return self.propagate(edge_index, x=x, e=e)
def message(self, x_j, e):
{indent(parts.get("message", "pass"), "    ")}
    return x_j if e is None else x_j * e.unsqueeze(-1)
{parts.get("layer", "")}
"""
    return "\n".join([
        HEAD, read.module,
        cls("Child", "torch.nn.Module", init if place == "child" else "", parts.get("child", "")),
        cls("Sum", "SumAggregation", init if place == "aggregation" else "",
            parts.get("aggregation", "")),
        cls("Base", "MessagePassing", "", parts.get("base", "def none(self): pass"), "**kwargs")
        .replace("__init__(self)", "__init__(self, **kwargs)"),
        parts.get("module", ""),
        cls("Layer", "Base", f"self.lin = torch.nn.Linear({WIDTH}, {WIDTH})\nself.child = Child()\n"
            f"{of_layer}{parts.get('init', '')}\n", body, f"aggr={aggregation}"),
    ])  # fmt: skip


def outcome(layer: Any, x: Tensor, edge_index: Tensor) -> list[Tensor] | type[Exception]:
    """Result and gradients of a call, or the error that it raised."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    try:
        out = layer(x, edge_index)
        out.square().sum().backward()
    except Exception as error:
        return type(error)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def story(folder: Path, read: Read, place: str, nodes: int, edges: int) -> list[Any]:
    """What two layers return, before and after what their code reads has changed."""
    name = f"reads_{next(_names)}"
    (folder / f"{name}.py").write_text(text_of(read, place))
    importlib.invalidate_caches()
    torch.manual_seed(3)
    module = importlib.import_module(name)
    layers = [module.Layer(), module.Layer()]
    x, edge_index = torch.randn(nodes, WIDTH), torch.randint(nodes, (2, edges))
    seen = [outcome(layer, x, edge_index) for layer in layers for _ in range(WARM)]
    space = vars(module)
    owners = [layer.get_submodule(OWNERS.get(place, "")) for layer in layers]
    for change in (read.change, read.back) * 2 if read.back else (read.change,):
        for owner in owners if "o." in change else owners[:1]:
            space["o"] = owner
            exec(change, space)
            del space["o"]
            seen += [outcome(layer, x, edge_index) for layer in layers for _ in range(2)]
    return seen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before, limit = dict(sys.modules), sys.getrecursionlimit()
    monkeypatch.syspath_prepend(tmp_path)
    sys.setrecursionlimit(1000)  # what a change is taken back to; libraries raise it
    yield tmp_path
    sys.setrecursionlimit(limit)
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for number, (mine, right) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(right, type) or isinstance(mine, type):
            assert mine == right, number
            continue
        assert len(mine) == len(right), number
        for a, b in zip(mine, right, strict=True):
            scale = max(float(b.abs().max()), 1.0)
            torch.testing.assert_close(a, b, rtol=0, atol=2e-4 * scale,
                                       msg=lambda m, n=number: f"call {n}: {m}")  # fmt: skip


@pytest.mark.one_of(40)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READS)
def test_a_change_of_what_code_reads_counts(name: str, place: str, folder: Path) -> None:
    expected = story(folder, READS[name], place, N, E)
    with pyg_accel.patched():
        actual = story(folder, READS[name], place, N, E)
    assert_same(actual, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", READS)
def test_a_change_counts_at_default_settings(name: str, folder: Path) -> None:
    expected = story(folder, READS[name], "forward", 3000, 60_000)
    with pyg_accel.patched():
        actual = story(folder, READS[name], "forward", 3000, 60_000)
    assert_same(actual, expected)
