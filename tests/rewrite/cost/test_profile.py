"""From timing over the CSV file to models that decide."""

import csv
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch_geometric import nn

import pyg_accel
from pyg_accel import __main__ as program
from pyg_accel.rewrite import cost, select
from pyg_accel.rewrite.cost import (
    GraphFeatures,
    Primitive,
    Roofline,
    cases,
    cost_model,
    learned,
    train,
)
from pyg_accel.rewrite.cost import measurements as collecting
from pyg_accel.rewrite.cost.base import DENSE, SPARSE
from pyg_accel.rewrite.cost.timing import Laps
from pyg_accel.runtime.machine import Device
from pyg_accel.settings import settings

pytest.importorskip("xgboost")
pytest.importorskip("tqdm")
CPU = torch.device("cpu")


def few_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Primitive]:
    """Six small graphs, and a clock that knows the answer; what it timed."""
    monkeypatch.setattr(cases, "SIZES", {"cpu": (6, 1.5, 2.0, 300)})
    monkeypatch.setattr(cases, "MOST_WORK", {"cpu": 1e4})
    monkeypatch.setattr(cases, "WIDTHS", (2, 3, 4, 5, 6, 7, 8, 9, 10))
    timed: list[Primitive] = []
    model = Roofline.of("cpu")

    def workload(primitive, device, graph):
        timed.append(primitive)
        return primitive

    def clock(primitive, device):
        seconds = 3 * model.seconds(primitive) * math.log2(primitive.cols + 2)
        return Laps(seconds, seconds, 3)

    monkeypatch.setattr(collecting, "workload", workload)
    monkeypatch.setattr(collecting, "timed", clock)
    return timed


@pytest.fixture
def small(monkeypatch) -> list[Primitive]:
    return few_graphs(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[Primitive], Path]:
    """What was timed, and a folder of models."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        timed = few_graphs(patch)
        assert program.main(["profile", "--out", str(folder)]) == 0
    return timed, folder


@pytest.fixture
def models(small, trained, tmp_path) -> Path:
    """A copy of the trained models, in force."""
    shutil.copytree(trained[1], tmp_path / "own")
    settings.cost_models = str(tmp_path / "own")
    return tmp_path / "own" / Device.of("cpu").slug


def test_profile_measures_trains_and_says_how_to_use_it(small, tmp_path, capsys):
    assert program.main(["profile", "--out", str(tmp_path)]) == 0
    models = tmp_path / Device.of("cpu").slug
    rows = collecting.read_measurements(models / "measurements.csv")
    assert len(rows) == len(small) > 100
    assert collecting.primitives_of(rows) == small
    about = json.loads((models / learned.METADATA).read_text())
    assert about["device"] == asdict(Device.of("cpu"))
    assert about["primitives"]["spmm"]["rows"] == sum(p.name == "spmm" for p in small)
    assert sum(f.stat().st_size for f in models.glob("*.json")) < 1_000_000
    assert capsys.readouterr().out.endswith(f"PYG_ACCEL_COST_MODELS={models.parent.resolve()}\n")


def test_the_models_predict_the_measured_times(models, trained):
    small, model = trained[0], cost_model("cpu")
    assert model.source.startswith(f"a model learned on {Device.of('cpu')}")
    truth = Roofline.of("cpu")
    errors = sorted(
        abs((seconds - learned.CALL_OVERHEAD) / (3 * truth.seconds(p) * math.log2(p.cols + 2)) - 1)
        for p, seconds in zip(small, model.many(small), strict=True)
    )
    assert errors[len(errors) // 2] < 0.05
    assert model.many(small[:9]) == [model.many([p])[0] for p in small[:9]]


def test_all_primitives_of_a_layer_are_predicted_in_one_call(models, monkeypatch):
    model, asked = cost_model("cpu"), []
    booster = model._booster

    class Counted:
        def inplace_predict(self, inputs):
            asked.append(len(inputs))
            return booster.inplace_predict(inputs)

    monkeypatch.setattr(model, "_booster", Counted())
    monkeypatch.setattr(select, "QUICK", 0.0)
    x, edge_index = torch.randn(50, 8), torch.randint(50, (2, 300))
    plan = pyg_accel.plan(nn.GCNConv(8, 8), x, edge_index, cost=model, train=True)
    assert plan.layers[0].source.startswith("a model learned on")
    assert len(asked) == 1 and asked[0] > 5


def test_a_layer_that_takes_little_time_is_left_to_the_roofline_of_the_sizes(models, monkeypatch):
    monkeypatch.setattr(GraphFeatures, "of", None)
    x, edge_index = torch.randn(50, 8), torch.randint(50, (2, 300))
    plan = pyg_accel.plan(nn.GCNConv(8, 8), x, edge_index)
    assert "less time than measuring" in plan.layers[0].source


def test_a_primitive_that_was_not_measured_is_left_to_the_roofline(models):
    exchange = Primitive("exchange", 10, 0, 8)
    expected = Roofline.of("cpu").seconds(exchange) + learned.CALL_OVERHEAD
    assert cost_model("cpu").many([exchange]) == [pytest.approx(expected)]


def test_a_stopped_run_goes_on_where_it_stopped(small, tmp_path):
    path = tmp_path / "m.csv"
    assert not collecting.collect(CPU, path, minutes=0)
    assert collecting.read_measurements(path).empty
    assert collecting.collect(CPU, path)
    whole, count = path.read_text(), len(small)
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[: count // 2]) + lines[count // 2][:30])  # killed amid a line
    assert collecting.collect(CPU, path)
    keys = collecting.read_measurements(path)[list(collecting.KEY)]
    assert len(keys) == len(keys.drop_duplicates()) == count
    again = len(small)
    assert collecting.collect(CPU, path)
    assert len(small) == again, "nothing was left to time"


def test_a_run_that_is_cut_short_has_measured_every_primitive(monkeypatch, small, tmp_path):
    """Wherever it stops, no primitive has been measured much less often than another."""
    path, ticks = tmp_path / "m.csv", iter(range(10_000))
    monkeypatch.setattr(collecting.time, "monotonic", lambda: 60 * next(ticks))
    while not collecting.collect(CPU, path, minutes=7):
        counts = collecting.read_measurements(path).primitive.value_counts()
        counts = counts.reindex([*DENSE, *SPARSE], fill_value=0)
        assert counts.max() <= 2 * counts.min() + 2
    assert counts.min() >= train.FEWEST_ROWS


def test_measurements_that_lack_primitives_are_no_model(monkeypatch, small, tmp_path, capsys):
    models = tmp_path / Device.of("cpu").slug
    assert program.main(["profile", "--out", str(tmp_path), "--minutes", "0"]) == 2
    told = capsys.readouterr()
    assert "spmm (0)" in told.err and "the same command again" in told.err
    assert "To use these models" not in told.out
    collecting.collect(CPU, models / "measurements.csv")
    frame = collecting.read_measurements(models / "measurements.csv")
    for lacking in (SPARSE, DENSE, ("sddmm",)):
        part = frame[~frame.primitive.isin(lacking)]
        part.to_csv(models / "measurements.csv", index=False)
        assert program.main(["profile", "--out", str(tmp_path), "--minutes", "0"]) == 2
        told = capsys.readouterr()
        assert all(f"{name} (0)" in told.err for name in lacking)
        assert not (models / learned.METADATA).exists()
    assert program.main(["profile", "--out", str(tmp_path)]) == 0
    assert "To use these models" in capsys.readouterr().out


def test_measurements_of_earlier_versions_are_read(small, tmp_path):
    path = tmp_path / "m.csv"
    collecting.collect(CPU, path)
    frame = collecting.read_measurements(path)
    frame["rows"] = frame["rows"].where(frame.primitive.isin(DENSE))  # the others' were left out
    frame.to_csv(path, index=False)
    assert collecting.primitives_of(collecting.read_measurements(path)) == small


def test_graphs_are_symmetric_and_the_same_in_every_run():
    for case in list(cases.graph_cases("cpu"))[:6]:
        case = case._replace(nodes=500, entries=min(case.entries, 3000))
        graph = case.make(CPU)
        dense = torch.zeros(500, 500)
        dense[torch.arange(500).repeat_interleave(graph.degree.long()), graph.col.long()] += 1
        assert graph.num_rows == graph.num_cols == 500
        assert 0 < graph.num_edges <= 3000
        assert torch.equal(dense, dense.t()) and not dense.diagonal().any()
        assert torch.equal(graph.col, case.make(CPU).col)


def test_files_of_something_else_are_refused(small, tmp_path, capsys):
    path = tmp_path / "m.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column"):
        collecting.collect(CPU, path)
    path.unlink()
    collecting.collect(CPU, path)
    rows = list(csv.DictReader(path.open()))
    with path.open("w") as file:
        writer = csv.DictWriter(file, collecting.COLUMNS)
        writer.writeheader()
        writer.writerows(row | {"name": "Another CPU"} for row in rows)
    with pytest.raises(ValueError, match="is of Another CPU"):
        collecting.collect(CPU, path)
    with pytest.raises(ValueError, match=r"fewer than 20 measurements of gemm \(0\)"):
        train.train(tmp_path / "none.csv", tmp_path / "out")


def test_without_xgboost_the_roofline_decides_and_says_so(models, monkeypatch):
    monkeypatch.setattr(cost, "unusable", lambda: "xgboost is not installed")
    assert "roofline" in cost_model("cpu").source
    assert "xgboost is not installed" in cost_model("cpu").source


def test_without_a_model_of_the_device_the_roofline_decides_and_says_so(models, monkeypatch):
    unknown = Device("cpu", "Zilog Z80", "", 1)
    monkeypatch.setattr(Device, "of", lambda device: unknown)
    assert "roofline of Zilog Z80" in cost_model("cpu").source
    assert f"no model of this device in '{settings.cost_models}'" in cost_model("cpu").source
    settings.cost_models = None
    assert cost_model("cpu").source.startswith("roofline of Zilog Z80")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("{", "JSONDecodeError"),
        ('{"a": 1}', "'format'"),
        ("[]", "TypeError"),
        ('{"format": 99}', "format 99"),
        ('{"format": 2, "features": []}', "format 2.*retrain"),
        ('{"format": 3, "features": []}', "other features"),
    ],
)
def test_damaged_models_are_named(models, damage, told):
    learned.read.cache_clear()
    (models / learned.METADATA).write_text(damage)
    with pytest.raises(ValueError, match=f"expected cost models in .*{told}"):
        cost_model("cpu")


def test_a_list_of_primitives_without_numbers_is_named(models):
    learned.read.cache_clear()
    path = models / learned.METADATA
    path.write_text(json.dumps(json.loads(path.read_text()) | {"primitives": []}))
    with pytest.raises(ValueError, match="expected cost models in"):
        cost_model("cpu")


def test_damaged_ensembles_are_named(models):
    learned.read.cache_clear()
    (models / learned.ENSEMBLE).write_text("{}")
    with pytest.raises(ValueError, match=r"expected cost models in .*residuals\.json") as told:
        cost_model("cpu")
    assert "\n" not in str(told.value)
    learned.read.cache_clear()
    (models / learned.ENSEMBLE).unlink()
    with pytest.raises(ValueError, match=r"expected cost models in .*residuals\.json"):
        cost_model("cpu")


def test_models_of_another_device_and_missing_folders_are_errors(models, monkeypatch):
    learned.read.cache_clear()
    about = json.loads((models / learned.METADATA).read_text())
    about["device"]["threads"] = 99
    (models / learned.METADATA).write_text(json.dumps(about))
    with pytest.raises(ValueError, match="99 threads, not of"):
        cost_model("cpu")
    settings.cost_models = str(models / "nowhere")
    with pytest.raises(ValueError, match="PYG_ACCEL_COST_MODELS"):
        cost_model("cpu")


def test_no_learned_model_is_shipped():
    package = Path(pyg_accel.__file__).parent
    large = [f for f in package.rglob("*") if f.suffix in (".json", ".csv")]
    assert sum(f.stat().st_size for f in large) < 100_000


HEADER = ",".join(collecting.COLUMNS)
FOREIGN = {
    "a line without its end": "my notes, one line without newline",
    "lines, the last without its end": "my notes\nof two lines",
    "an empty line": "\n",
    "no text": b"\xff\xfe\x00\n\x00",
    "columns in another order": ",".join(reversed(collecting.COLUMNS)) + "\n1",
    "a further column": HEADER + ",mine\n1",
    "other rows": HEADER + "\nmy notes\nmore",
    "a longer row": HEADER + "\n" + "1," * 99 + "\nmore",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_something_else_stays_as_it_is(small, tmp_path, what, capsys):
    folder = tmp_path / Device.of("cpu").slug
    folder.mkdir()
    content = FOREIGN[what]
    content = content if isinstance(content, bytes) else content.encode()
    (folder / "measurements.csv").write_bytes(content)
    assert program.main(["profile", "--out", str(tmp_path)]) == 2
    assert f"'{folder}/measurements.csv' " in capsys.readouterr().err
    assert (folder / "measurements.csv").read_bytes() == content
    assert [p.name for p in folder.iterdir()] == ["measurements.csv"]


@pytest.mark.parametrize("content", ["", HEADER[:7], HEADER, HEADER + "\r", HEADER + "\r\n"])
def test_a_run_that_was_killed_while_it_began_goes_on(small, tmp_path, content):
    path = tmp_path / "m.csv"
    path.write_bytes(content.encode())
    assert collecting.collect(CPU, path)
    assert len(collecting.read_measurements(path)) == len(small)
    assert path.read_text().count("graph,primitive") == 1


def test_a_folder_that_cannot_be_made_is_an_error_of_a_line(small, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert program.main(["profile", "--out", str(tmp_path / "file" / "below")]) == 2
    assert "Not a directory" in capsys.readouterr().err


FIGURES = ["flops", "memory", "cache_bytes", "edge", "call", "fused"]


@pytest.mark.one_of(6)
@pytest.mark.parametrize("value", ["1e400", "NaN", "-1.0", "null", '"x"', "1e308"])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_that_no_machine_has_are_named(models, name, value):
    path = models / learned.METADATA
    about = json.loads(path.read_text())
    about["machine"][name] = "here"
    path.write_text(json.dumps(about).replace('"here"', value))
    with pytest.raises(ValueError, match=f"expected cost models in '{path}'"):
        cost_model("cpu")


def test_a_rate_of_zero_is_no_figure_and_a_time_of_zero_is(models):
    about = json.loads((models / learned.METADATA).read_text())
    for name, fine in (("edge", True), ("flops", False)):
        changed = about | {"machine": about["machine"] | {name: 0.0}}
        (models / learned.METADATA).write_text(json.dumps(changed))
        learned.read.cache_clear()
        if fine:
            assert cost_model("cpu").source.startswith("a model learned on")
        else:
            with pytest.raises(ValueError, match=f"no machine has {name}=0"):
                cost_model("cpu")


def test_deep_json_is_no_cost_model(models, capsys, monkeypatch):
    (models / learned.METADATA).write_text("[" * 100_000)
    with pytest.raises(ValueError, match="RecursionError"):
        cost_model("cpu")
    monkeypatch.setattr("pyg_accel.doctor.examine", list)
    assert program.main(["doctor"]) == 1
    assert "cost model: wrong: expected cost models in" in capsys.readouterr().out
