"""Small graphs stay with PyG; how small is read from a file."""

import json

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_accel
from pyg_accel.patching.thresholds import Thresholds, thresholds
from pyg_accel.settings import settings

E, F = 100, 10


@pytest.fixture
def limit(tmp_path):
    def write(edges: int) -> None:
        file = tmp_path / f"{edges}.json"
        file.write_text(json.dumps({"cpu": {"min_edges": edges}}))
        settings.thresholds = str(file)

    return write


@pytest.fixture
def outcomes(report_of):
    """Run SAGEConv some times on one graph; return the formula or reason of every call."""

    def run(times: int = 1) -> list[str]:
        layer, x, edges = SAGEConv(F, 3), torch.randn(20, F), torch.randint(0, 20, (2, E))
        found = []
        with pyg_accel.patched():
            for _ in range(times):
                pyg_accel.reset_report()
                layer(x, edges)
                found += [row.formula or row.reason for row in report_of()]
        return found

    return run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_shipped_file_holds_a_sensible_size(device):
    assert 0 < thresholds(device).min_edges < 10**7


def test_devices_left_out_have_the_shipped_limits_and_unknown_ones_none(limit):
    shipped = thresholds("cuda")
    limit(5)
    assert thresholds("cpu") == Thresholds(5)
    assert thresholds("cuda") == shipped
    assert thresholds("abacus") == Thresholds(0)


def test_by_default_a_tiny_graph_stays_with_pyg(outcomes):
    assert all("edges" in why and "mean_j" not in why for why in outcomes(3))


def test_a_graph_at_the_limit_is_accelerated_and_below_it_is_not(limit, outcomes):
    limit(E)
    assert outcomes(2) == ["mean_j u0"] * 2
    limit(E + 1)
    assert not any("mean_j" in why for why in outcomes(2))


def test_always_ignores_the_limit(limit, outcomes):
    limit(10**9)
    settings.always = True
    assert outcomes() == ["mean_j u0"]


def test_the_self_loops_of_a_normalised_graph_count_as_edges(limit, report_of):
    limit(E + 1)
    with pyg_accel.patched():
        edges = torch.stack([torch.arange(E), torch.arange(E).flip(0)])
        GCNConv(F, 3)(torch.randn(E, F), edges)
    assert [row.formula for row in report_of()] == ["sum_j mul(e0,u1)"]


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{}", *(f'{{"cpu": {{"min_edges": {n}}}}}' for n in ("-1", "1.5", "true"))],
    ids=["empty", "a-list", "no-key", "negative", "a-fraction", "a-bool"],
)
def test_a_malformed_file_is_named(text, tmp_path):
    file = tmp_path / "limits.json"
    file.write_text(text)
    settings.thresholds = str(file)
    with pytest.raises(ValueError, match=r"expected thresholds in '.*limits\.json'"):
        thresholds("cpu")


def test_a_missing_file_is_named(tmp_path):
    settings.thresholds = str(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"expected thresholds in '.*nowhere\.json'"):
        thresholds("cpu")


def test_the_file_can_be_named_by_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "limits.json"
    file.write_text('{"cpu": {"min_edges": 5}}')
    monkeypatch.setenv("PYG_ACCEL_THRESHOLDS", str(file))
    assert thresholds("cpu") == Thresholds(5)
