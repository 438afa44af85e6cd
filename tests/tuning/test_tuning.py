"""What a machine measured of itself is written, read, and decides from then on."""

import json
import os

import pytest
import torch

import pyg_accel
from pyg_accel import __main__ as program
from pyg_accel.backends.cuda import sddmm
from pyg_accel.backends.triton import launch
from pyg_accel.machine import Device, Gpu
from pyg_accel.patching.size import SHIPPED, Costs, costs
from pyg_accel.rewrite.cost.timing import Laps
from pyg_accel.settings import Settings, settings
from pyg_accel.tuned import tuned, tuning_file
from pyg_accel.tuning import launching, sizes, tune

OTHER = Device("cuda", "NVIDIA L4")
FIVE, SEVEN = ({"size": dict(zip(Costs._fields, (n, 1.0, 1.0), strict=True))} for n in (5.0, 7.0))


@pytest.fixture
def tuning(tmp_path):
    """Write a tuning file, and use it."""

    def write(content: object) -> None:
        file = tmp_path / "tuning.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        settings.tuning = str(file)

    return write


def test_a_device_is_known_by_its_name_before_its_kind(tuning):
    named, any_other = FIVE, SEVEN
    tuning({Device.of("cpu").slug: named, "cpu": any_other, OTHER.slug: named})
    assert tuned(Device.of("cpu")) == named
    assert tuned(Device("cpu", "Elbrus")) == any_other
    assert tuned(OTHER) == named
    assert tuned(Device("cuda", "NVIDIA A100")) == {}
    assert costs("cpu") == Costs(5.0, 1.0, 1.0)


def test_a_cpu_with_another_number_of_threads_is_another_device(tuning):
    shipped = SHIPPED["cpu"]
    tuning({Device.of("cpu").slug: FIVE})
    assert costs("cpu") == Costs(5.0, 1.0, 1.0)
    before = Device.of("cpu")
    torch.set_num_threads(2)
    assert Device.of("cpu") != before
    assert costs("cpu") == shipped


def test_the_default_file_is_read_where_it_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings.tuning = None
    assert tuning_file() == tmp_path / ".cache/pyg_accel/tuning.json"
    assert settings.tuning == Settings.tuning.default
    assert tuned(Device.of("cpu")) == {}


def test_the_file_can_be_named_by_the_environment(tuning, monkeypatch):
    tuning({"cpu": FIVE})
    name, settings.tuning = settings.tuning, None
    monkeypatch.setenv("PYG_ACCEL_TUNING", name)
    assert costs("cpu") == Costs(5.0, 1.0, 1.0)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"cpu": 3}'], ids=["empty", "a-list", "a-number"])
def test_a_malformed_file_is_named(text, tuning):
    tuning(text)
    with pytest.raises(ValueError, match=r"expected tuned parameters in '.*tuning\.json'"):
        costs("cpu")


@pytest.mark.parametrize("text", ["", '{"cpu": 3}'], ids=["empty", "a-number"])
def test_a_malformed_file_is_named_before_anything_is_measured(text, tuning, monkeypatch, capsys):
    tuning(text)
    monkeypatch.setattr("pyg_accel.tuning.measure_costs", None)
    assert program.main(["tune", "--device", "cpu"]) == 2
    assert str(tuning_file()) in capsys.readouterr().err


def test_a_file_is_replaced_whole_or_not_at_all(tuning, monkeypatch):
    before = {"cpu": FIVE}
    tuning(before)

    def measure(*args, **kwargs):
        assert json.loads(tuning_file().read_text()) == before
        raise KeyboardInterrupt

    monkeypatch.setattr("pyg_accel.tuning.measure_costs", measure)
    with pytest.raises(KeyboardInterrupt):
        tune("cpu")
    assert json.loads(tuning_file().read_text()) == before
    assert list(tuning_file().parent.iterdir()) == [tuning_file()]


@pytest.mark.skipif(os.geteuid() == 0, reason="may write anywhere")
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("pyg_accel.tuning.measure_costs", None)
    settings.tuning = str(tmp_path / "tuning.json")
    tmp_path.chmod(0o500)
    assert program.main(["tune", "--device", "cpu"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"cpu": {"measured": []}}', '{"cpu": {"measured": "x"}}'])
def test_the_doctor_tells_of_a_malformed_file(text, tuning, capsys, monkeypatch):
    tuning(text)
    # Whether backends work is tried in a process for each, and has tests of its own.
    monkeypatch.setattr("pyg_accel.doctor.examine", list)
    program.main(["doctor"])
    said = next(line for line in capsys.readouterr().out.splitlines() if "tuning: " in line)
    assert str(tuning_file()) in said


def test_a_file_that_does_not_exist_is_named(tmp_path):
    settings.tuning = str(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"expected tuned parameters in '.*nowhere\.json'"):
        costs("cpu")


def test_launch_parameters_of_a_device_come_before_the_shipped_ones(tuning):
    launch.table.cache_clear()
    shipped = launch.table("NVIDIA L4")
    mine = {**shipped["short-4"], "unroll": 16}
    tuning({OTHER.slug: {"launch": {"short-4": mine}}})
    launch.table.cache_clear()
    assert launch.table("NVIDIA L4") == {**shipped, "short-4": mine}
    assert launch.table("NVIDIA A100") == shipped
    launch.table.cache_clear()


@pytest.mark.parametrize("entry", [{"unroll": 0}, {"unroll": "4"}, 4])
def test_malformed_launch_parameters_are_named(entry, tuning):
    tuning({OTHER.slug: {"launch": {"short-4": entry}}})
    launch.table.cache_clear()
    with pytest.raises(ValueError, match=r"expected launch parameters in '.*tuning\.json'"):
        launch.table("NVIDIA L4")


def test_a_cpu_is_tuned_and_its_numbers_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "EDGES", {"cpu": 20_000})
    monkeypatch.setattr(sizes, "LAP", 1e-3)
    file = tmp_path / "folder" / "tuning.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"nvidia_l4": {"launch": {}}}))
    settings.tuning = str(file)
    assert program.main(["tune", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert str(Device.of("cpu")) in said and f"Written to {file}" in said
    written = json.loads(file.read_text())
    assert set(written) == {"nvidia_l4", Device.of("cpu").slug}
    part = written[Device.of("cpu").slug]
    assert part["measured"]["pyg_accel"] == pyg_accel.__version__
    assert costs("cpu") == Costs(**part["size"])
    assert all(value > 0 for value in part["size"].values())


def test_what_cannot_be_tuned_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        tune("tpu", tmp_path / "tuning.json")
    if not torch.cuda.is_available():
        assert program.main(["tune", "--device", "cuda"]) == 2
        assert "there is no CUDA device" in capsys.readouterr().err
    settings.tuning = str(tmp_path)  # a folder
    assert program.main(["tune", "--device", "cpu"]) == 2
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels run interpreted")
def test_the_fastest_launch_parameter_is_found(monkeypatch):
    pytest.importorskip("triton")
    launch.table.cache_clear()
    before = dict(launch.table("interpreter")["short-4"])
    seen = []

    def timed(call, device):
        unroll = launch.table("interpreter")["short-4"]["unroll"]
        seen.append(unroll)
        (out,) = call()
        assert torch.isfinite(out).all()
        return Laps(float(abs(unroll - 2) + 1), 1.0, 3)

    monkeypatch.setattr(launching, "timed", timed)
    graph = pyg_accel.Graph.from_edge_index(torch.randint(10, (2, 160)), (10, 10))
    case = launching.Case(graph, torch.rand(160))
    best = launching.best_parameters("short", 4, [case], {"unroll": (1, 2, 4)}, (8,), "interpreter")
    assert seen == [1, 2, 4]
    assert best == {**before, "unroll": 2}
    assert launch.table("interpreter")["short-4"] == before


@pytest.mark.parametrize(
    ("kib", "window", "features"),
    [(227, 64, 256), (163, 64, 256), (99, 64, 160), (99, 32, 256), (99, 16, 256)],
    ids=["H200", "A100", "L4-64", "L4-32", "L4-16"],
)
def test_a_window_of_dots_fits_the_shared_memory_of_every_gpu(kib, window, features, monkeypatch):
    monkeypatch.setattr(sddmm, "gpu_of", lambda index: Gpu("a GPU", 2**25, 60, kib << 10))
    found = sddmm.most_features(window, 4, torch.device("cuda", 0))
    assert found == features and found % 16 == 0
    assert window * found * 4 + sddmm.RING_BYTES <= kib << 10


def test_slower_memory_and_a_slower_l2_move_the_slices_of_dots():
    """An L4 has 300 GB/s and 48 MiB of L2 where an H200 has 4.8 TB/s and 60."""
    h200 = Gpu("NVIDIA H200", 60 << 20, 132)
    l4 = Gpu("NVIDIA L4", 48 << 20, 58, 99 << 10, 3.0e11, 58 * 2.04e9)

    def width(device: Gpu) -> int:
        return launch.choose_tile(
            device, 400_000, 400_000, 8_000_000, 256, 4, 1, 1, 1, True
        ).columns

    assert width(h200) == 256
    assert width(l4) < 256
