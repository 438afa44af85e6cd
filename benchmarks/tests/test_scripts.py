"""Programs of others run to the same losses, stock and accelerated."""

import time
from pathlib import Path

import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import HeteroData

from benchmarks.scripts import data, database, ogb
from benchmarks.scripts.__main__ import Child, compared, in_turns, of_mode, of_steps
from benchmarks.scripts.child import BLOCK, WARM_UP
from benchmarks.scripts.printed import printed

SCRIPT = """
import torch
import torch.nn.functional as F
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCNConv

data = Planetoid("nowhere", "Cora")[0]
conv = GCNConv(data.num_features, 7)
optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    F.cross_entropy(conv(data.x, data.edge_index), data.y).backward()
    optimizer.step()
"""

WORKER = """
import os, time
if os.fork() == 0:
    while True:
        with open("ticks", "a") as file:
            file.write(".")
        time.sleep(0.005)
"""


@pytest.mark.full
def test_a_script_makes_its_steps_with_the_same_losses(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    row = compared([str(script)], 8, 30, 1)
    assert (row["steps"], row["error, stock"], row["error, patched"]) == (8, "", "")
    assert 0 <= row["loss_difference, patched"] < 1e-4
    assert row["step_ms, stock"] > 0 and row["until_ms, patched"] > row["step_ms, patched"]


@pytest.mark.full
def test_a_script_that_is_killed_has_no_result_and_others_go_on(tmp_path: Path):
    script = tmp_path / "script.py"
    killed = "    if 'pyg_accel' in sys.modules and _ == 3:\n        os.kill(os.getpid(), 9)\n"
    script.write_text("import os, sys" + SCRIPT + killed)
    runs = in_turns([str(script)], 8, 30, ["stock", "patched"])
    assert (len(runs["stock"]["ends"]), runs["stock"]["error"]) == (8, "")
    assert (runs["patched"]["ends"], runs["patched"]["error"]) == ([], "no result")


@pytest.mark.full
def test_workers_stop_while_their_script_waits_and_end_with_it(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(WORKER + SCRIPT)
    child = Child(tmp_path / "stock", [str(script)], 8, 30, "cpu", patched=False)
    ticks = tmp_path / "stock/ticks"
    try:
        assert child.turn(120)
        for _ in range(2):
            time.sleep(0.1)  # signals take effect
            before = ticks.stat().st_size
            time.sleep(0.3)
            assert ticks.stat().st_size == before > 0
            child.end()
    finally:
        child.end()


@pytest.mark.full
def test_blocks_of_steps_are_of_stock_pyg_and_accelerated(tmp_path: Path):
    script = tmp_path / "script.py"
    step = f"""
    with open({str(tmp_path / "ways")!r}, "a") as file:
        file.write("patched " if "_call_impl" in vars(MessagePassing) else "stock ")
"""
    begin = "from torch_geometric.nn import MessagePassing"
    script.write_text(begin + SCRIPT.replace("range(100)", "range(40)") + step)
    steps = WARM_UP + 12 * BLOCK
    run = in_turns([str(script)], steps, 30, ["alternating"])["alternating"]
    modes, ways = run["modes"], (tmp_path / "ways").read_text().split()
    assert (run["error"], len(run["ends"]), len(modes)) == ("", steps, steps)
    assert modes[:WARM_UP] == [""] * WARM_UP
    assert modes.count("stock") == modes.count("patched") == 6 * (BLOCK - 1)
    pairs = zip(ways, modes[1:], strict=True)  # ways are noted before each step but the first
    assert all(way == mode for way, mode in pairs if mode)


@pytest.mark.full
def test_the_model_of_a_script_is_exchanged(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    row = compared([str(script)], 8, 30, 1, ["stock", "patched", "optimized", "graphed"])
    assert row["note, optimized"] == "1 of 1 layers"
    assert row["note, graphed"] == "0 of 6 calls; no CUDA graphs on device 'cpu'"
    for variant in ("optimized", "graphed"):
        assert row["steps"] == 8 and 0 <= row[f"loss_difference, {variant}"] < 1e-4


@pytest.mark.parametrize("name", ogb.GENERATORS)
def test_made_data_of_ogb_divides_the_nodes_of_a_valid_graph(name):
    dataset = ogb.PygNodePropPredDataset(name)
    data = dataset[0]
    data.validate(raise_on_error=True)
    parts = torch.cat(list(dataset.get_idx_split().values()))
    assert torch.equal(parts.sort().values, torch.arange(data.num_nodes))
    assert data.y.shape == (data.num_nodes, dataset.num_tasks)


def test_the_area_under_the_curve_is_that_of_ranks():
    truth = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 0]])
    guess = torch.tensor([[0.1, 0.9], [0.4, 0.2], [0.3, 0.8], [0.8, 0.1]])
    actual = ogb.Evaluator("ogbn-proteins").eval({"y_true": truth, "y_pred": guess})
    assert actual["rocauc"] == pytest.approx((0.75 + 1.0) / 2)


@pytest.mark.parametrize("name", data.GENERATORS)
def test_made_data_is_that_of_the_class_it_stands_for(name, monkeypatch):
    monkeypatch.setattr(torch_geometric.datasets, name, getattr(torch_geometric.datasets, name))
    options = {"TUDataset": {"name": "MUTAG"}, "Planetoid": {"name": "Cora"}}.get(name, {})
    items = data.GENERATORS[name](torch.Generator().manual_seed(0), **options)
    assert items
    for item in items[:3]:
        item.validate(raise_on_error=True)
        stores = item.edge_stores if isinstance(item, HeteroData) else [item]
        ends = [s.face if s.get("edge_index") is None else s.edge_index for s in stores]
        assert all(each.size(1) > 0 for each in ends)


def test_keys_of_made_tables_are_rows_that_exist():
    pytest.importorskip("relbench")
    tables = database.database().table_dict
    assert sum(map(len, tables.values())) > 90_000
    for table in tables.values():
        for column, owner in table.fkey_col_to_pkey_table.items():
            assert table.df[column].between(0, len(tables[owner]) - 1).all()


def test_the_time_of_a_step_is_a_median():
    assert of_steps([1.0, 2.0, 3.0, 4.0, 5.0, 15.0, 16.0]) == (1000.0, 16000.0)
    assert all(number != number for number in of_steps([1.0, 2.0]))
    modes = ["", "patched", "patched", "", "stock", "stock"]
    run = {"ends": [1, 2, 3, 8, 10, 12], "modes": modes}
    assert (of_mode(run, "stock"), of_mode(run, "patched")) == (2000.0, 1000.0)


def test_printed_tables_are_read():
    text = """Model: GCN
+----------+-----------+---------+
| Name     | Forward   | Total   |
|----------+-----------+---------|
| Vanilla  | 0.1s      | 0.25s   |
+----------+-----------+---------+"""
    assert list(printed(text)) == [(("Model: GCN", "Vanilla"), 0.25)]
