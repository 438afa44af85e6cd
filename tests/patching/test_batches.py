"""Rows of the report for loaders: batches, how long they were waited for, who made them."""

import io
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import (
    DataLoader,
    LinkNeighborLoader,
    NeighborLoader,
    RandomNodeLoader,
)

import pyg_accel
from pyg_accel import loader as ours
from pyg_accel.call_report import Row


@pytest.fixture
def data() -> Data:
    return Data(x=torch.randn(60, 3), edge_index=torch.randint(60, (2, 400)))


def rows_of(loader: Any) -> dict[str, Row]:
    pyg_accel.reset_report()
    with pyg_accel.patched():
        for _ in loader:
            pass
    return {row.layer: row for row in pyg_accel.report(io.StringIO()).rows}


@pytest.mark.parametrize("filtered_here", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_of_neighbors_counts_once_whoever_makes_it(data, workers, filtered_here):
    loader = NeighborLoader(data, [3, 2], batch_size=20, num_workers=workers,
                            filter_per_worker=not filtered_here)  # fmt: skip
    row = rows_of(loader)["NeighborLoader"]
    assert (row.formula, row.reason, row.calls) == ("neighbors [3, 2]", "", 3)
    assert row.backend == ("this process", "1 worker", "2 workers")[workers]
    assert row.seconds > 0
    assert not row.is_forward


def test_other_loaders_have_rows(data):
    links = LinkNeighborLoader(data, [3], edge_label_index=data.edge_index[:, :8], batch_size=4)
    assert rows_of(links)["LinkNeighborLoader"].formula == "neighbors [3]"
    for cls in (DataLoader, ours.DataLoader):
        row = rows_of(cls([data] * 5, batch_size=2))["DataLoader"]
        assert (row.formula, row.backend, row.calls) == ("graphs", "this process", 3)
    row = rows_of(RandomNodeLoader(data, 4))["RandomNodeLoader"]
    assert (row.formula, row.backend, row.calls) == ("", "PyG", 4)
    assert "NeighborSampler" in row.reason


def test_loaders_of_torch_have_none():
    class Own(torch.utils.data.DataLoader):
        def collated(self, items: Any) -> Any:
            return items

    assert rows_of(torch.utils.data.DataLoader(torch.arange(6))) == {}
    own = Own(torch.arange(6))
    own.collate_fn = own.collated
    assert rows_of(own) == {}


def test_the_machine_s_reasons_are_shown(data, monkeypatch):
    monkeypatch.setattr("pyg_accel.patching.batches.cpu_unavailable_reasons", lambda: ["no CPU"])
    loader = NeighborLoader(data, [3], batch_size=30)
    row = rows_of(loader)["NeighborLoader"]
    assert (row.formula, row.backend, row.reason) == ("", "PyG", "no CPU")


def test_batches_are_no_forward_calls(data):
    with pyg_accel.patched():
        pyg_accel.reset_report()
        next(iter(NeighborLoader(data, [3])))
        assert "0 of 0 forward calls" in str(pyg_accel.report(io.StringIO()))


def test_nothing_is_counted_without_patch(data):
    pyg_accel.reset_report()
    with pyg_accel.patched():
        batches = iter(DataLoader([data], batch_size=1))
    next(batches)
    assert pyg_accel.report(io.StringIO()).rows == []


def test_an_exception_in_a_transform_is_the_user_s(data):
    def broken(batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rows_of(NeighborLoader(data, [3], transform=broken))


def test_graphs_that_pyg_collates_have_a_row_that_says_why(data):
    class Own(Data):
        pass

    row = rows_of(DataLoader([data] * 4, batch_size=2))["Batch"]
    assert (row.formula, row.backend, row.reason, row.calls) == ("graphs", "cpu", "", 2)
    mixed = [data, Own(x=data.x, edge_index=data.edge_index)]
    row = rows_of(DataLoader(mixed, batch_size=2))["Batch"]
    assert (row.formula, row.backend) == ("", "PyG")
    assert row.reason == "graphs of several classes: Data, Own"
