"""Small and one-shot graphs stay with PyG; the sizes come from a file."""

import json

import pytest
import torch
from torch_geometric.nn import GCNConv, SAGEConv

import pyg_accel
from pyg_accel.patching.thresholds import Thresholds, thresholds
from pyg_accel.settings import settings

E, F = 100, 10  # 1000 edges x features


@pytest.fixture
def limits(tmp_path):
    def write(cached: object, one_shot: object) -> None:
        file = tmp_path / f"{cached}-{one_shot}.json"
        file.write_text(json.dumps({"cached_work": cached, "one_shot_work": one_shot}))
        settings.thresholds = str(file)

    return write


@pytest.fixture
def outcomes(report_of):
    """Run SAGEConv some times on one graph; return the formula or reason of every call."""

    def run(times: int = 1, edge_index: torch.Tensor | None = None) -> list[str]:
        layer, x = SAGEConv(F, 3), torch.randn(20, F)
        edge_index = torch.randint(0, 20, (2, E)) if edge_index is None else edge_index
        found = []
        with pyg_accel.patched():
            for _ in range(times):
                pyg_accel.reset_report()
                layer(x, edge_index)
                found += [row.formula or row.reason for row in report_of()]
        return found

    return run


def test_the_shipped_file_holds_sensible_sizes():
    found = thresholds()
    assert 0 < found.cached_work <= found.one_shot_work


def test_by_default_a_tiny_graph_stays_with_pyg(outcomes):
    (why,) = outcomes()
    assert why.startswith("small: edges x features below")


def test_work_at_the_limit_is_accelerated_and_below_it_is_not(limits, outcomes):
    limits(1000, 0)
    assert outcomes() == ["mean_j u0"]
    limits(1001, 0)
    assert outcomes() == ["small: edges x features below 1001"]


def test_a_graph_is_worth_sorting_when_it_comes_again(limits, outcomes):
    limits(0, 1001)
    why = "new graph: edges x features below 1001 at first sight"
    assert outcomes(3) == [why, "mean_j u0", "mean_j u0"]


def test_a_stream_of_new_small_graphs_stays_with_pyg(limits, outcomes):
    limits(0, 1001)
    for _ in range(3):
        assert outcomes()[0].startswith("new graph")


def test_a_large_new_graph_is_accelerated_at_once(limits, outcomes):
    limits(0, 1000)
    assert outcomes() == ["mean_j u0"]


def test_always_ignores_the_thresholds(limits, outcomes):
    limits(10**9, 10**9)
    settings.always = True
    assert outcomes() == ["mean_j u0"]


def test_a_normalised_graph_counts_as_seen_in_the_second_epoch(limits, report_of):
    limits(0, 10**6)
    layer, x, edges = GCNConv(F, 3), torch.randn(20, F), torch.randint(0, 20, (2, E))
    with pyg_accel.patched():
        for _ in range(3):
            layer(x, edges)
    assert [(row.formula, row.calls) for row in report_of() if row.formula] == [("sum_j mul(e0,u1)", 2)]


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{}", '{"cached_work": 1}', '{"cached_work": 1, "one_shot_work": -1}',
     '{"cached_work": 1.5, "one_shot_work": 1}', '{"cached_work": true, "one_shot_work": 1}'],
    ids=["empty", "a-list", "no-keys", "one-key", "negative", "a-fraction", "a-bool"],
)  # fmt: skip
def test_a_malformed_file_is_named(text, tmp_path):
    file = tmp_path / "limits.json"
    file.write_text(text)
    settings.thresholds = str(file)
    with pytest.raises(ValueError, match=r"expected thresholds in '.*limits\.json'"):
        thresholds()


def test_a_missing_file_is_named(tmp_path):
    settings.thresholds = str(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"expected thresholds in '.*nowhere\.json'"):
        thresholds()


def test_the_file_can_be_named_by_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "limits.json"
    file.write_text('{"cached_work": 5, "one_shot_work": 6}')
    monkeypatch.setenv("PYG_ACCEL_THRESHOLDS", str(file))
    assert thresholds() == Thresholds(5, 6)
