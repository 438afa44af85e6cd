"""Tests of kernels run on graphs of which everything is known."""

import pytest

from pyg_accel.graph import facts


@pytest.fixture(autouse=True)
def memory(poisoned: None) -> None:
    """Allocate NaN: what a kernel does not write of a result is no zero by luck."""


@pytest.fixture(autouse=True)
def graphs_stay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, let a graph's first kernel wait for its longest row, as later ones would.

    Long rows are not cut before, and a test runs too few kernels on a graph to get there.
    """
    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.setattr(facts, "_USES", 0)
        monkeypatch.setattr(facts, "_USES_OF_LARGE", 0)
