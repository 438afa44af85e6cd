"""A small graph and its features, and what ran of a call, compared with stock PyG."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pyg_accel
from pyg_accel.ops import blocked
from pyg_accel.patching import networks
from pyg_accel.patching.rules import concatenation
from pyg_accel.settings import settings

N = 20


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, 6)


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(0, N, (2, 90))


@pytest.fixture
def ran(report_of: Callable[[], list[Any]]) -> Callable[[], dict[str, set[str]]]:
    """What ran, by layer, since it was asked last: formulas, or reasons in brackets."""

    def rows() -> dict[str, set[str]]:
        actual: dict[str, set[str]] = {}
        for row in report_of():
            actual.setdefault(row.layer, set()).add(row.formula or f"[{row.reason}]")
        pyg_accel.reset_report()
        return actual

    return rows


@pytest.fixture
def as_stock(ran: Callable[[], dict[str, set[str]]]) -> Callable[..., dict[str, set[str]]]:
    """Assert that a function returns the same under ``patch()``; tell what ran."""

    def check(run: Callable[..., Any], *args: Any, times: int = 1, **close: Any) -> Any:
        expected = run(*args)
        with pyg_accel.patched():
            for _ in range(times):
                torch.testing.assert_close(run(*args), expected, **close)
        return ran()

    return check


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for each graph that is sorted."""
    graphs: list[int] = []
    right = pyg_accel.Graph._from_coo
    monkeypatch.setattr(
        pyg_accel.Graph, "_from_coo", lambda *args: (graphs.append(1), right(*args))[1]
    )
    return graphs


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate graphs of any size, in blocks of few edges; edge features wait for them too."""
    settings.always = True
    monkeypatch.setattr(blocked, "edges_of_a_block", lambda *_: 32)
    monkeypatch.setattr(concatenation, "FEWEST_BYTES", 0)


@pytest.fixture(params=["in blocks", "at once"])
def pieces(request: pytest.FixtureRequest, blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks; and on all edges at once, as on a GPU with room for it."""
    if request.param == "at once":
        monkeypatch.setattr(networks, "fits_whole", lambda *_: True)


@pytest.fixture
def raises_as_stock() -> Callable[..., None]:
    """Assert that a call raises what it raises in stock PyG."""

    def check(layer: torch.nn.Module, *args: Any) -> None:
        with pytest.raises((ValueError, RuntimeError, IndexError)) as stock:
            layer(*args)
        with pyg_accel.patched(), pytest.raises(stock.type):
            layer(*args)

    return check
