"""Benchmarks of single figures of the papers: samples, shares, inference, curves."""

import os
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch_geometric.utils import subgraph

from benchmarks.papers import figures, tables
from benchmarks.papers.dgl_x86 import binary_reduce, operand_pairs, primitives
from benchmarks.papers.es_spmm import models
from benchmarks.papers.maxk_gnn import training
from benchmarks.papers.sensei import orders, samples, shares
from benchmarks.tools import frames, graphs, results
from benchmarks.tools.graphs import community_task
from pyg_accel.settings import settings

DGL_PYTHON = os.environ.get(binary_reduce.PYTHON_VARIABLE, "")  # tests begin without variables


def pairs(edge_index):
    return sorted(map(tuple, edge_index.t().tolist()))


@pytest.mark.parametrize("size", [5, 60])
def test_a_sample_of_nodes_is_the_subgraph_of_nodes_that_are_reached(size):
    rowptr, _ = csr = graphs.load("mycielskian8")
    generator = torch.Generator().manual_seed(3)
    taken = []
    real = torch.searchsorted

    def spy(nodes, ends):
        taken.append(nodes)
        return real(nodes, ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "searchsorted", spy)
        edge_index, nodes = samples.reached(csr, size, generator)
    assert nodes == size == taken[0].unique().numel()
    expected, _ = subgraph(taken[0], graphs.edge_list(csr), relabel_nodes=True,
                           num_nodes=rowptr.numel() - 1)  # fmt: skip
    assert pairs(edge_index) == pairs(expected)
    reached, left = {0}, set(range(size))  # one after the other from the first
    while left & reached:
        left -= reached
        reached = {a for a, b in pairs(edge_index) if b in reached} | reached
    assert not left


def test_a_sample_of_neighbours_keeps_so_many_of_each_node_and_no_other_edges():
    rowptr, _ = csr = graphs.load("mycielskian8")
    edge_index, nodes = samples.thinned(csr, 7, torch.Generator().manual_seed(0))
    assert nodes == rowptr.numel() - 1
    kept, before = pairs(edge_index), pairs(graphs.edge_list(csr))
    assert len(set(kept)) == len(kept) and set(kept) < set(before)
    assert edge_index[1].bincount(minlength=nodes).equal(rowptr.diff().clamp(max=7))


def test_the_table_of_samples_counts_equal_choices_and_what_they_lose():
    case = {"graph": "g", "sampling": "nodes", "size": 10, "model": "GCN", "in": 1, "out": 2}
    times = {0: {"a": 2.0, "b": 1.0}, 1: {"a": 1.0, "b": 3.0}}
    chosen = {0: "b", 1: "a"}  # on the graph: a
    frame = pd.DataFrame([
        {**case, "sample": sample, "tree": tree, "ms": ms, "overhead_ms": 4.0,
         "whole": tree == "a", "chosen": tree == chosen[sample]}
        for sample, of in times.items() for tree, ms in of.items()
    ])  # fmt: skip
    assert tables.samples(frame)[-1].endswith("| 2 | 50% | 1.41x | 2.00x | 1.00x | 3 |")


def test_samples_are_timed_once_and_whatever_the_choice(tmp_path):
    asked = ["--quick", "--models", "GCN", "--out", str(tmp_path)]
    samples.main(asked)
    file = tmp_path / "association_samples_cpu.csv"
    frame = results.read(file)
    for _, rows in frame.groupby(samples.CASE):
        assert rows["whole"].sum() == rows["chosen"].sum() == rows["default"].sum() == 1
        assert rows["ms"].gt(0).all() and (rows["E"] == rows["E"].iloc[0]).all()
    before = file.read_text()
    samples.main(asked)
    assert file.read_text() == before
    assert figures.draw_samples(frame).axes


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::mul", "rest"),
        ("pyg_accel_cpu::spmm", "SpMM"),
        ("pyg_accel::gspmm", "SpMM"),
        ("pyg_accel::attention", "SpMM"),
        ("pyg_accel_cpu::sampled", "SpMM"),
        ("pyg_accel_cpu::softmax", "edges"),
        ("pyg_accel_cpu::dot", "edges"),
        ("aten::index_select", "edges"),
        ("aten::scatter_add_", "SpMM"),
    ],
)
def test_operators_belong_to_parts(operator, part):
    assert shares.primitive(operator) == part


def test_the_parts_of_a_step_are_those_that_it_has():
    work = torch.nn.Linear(64, 64)
    x = torch.randn(500, 64)
    times = shares.parts(lambda: work(x).relu(), "cpu")
    assert times["GEMM"] > 0 and times["rest"] > 0
    assert times["SpMM"] == times["edges"] == 0


def test_kernels_count_once_and_those_without_an_operator_belong_to_the_rest():
    kinds = torch.autograd.DeviceType

    def event(key, where, device_us, cpu_us=0.0):
        return SimpleNamespace(key=key, device_type=where, self_device_time_total=device_us,
                               self_cpu_time_total=cpu_us)  # fmt: skip

    events = [
        event("aten::mm", kinds.CPU, 3000.0, 10.0),
        event("gemm_kernel", kinds.CUDA, 3000.0),
        event("pyg_accel::gspmm", kinds.CPU, 5000.0, 20.0),
        event("spmm_kernel", kinds.CUDA, 5000.0),
        event("somebody's kernel", kinds.CUDA, 2000.0),
    ]
    assert shares.totals(events, "cuda") == {"SpMM": 5, "GEMM": 3, "edges": 0, "rest": 2}
    alone = [event for event in events if event.device_type == kinds.CPU]
    assert shares.totals(alone, "cpu") == {"SpMM": 0.02, "GEMM": 0.01, "edges": 0, "rest": 0}


def test_shares_are_measured_of_each_layer_and_model_once(monkeypatch, tmp_path):
    monkeypatch.setattr(shares, "STEPS", 1)
    monkeypatch.setattr(shares, "SHAPES", {"arxiv-like": (16, 2, 8, 4)})
    asked = ["--quick", "--out", str(tmp_path)]
    shares.main(asked)
    file = tmp_path / "shares_cpu.csv"
    frame, before = results.read(file), file.read_text()
    assert len(frame) == 4 + 2 and set(frame["what"]) == {"layers", "models"}
    assert (frame["GEMM"] > 0).all() and (frame["SpMM"] > 0).all()
    lines = tables.shares(frame)
    assert any(line.startswith("| rmat-2.7k | GAT | training |") for line in lines)
    shares.main(asked)
    assert file.read_text() == before
    assert figures.draw_shares(frame).axes


@pytest.fixture
def task(monkeypatch, tmp_path):
    """A task in place of a real graph, and trainings of a few epochs."""
    made = community_task(600, 30_000, 16, 4)
    monkeypatch.setattr(models, "load", lambda name, device, **_: made)
    monkeypatch.setattr(models.model_of, "__kwdefaults__", {"epochs": 5})
    monkeypatch.setenv("PYG_ACCEL_DATA", str(tmp_path))
    return made


def test_inference_with_sampled_edges_has_every_width_and_its_accuracy(task, tmp_path):
    asked = ["--what", "inference", "--quick", "--graphs", "cornell5", "--out", str(tmp_path)]
    models.main(asked)
    file = tmp_path / "sampled_inference_cpu.csv"
    frame, before = results.read(file), file.read_text()
    for _, rows in frame.groupby("model"):
        assert rows["case"].to_list() == ["stock", "all edges", "sampled", "sampled"]
        assert rows["width"].to_list() == [0, 0, 16, 64]
        stock, exact, *_ = rows["accuracy"]
        assert stock == exact and rows["accuracy"].between(0, 1).all()
        kept = rows["kept"].to_list()
        assert kept[0] == kept[1] == 1 > kept[3] > kept[2]
    models.main(asked)
    assert file.read_text() == before


def test_dropped_edges_are_a_share_and_their_accuracy_is_of_several_draws(task, tmp_path):
    asked = ["--what", "dropped", "--graphs", "Cora", "rmat", "--out", str(tmp_path)]
    models.main(asked)
    file = tmp_path / "dropped_edges_cpu.csv"
    frame, before = results.read(file), file.read_text()
    for name, rows in frame.groupby("graph"):
        assert rows["dropped"].to_list() == list(models.DROPPED)
        kept = rows["E"] / task.num_edges
        assert (kept - (1 - rows["dropped"])).abs().max() < 0.02 and kept.iloc[0] == 1
        assert rows["accuracy"].notna().all() == (name == "Cora")
        assert (rows["sample_ms"] > 0).to_list() == [False, True, True, True, True]
    assert frame.loc[0, "deviation"] == 0  # every draw keeps all edges
    models.main(asked)
    assert file.read_text() == before


def test_a_width_is_chosen_on_validation_nodes(task, tmp_path):
    models.main(["--what", "accuracy", "--quick", "--graphs", "Cora", "--out", str(tmp_path)])
    frame = results.read(tmp_path / "sampled_accuracy.csv")
    case = ["model", "strategy", "rescale"]
    assert (frame.groupby(case)["chosen"].sum() <= 1).all() and frame["chosen"].any()
    assert (frame["val_all"] - frame["val"])[frame["chosen"]].max() <= models.MAX_DROP + 1e-6


def test_curves_fall_and_are_not_made_again(monkeypatch, tmp_path):
    task = community_task(400, 4_000, 16, 4)
    monkeypatch.setattr(training, "load", lambda name, device, nodes: task)
    asked = ["--curves", "--datasets", "Cora", "--models", "SAGE", "--k", "8", "--seeds", "1",
             "--epochs", "6", "--out", str(tmp_path)]  # fmt: skip
    training.main(asked)
    file = tmp_path / "maxk_convergence.csv"
    frame, before = results.read(file), file.read_text()
    assert frame["k"].to_list() == [0] * 4 + [8] * 4
    for _, run in frame.groupby("k"):
        assert run["epoch"].to_list() == [1, 2, 4, 6]
        assert run["loss"].iloc[-1] < run["loss"].iloc[0]
    training.main(asked)
    assert file.read_text() == before
    assert len(tables.convergence(frame)) == 4


def test_trainings_that_a_file_has_are_not_repeated(monkeypatch, tmp_path):
    trained = []

    def train(data, kind, k, seed, **options):
        trained.append((kind, k, seed))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return {"accuracy": 50.0 + seed, "validation": 50.0}

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "load", lambda name, device, nodes: None)
    asked = ["--datasets", "Cora", "--models", "SAGE", "--seeds", "2", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        training.main(asked)
    training.main(asked)
    relu, maxk = ("SAGE", 0), ("SAGE", 32)
    assert trained == [(*relu, 0), (*relu, 1), (*maxk, 0), (*maxk, 0), (*maxk, 1)]
    training.main(asked)
    assert len(trained) == 5


def test_the_families_of_gaan_are_all_of_its_orders(tmp_path):
    orders.main(
        ["--quick", "--models", "GaAN", "--graphs", "rmat-2.7k@0.1", "--out", str(tmp_path)]
    )
    frame = frames.orders(str(tmp_path))
    assert set(frame["family"]) == {"reuse", "recompute"}
    cases = frames.order_cases(frame)
    assert len(cases) == 4 and set(cases["took"]) <= {"reuse", "recompute"}


def test_orders_are_held_against_that_of_dgl_by_size():
    case = {"model": "GCN", "device": "cpu", "mode": "inference", "in": 1, "out": 2}
    frame = pd.DataFrame([
        {**case, "paper_default": 8.0, "chosen": 2.0, "default": 16.0},
        {**case, "paper_default": 8.0, "chosen": 8.0, "default": 4.0},
        {**case, "model": "SGC", "paper_default": 1.0, "chosen": 1.0, "default": 1.0},
    ])  # fmt: skip
    (row,) = frames.order_by_size(frame).to_dict("records")
    assert row == pytest.approx({"ours": 2.0, "PyG's order": 1.0})
    assert figures.draw_sizes(frame).axes


def test_one_mean_and_deviation_a_k_is_drawn():
    frame = pd.DataFrame([
        {"dataset": name, "model": "SAGE", "k": k, "accuracy": 50.0 + seed}
        for name, ks in {"Cora": (None, 2, 4), "CiteSeer": (None, 2)}.items()
        for k in ks for seed in range(2)
    ])  # fmt: skip
    (axis,) = figures.draw_accuracy(frame).axes
    assert axis.get_title() == "Cora, SAGE"


def test_speed_by_k_is_over_relu_on_torchs_matrix():
    times = {"ReLU, torch CSR": 8.0, "ReLU, patched": 4.0, "ReLU, no edges": 1.0, "MaxK 2": 2.0,
             "MaxK 4": 4.0}  # fmt: skip
    frame = pd.DataFrame([
        {"graph": "g", "model": "SAGE", "shape": shape, "case": case, "epoch_ms": ms * factor,
         "k": float(case.removeprefix("MaxK ")) if case.startswith("MaxK") else None}
        for shape, factor in {"paper": 1, "PyG": 3}.items() for case, ms in times.items()
    ])  # fmt: skip
    (axis,) = figures.draw_speed(frame).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert lines["MaxK"] == [4.0, 2.0]
    assert lines["ReLU, no edges"] == [8.0, 8.0] and lines["ReLU, patched"] == [2.0, 2.0]


@pytest.fixture
def tiny(monkeypatch):
    """Operands of a small graph are the same for all, and every size is accelerated."""
    monkeypatch.setattr(settings, "always", True)
    return operand_pairs.Operands("rmat-2.7k@0.1", features=6)


@pytest.mark.parametrize("name", operand_pairs.MESSAGES)
def test_what_is_right_is_a_loop_over_the_edges(name, tiny):
    message = operand_pairs.MESSAGES[name]
    values, nodes = tiny.of(message, torch.float64), tiny.rowptr.numel() - 1
    received = [[] for _ in range(nodes)]
    for number, (source, target) in enumerate(tiny.edge_index.t().tolist()):
        rows = {"u": source, "v": target, "e": number}
        read = [values[end].detach()[rows[end]] for end in message.ends]
        received[target].append(operand_pairs.OPS[message.op](*read))
    reduces = {
        "sum": lambda rows: rows.sum(0), "mean": lambda rows: rows.mean(0),
        "max": lambda rows: rows.amax(0),
    }  # fmt: skip
    for reduce, of in reduces.items():
        (right,) = binary_reduce.truth(message, reduce, tiny, train=False)
        for target, rows in enumerate(received):
            wanted = of(torch.stack(rows)) if rows else torch.zeros(right.size(1)).double()
            torch.testing.assert_close(right[target], wanted)


def test_every_pair_of_operands_is_timed_once_and_what_is_accelerated_has_a_formula(
    tiny, monkeypatch, tmp_path
):
    monkeypatch.setattr(binary_reduce, "Operands", lambda graph: tiny)
    asked = ["--graphs", "tiny", "--seconds", "0.0001", "--out", str(tmp_path)]
    binary_reduce.main(asked)
    file = tmp_path / "binary_reduce.csv"
    frame, before = results.read(file), file.read_text()
    works, messages = binary_reduce.WORK, operand_pairs.MESSAGES
    # 6 ordered pairs of ends with 5 operations, of which 3 commute, 2 copies, a scalar an edge.
    assert len(messages) == 3 * (5 + 2) + 2 + 1
    wanted = {(m, *work) for m in messages for work in works} - {("copy_e", "edges", "forward")}
    actual = frame.groupby("variant")[["message", "reduce", "pass"]].apply(
        lambda rows: list(rows.itertuples(index=False, name=None))
    )
    assert set(actual.index) == {"stock", "patched"}
    for cases in actual:
        assert len(cases) == len(set(cases)) and set(cases) == wanted
    assert frame["correct"].all() and (frame["error"] <= binary_reduce.TOLERANCE).all()
    assert (frame["ms"] > 0).all() and (frame["p20"] <= frame["p80"]).all()
    ours = frame[frame["variant"] == "patched"]
    left = ours.loc[ours["formula"].isna(), ["message", "reduce"]]
    assert left.to_numpy().tolist() == [["copy_u", "edges"]]  # a gather
    binary_reduce.main(asked)
    assert file.read_text() == before


def test_a_message_that_is_computed_wrongly_ends_the_run(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(binary_reduce, "Operands", lambda graph: tiny)
    monkeypatch.setattr(binary_reduce, "truth", lambda *_, train: [torch.ones(270, 6).double()])
    asked = ["--graphs", "tiny", "--messages", "u_mul_e", "--out", str(tmp_path)]
    with pytest.raises(AssertionError, match=r"'u_mul_e'.*off by"):
        binary_reduce.main(asked)


def test_the_table_of_operands_has_ratios_and_leaves_a_wrong_peer_out():
    case = {"graph": "g", "message": "u_add_v", "reduce": "sum", "correct": True}
    times = {"forward": (6.0, 2.0, 3.0, True), "training": (1.5, 2.0, 1.0, False)}
    frame = pd.DataFrame([
        {**case, "pass": name, "variant": variant, "ms": ms, "formula": "",
         "correct": variant != "DGL" or right}
        for name, (stock, patched, dgl, right) in times.items()
        for variant, ms in (("stock", stock), ("patched", patched), ("DGL", dgl))
    ])  # fmt: skip
    frame.loc[(frame["variant"] == "patched") & (frame["pass"] == "training"), "formula"] = None
    head, _, row, _, last = tables.operand_pairs(frame)
    assert head == "| graph | message | sum | sum; training |"
    assert row == "| g | `u_add_v` | 3.00x / 1.50x | 0.75x / — \\* |"
    assert "1.50x over stock (1 of 2 below 0.98), 1.50x over DGL (0 of 1 below" in last


@pytest.mark.skipif(not DGL_PYTHON, reason="DGL is not there")
def test_dgl_computes_every_pair_of_operands(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv(binary_reduce.PYTHON_VARIABLE, DGL_PYTHON)
    monkeypatch.setattr(binary_reduce, "Operands", lambda graph: tiny)
    binary_reduce.main(["--graphs", "tiny", "--seconds", "0.0001", "--out", str(tmp_path)])
    frame = results.read(tmp_path / "binary_reduce.csv")
    theirs = frame[frame["variant"] == "DGL"]
    assert len(theirs) * 3 == len(frame) and theirs["correct"].all()


@pytest.mark.parametrize(
    ("formula", "names"),
    [
        ("sum_j u0", "u_copy_add_v"),
        ("mean_j u0, 206 relations", "u_copy_mean_v"),
        ("mean+max_j e0", "e_copy_mean_v e_copy_max_v"),
        ("sum_j mul(e0,u1)", "u_mul_e_add_v"),
        ("max_j sub(v0,u1)", "v_sub_u_max_v"),
        ("sum_j div(relu(add(e0,1.0)),u1)", "e_div_u_add_v"),
        ("sum_j relu(add(u0,e1))", "u_add_e_copy_e e_copy_add_v"),
        ("sum_j mul(sigmoid(add(v0,u1)),u2)", "u_add_v_copy_e u_mul_e_add_v"),
        ("sum(mul(v0,u1))", "u_dot_v_copy_e"),
        ("mul(u0,v1)", "u_mul_v_copy_e"),
        ("sum_j mul(2.0,u0); add(u0,v1)", "u_copy_add_v u_add_v_copy_e"),
        ("sum_j mul(softmax_j(leaky_relu(add(u0,v1),0.2)),u2)",
         "u_add_v_copy_e e_copy_max_v e_sub_v_copy_e e_copy_add_v e_div_v_copy_e u_mul_e_add_v"),
    ],
)  # fmt: skip
def test_a_formula_is_made_of_primitives(formula, names):
    assert primitives.primitives(formula) == names.split()


@pytest.mark.parametrize("formula", ["max_j network(edges), in blocks", "where(u0,v1,e2)", "u0+v1"])
def test_what_is_no_formula_has_no_primitives(formula):
    with pytest.raises(ValueError, match=r"not a formula|no scores|no dot"):
        primitives.primitives(formula)


def test_the_primitives_of_the_applications_are_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # programs find benchmarks/ by themselves
    primitives.main(["--out", str(tmp_path)])
    frame = results.read(tmp_path / "primitives.csv")
    actual = frames.primitives_called(frame)
    assert list(actual) == [application.name for application in primitives.APPLICATIONS]
    assert actual["GCN"] == ["u_mul_e_add_v"] and len(actual["GAT"]) == 6
    assert (frame["calls"] > 0).all()
    assert actual == frames.primitives_called(results.read("papers/dgl_x86/primitives"))
    lines = tables.primitives(frame)
    assert lines[0].startswith("| application | `u_mul_e_add_v` |")
    assert lines[2].startswith("| GCN | x |") and lines[2].endswith("| 1 | 1 |")
    assert settings.always is False
