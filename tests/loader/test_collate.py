"""Batches that patch() makes are those of PyG, attribute for attribute."""

from typing import Any

import pytest
import torch
from torch.utils.data import Subset, random_split
from torch_geometric.data import Batch, Data
from torch_geometric.data.collate import collate as stock_collate
from torch_geometric.data.separate import separate as stock_separate
from torch_geometric.loader import DataLoader

import pyg_accel
from pyg_accel import loader
from pyg_accel.loader import selected
from tests.loader.batches import CASES, DATASETS, Items, assert_same, hetero, molecule, parts


@pytest.mark.parametrize("follow", [(), ("x", "edge_index", "x_s")])
@pytest.mark.parametrize("name", CASES)
def test_a_list_of_graphs_becomes_the_batch_of_pyg(name, follow):
    items = [CASES[name]() for _ in range(7)]
    options = {"follow_batch": list(follow), "exclude_keys": ["edge_attr"] if follow else []}
    theirs = parts(Batch.from_data_list(items, **options))
    with pyg_accel.patched():
        ours = parts(Batch.from_data_list(items, **options))
        one = parts(Batch.from_data_list(items[:1], **options))
    assert_same(ours, theirs)
    assert_same(one, parts(Batch.from_data_list(items[:1], **options)))


@pytest.mark.parametrize("follow", [(), ("x", "edge_index", "x_s")])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"batches"}))
def test_a_dataset_in_memory_gives_the_batches_of_pyg(name, follow):
    dataset = Items([CASES[name]() for _ in range(9)])
    options = {"batch_size": 4, "follow_batch": list(follow)}
    theirs = [parts(batch) for batch in DataLoader(dataset, **options)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader(dataset, **options)]
    assert_same(ours, theirs)


def test_graphs_of_a_dataset_are_not_separated(monkeypatch):
    dataset = Items([molecule(smiles="C") for _ in range(40)])
    made = []
    monkeypatch.setattr(
        "torch_geometric.data.in_memory_dataset.separate",
        lambda **options: made.append(options["idx"]) or stock_separate(**options),
    )
    for _ in loader.DataLoader(dataset, batch_size=20):
        pass
    assert made == []


@pytest.mark.parametrize("which", ["shuffled", "split", "subset", "indexed", "transformed"])
def test_parts_of_a_dataset_give_the_batches_of_pyg(which):
    made = {"transform": lambda data: data.update({"z": data.x.sum()})}
    items = [molecule() for _ in range(30)]
    dataset = Items(items, **(made if which == "transformed" else {}))
    part = {
        "split": lambda: random_split(dataset, [20, 10], torch.Generator().manual_seed(0))[0],
        "subset": lambda: Subset(dataset, [5, 3, 3, 29]),
        "indexed": lambda: dataset[torch.tensor([7, 1, 28])],
    }.get(which, lambda: dataset)()
    runs = []
    for patched in (False, True):
        torch.manual_seed(3)
        batches = DataLoader(part, batch_size=3, shuffle=which == "shuffled")
        with pyg_accel.patched() if patched else torch.no_grad():
            runs.append([parts(batch) for batch in batches])
    assert_same(*runs)


def test_workers_give_the_batches_of_pyg():
    dataset = Items([molecule(smiles="C") for _ in range(12)])
    theirs = [parts(batch) for batch in DataLoader(dataset, batch_size=5)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader(dataset, batch_size=5, num_workers=2)]
        several = [parts(batch) for batch in DataLoader([*dataset], batch_size=5, num_workers=1)]
    assert_same(ours, theirs)
    assert_same(several, theirs)


def test_a_collate_function_of_the_user_gets_the_items():
    dataset = Items([molecule() for _ in range(6)])
    with pyg_accel.patched():
        batches = torch.utils.data.DataLoader(
            dataset, batch_size=3, collate_fn=lambda items: [item.num_nodes for item in items]
        )
        assert [n for batch in batches for n in batch] == [item.num_nodes for item in dataset]


def test_graphs_of_a_batch_can_be_had_again():
    dataset = Items([molecule() for _ in range(6)])
    with pyg_accel.patched():
        batch = next(iter(DataLoader(dataset, batch_size=6)))
    for item, again in zip(dataset, batch.to_data_list(), strict=True):
        assert_same(again.to_dict(), item.to_dict())


def test_everything_is_put_back():
    with pyg_accel.patched():
        pass
    assert stock_collate.__code__.co_name == "collate"
    assert stock_collate.__code__.co_filename.endswith("collate.py")


def test_items_that_a_collate_function_changes_are_batched_as_they_are():
    def augmented(items: list[Data]) -> Any:
        assert isinstance(items, list)
        for item in items:
            item.x = item.x + 100
        return Batch.from_data_list(items)

    dataset = Items([molecule() for _ in range(4)])
    with pyg_accel.patched():
        batches = torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=augmented)
        assert float(next(iter(batches)).x.min()) > 50


def test_a_loader_of_features_by_another_name_adds_no_batch_vector():
    graphs = [Data(feat=torch.ones(2 + i, 1)) for i in range(3)]
    theirs = [parts(batch) for batch in DataLoader(graphs, batch_size=3)]
    assert_same([parts(batch) for batch in loader.DataLoader(graphs, batch_size=3)], theirs)


def test_workers_put_together_shapes_that_differ():
    empty = Data(x=torch.ones(2, 1), edge_index=torch.tensor([]).long())
    full = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1, 0], [1, 0, 1]]))
    theirs = [parts(batch) for batch in DataLoader([empty, full], batch_size=2)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader([empty, full], batch_size=2, num_workers=1)]
    assert_same(ours, theirs)


def test_a_dataset_whose_items_are_made_otherwise_is_asked_for_them():
    class Doubled(Items):
        def get(self, idx: int) -> Any:
            data = super().get(idx)
            data.x = 2 * data.x
            return data

    dataset = Doubled([molecule() for _ in range(5)])
    assert not selected.counted_by(dataset, None)
    with pyg_accel.patched():
        batch = next(iter(DataLoader(dataset, batch_size=5)))
    torch.testing.assert_close(batch.x, torch.cat([item.x for item in dataset]))


@pytest.mark.parametrize("bad", ["an attribute is missing", "widths differ", "no items"])
def test_bad_items_raise_what_pyg_raises(bad):
    items = [molecule(3), molecule(3)]
    if bad == "an attribute is missing":
        del items[1].edge_attr
    elif bad == "widths differ":
        items[1].x = torch.randn(3, 4)
    else:
        items = []
    errors = []
    for patched in (False, True):
        with pyg_accel.patched() if patched else torch.no_grad(), pytest.raises(Exception) as info:
            Batch.from_data_list(items)
        errors.append((info.type, str(info.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_pyg(name, device):
    dataset = DATASETS[name]()
    options = {"batch_size": 4, "follow_batch": ["x"], "exclude_keys": ["y"]}
    theirs = [parts(batch) for batch in DataLoader(dataset, **options)]
    batches = loader.DataLoader(dataset, device=device, **options)
    assert len(batches) == len(theirs)
    for _ in range(2):
        assert_same([parts(batch) for batch in batches], theirs)


def test_it_shuffles_as_torch_does():
    dataset, runs = DATASETS["in memory"](), []
    for cls in (DataLoader, loader.DataLoader):
        torch.manual_seed(1)
        runs.append([parts(batch) for batch in cls(dataset, batch_size=3, shuffle=True)])
    assert_same(*runs)


def test_batches_are_on_the_device():
    """The meta device has no data, so its batches tell where they were made."""
    data = Items([Data(x=torch.randn(3, 2)) for _ in range(4)])
    batches = loader.DataLoader(data, batch_size=2)
    assert next(iter(batches)).x.device.type == "cpu"
    typed = loader.DataLoader([hetero()], device="meta")
    assert next(iter(typed))["user"].x.device.type == "meta"


def test_the_report_says_who_collated(report_of):
    class Own(Data):
        pass

    graphs = [molecule() for _ in range(4)]
    with pyg_accel.patched():
        for _ in DataLoader(graphs, batch_size=2):
            pass
        for _ in DataLoader([*graphs[:1], Own(**graphs[1].to_dict())], batch_size=2):
            pass
    rows = {row.backend: row for row in report_of()}
    assert {row.layer for row in rows.values()} == {"Batch"}
    assert not any(row.is_forward for row in rows.values())
    assert (rows["cpu"].formula, rows["cpu"].reason, rows["cpu"].calls) == ("graphs", "", 2)
    assert rows["PyG"].formula == ""
    assert rows["PyG"].reason == "graphs of several classes: Data, Own"


def test_the_dataset_stays_where_it_is():
    data = Items([molecule() for _ in range(4)])
    before = data._data.x
    next(iter(loader.DataLoader(data, batch_size=2, device="cpu")))
    assert data._data.x is before


@pytest.mark.parametrize("option", [{"num_workers": 2}, {"pin_memory": True}])
def test_what_a_gpu_cannot_use_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        loader.DataLoader([molecule()], device="cuda", **option)


def test_workers_and_patch_make_the_same_batches():
    dataset = DATASETS["in memory"]()
    theirs = [parts(batch) for batch in DataLoader(dataset, batch_size=4)]
    with pyg_accel.patched():
        assert_same(
            [parts(b) for b in loader.DataLoader(dataset, batch_size=4, num_workers=1)], theirs
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DATASETS)
def test_batches_on_a_gpu_are_those_of_pyg(name):
    dataset = DATASETS[name]()
    theirs = [batch.to("cuda") for batch in DataLoader(dataset, batch_size=4)]
    ours = [*loader.DataLoader(dataset, batch_size=4, device="cuda")]
    assert all(batch.x.is_cuda for batch in ours if isinstance(batch, Data))
    assert_same([batch.to_dict() for batch in ours], [batch.to_dict() for batch in theirs])


def test_an_empty_dataset_has_no_batches():
    assert [*loader.DataLoader([], batch_size=2)] == [*DataLoader([], batch_size=2)] == []
