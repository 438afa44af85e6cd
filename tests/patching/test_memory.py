"""A loop of new batches leaves nothing behind: no tensors, no plans, no graphs."""

import functools
import gc
import inspect
import sys
import tracemalloc
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import pyg_accel
from pyg_accel.settings import settings

F = 8
# New tensors in each batch, of few kinds: how kernels are chosen is remembered by kind.
_SEED = torch.Generator().manual_seed(0)
GRAPHS = [(n, torch.randint(n, (2, e), generator=_SEED)) for n in (20, 60) for e in (90, 400)]
LAYERS = {
    "GCN": lambda: pyg.GCNConv(F, F),
    "SAGE": lambda: pyg.SAGEConv(F, F),
    "SAGE, several": lambda: pyg.SAGEConv(F, F, aggr=["mean", "max"]),
    "GINE": lambda: pyg.GINEConv(torch.nn.Linear(F, F), edge_dim=4),
    "GAT": lambda: pyg.GATConv(F, 4, heads=2, dropout=0.1),
    "GATv2": lambda: pyg.GATv2Conv(F, 4, heads=2),
    "Transformer": lambda: pyg.TransformerConv(F, 4, heads=2),
    "PNA": lambda: pyg.PNAConv(F, F, ["mean", "std"], ["identity"], torch.ones(9)),
    "RGCN": lambda: pyg.RGCNConv(F, F, 3),
    "RGCN, stacked": lambda: pyg.RGCNConv(F, F, 9),
    "Edge": lambda: pyg.EdgeConv(torch.nn.Linear(2 * F, F)),
}


def train(layers: dict[str, pyg.MessagePassing], batches: int) -> None:
    """One step a batch with each layer, on a new graph."""
    for number in range(batches):
        nodes, edge_index = GRAPHS[number % len(GRAPHS)]
        edges, edge_index = edge_index.size(1), edge_index.clone()
        x = torch.randn(nodes, F)
        for name, layer in layers.items():
            more = [torch.randn(edges, 4)] if name == "GINE" else []
            if isinstance(layer, pyg.RGCNConv):
                more = [torch.arange(edges) % layer.num_relations]
            layer.zero_grad()
            layer(x, edge_index, *more).square().sum().backward()


def memories() -> Iterator[tuple[str, object]]:
    """Whatever the modules of the package hold that could grow."""
    for place, module in list(sys.modules.items()):
        if place.split(".")[0] == "pyg_accel":
            for name, value in vars(module).items():
                yield f"{place}.{name}", value


def sizes() -> dict[str, int]:
    """How much is in each of them, by name."""
    containers = (MutableMapping, MutableSequence, MutableSet)
    actual = {}
    for name, value in memories():
        if isinstance(value, functools._lru_cache_wrapper):
            actual[name] = value.cache_info().currsize
        elif isinstance(value, containers) and not name.endswith("__"):
            actual[name] = len(value)
    return actual


def tensors() -> int:
    gc.collect()
    return sum(isinstance(value, Tensor) for value in gc.get_objects())


@pytest.mark.parametrize(
    ("batches", "verify"),
    [(30, False)] + [pytest.param(*p, marks=pytest.mark.full) for p in ((300, False), (30, True))],
)
def test_new_batches_leave_nothing_behind(batches, verify, always):
    settings.verify = verify
    layers = {name: make() for name, make in LAYERS.items()}
    with pyg_accel.patched():
        train(layers, 3 * len(GRAPHS))
        before, count = sizes(), tensors()
        assert before["pyg_accel.ops.launch._bound"] > 0  # those that are looked for are found
        assert {
            "pyg_accel.graph.derived._records",
            "pyg_accel.graph.derived._recent",
        } <= before.keys()
        tracemalloc.start()
        try:
            train(layers, batches)  # what is kept of the last batches is counted from here on
            gc.collect()
            start = tracemalloc.get_traced_memory()[0]
            train(layers, batches)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - start
        finally:
            tracemalloc.stop()
        after = sizes()
        assert {n: after[n] for n in after if after[n] > before.get(n, 0)} == {}
        assert tensors() <= count
        assert grown < 100 * 1024


def test_small_batches_at_default_settings_leave_nothing_behind():
    layers = {name: make() for name, make in LAYERS.items()}
    with pyg_accel.patched():
        train(layers, 60)  # 256 graphs are known by sight
        before, count = sizes(), tensors()
        train(layers, 30)
        after = sizes()
        assert {n: after[n] for n in after if after[n] > before.get(n, 0)} == {}
        assert tensors() <= count


def test_every_cache_has_a_limit():
    train({name: make() for name, make in LAYERS.items()}, 1)  # imports what they need
    caches = {n: v for n, v in memories() if isinstance(v, functools._lru_cache_wrapper)}
    assert len(caches) > 10
    assert [
        name
        for name, cache in caches.items()
        if cache.cache_parameters()["maxsize"] is None and inspect.signature(cache).parameters
    ] == []
