"""Profilers that are in force while layers are called for the first time."""

import cProfile
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch_geometric.nn as pyg
from torch.profiler import ProfilerActivity, profile

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")


@contextmanager
def with_stacks() -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        yield


@contextmanager
def in_python() -> Iterator[None]:
    sys.setprofile(lambda frame, event, arg: None)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("profiler", [cProfile.Profile, with_stacks, in_python])
@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv"])
def test_a_profiler_stays_in_force(name, profiler):
    layer, x, edge_index = getattr(pyg, name)(8, 4), torch.randn(9, 8), torch.randint(9, (2, 30))
    expected = layer(x, edge_index)
    with pyg_accel.patched():
        with profiler():
            before = sys.getprofile()
            torch.testing.assert_close(layer(x, edge_index), expected)
            assert sys.getprofile() is before
        for _ in range(2):
            torch.testing.assert_close(layer(x, edge_index), expected)
