"""What a machine measured of itself is written, read, and decides from then on."""

import json
import os

import pytest
import torch
from torch_geometric.nn import SAGEConv

import pyg_accel
from pyg_accel import __main__ as program
from pyg_accel.backends.cuda import sddmm
from pyg_accel.backends.triton import launch
from pyg_accel.costs import SHIPPED, Costs, _in_force, costs
from pyg_accel.runtime import tuned as reading
from pyg_accel.runtime.machine import Device, Gpu
from pyg_accel.runtime.tuned import tuned, tuning_file
from pyg_accel.settings import Settings, settings
from pyg_accel.tuning import sizes, tune

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


def test_a_cpu_is_tuned_and_its_numbers_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "EDGES", {"cpu": 20_000})
    monkeypatch.setattr(sizes, "LAP", 1e-3)
    file = tmp_path / "folder" / "tuning.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"nvidia_l4": FIVE}))
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


@pytest.mark.parametrize(
    ("kib", "window", "features"),
    [(227, 64, 256), (163, 64, 256), (99, 64, 160), (99, 32, 256), (99, 16, 256)],
    ids=["H200", "A100", "L4-64", "L4-32", "L4-16"],
)
def test_a_window_of_dots_fits_the_shared_memory_of_every_gpu(kib, window, features, monkeypatch):
    monkeypatch.setattr(sddmm, "gpu_of", lambda index: Gpu("a GPU", 2**25, 60, kib << 10))
    actual = sddmm.most_features(window, 4, torch.device("cuda", 0))
    assert actual == features and actual % 16 == 0
    assert window * actual * 4 + sddmm.RING_BYTES <= kib << 10


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


GOOD = {"launch_us": 12, "gigabytes": 5.0, "edge_ns": 0.01}
NO_NUMBERS = ["1e400", "-1e400", "NaN", "true", "false", "null", '"5"', "[5]", "0", "1e-400", "-1",
              "1e308", "1" + 400 * "0"]  # fmt: skip


@pytest.mark.one_of(6)
@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: text[:6])
@pytest.mark.parametrize("name", GOOD)
def test_costs_that_no_machine_has_are_named(name, text, tuning, capsys, monkeypatch):
    parts = [f'"{key}": {text if key == name else value}' for key, value in GOOD.items()]
    tuning(f'{{"cpu": {{"size": {{{", ".join(parts)}}}}}}}')
    with pytest.raises(ValueError, match=rf"expected tuned parameters in '.*{name} of 'cpu'"):
        costs("cpu")
    monkeypatch.setattr("pyg_accel.doctor.examine", list)
    assert program.main(["doctor"]) == 1
    assert f"{name} of 'cpu'" in capsys.readouterr().out


@pytest.mark.parametrize("name", GOOD)
def test_costs_that_are_missing_are_named(name, tuning):
    tuning({"cpu": {"size": {key: value for key, value in GOOD.items() if key != name}}})
    with pytest.raises(ValueError, match=r"expected launch_us.*json' \(got"):
        costs("cpu")


@pytest.mark.parametrize(
    "content", ['{"dependencies": {"torch": "2.13"}}', '{"a": {}}', "[" * 100_000, '{"cpu": null}']
)
def test_files_of_others_are_not_written(content, tuning, capsys, monkeypatch):
    tuning(content)
    monkeypatch.setattr("pyg_accel.tuning.measure_costs", None)
    assert program.main(["tune", "--device", "cpu"]) == 2
    assert f"expected tuned parameters in '{tuning_file()}'" in capsys.readouterr().err
    assert tuning_file().read_text() == content
    monkeypatch.setattr("pyg_accel.doctor.examine", list)
    assert program.main(["doctor"]) == 1


@pytest.fixture
def no_home(monkeypatch):
    """A user without a name and without a folder, as in containers."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    settings.tuning = None
    for cache in (reading._read, _in_force):
        cache.cache_clear()
    yield
    for cache in (reading._read, _in_force):
        cache.cache_clear()


def test_without_a_home_the_numbers_of_the_package_hold(no_home, capsys, monkeypatch):
    assert costs("cpu") == SHIPPED["cpu"]
    layer, edges = SAGEConv(4, 4), torch.randint(10, (2, 40))
    x = torch.randn(10, 4)
    expected = layer(x, edges)
    with pyg_accel.patched():
        torch.testing.assert_close(layer(x, edges), expected)
    monkeypatch.setattr("pyg_accel.doctor.examine", list)
    program.main(["doctor"])
    assert "the numbers of the package" in capsys.readouterr().out


def test_without_a_home_there_is_nowhere_to_write(no_home, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyg_accel.tuning.measure_costs", lambda kind: GOOD)
    assert program.main(["tune", "--device", "cpu"]) == 2
    assert "set HOME, or let PYG_ACCEL_TUNING name a file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert program.main(["tune", "--device", "cpu", "--out", str(tmp_path / "t.json")]) == 0
    assert f"Written to {tmp_path}/t.json; to use it: export" in capsys.readouterr().out


def test_the_home_of_a_user_that_does_not_exist_is_named():
    settings.tuning = "~nobody-of-this-name/tuning.json"
    with pytest.raises(ValueError, match="no home folder for '~nobody-of-this-name/tuning"):
        costs("cpu")
