"""``python -m pyg_accel``."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_accel
from pyg_accel import __main__ as program

ROOT = Path(__file__).parents[1]


def test_doctor_lists_packages_backends_and_a_verdict(capsys):
    status = program.main(["doctor"])
    text = capsys.readouterr().out
    assert f"torch            {importlib.metadata.version('torch')}" in text
    assert "backends:\n  reference        available" in text
    assert ("verdict: patch() accelerates models here" in text) == (status == 0)


CRASHING = """
import os, sys
from pyg_accel.backends import Backend, Kernel
from pyg_accel.backends.reference import REFERENCE
def crash():
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_cast'\\n")
    sys.stderr.flush()
    os.abort()
def fail():
    raise RuntimeError("no such kernel")
def gspmm(*args, **given):
    return [out + 1 for out in REFERENCE.kernels["gspmm"].run(*args, **given)]
Crashing = Backend("crashing", REFERENCE.kernels, info=crash)
Failing = Backend("failing", REFERENCE.kernels, info=fail)
Wrong = Backend("wrong", {"gspmm": Kernel(gspmm, lambda spec: 1.0)})
"""


@pytest.mark.full
def test_doctor_survives_backends_that_crash_fail_or_err(tmp_path, capfd, monkeypatch):
    (tmp_path / "crashing_backends.py").write_text(CRASHING)
    facts = tmp_path / "crashing_backends-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: crashing-backends\nVersion: 1.0\n"
    )
    names = [f"{n.lower()} = crashing_backends:{n}" for n in ("Crashing", "Failing", "Wrong")]
    (facts / "entry_points.txt").write_text("\n".join(["[pyg_accel.backends]", *names]))
    root = Path(program.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    program.main(["doctor"])
    text = capfd.readouterr().out
    assert ("  crashing         no: its test crashes (SIGABRT): terminate called after throwing an "
            "instance of 'std::bad_cast'\n") in text  # fmt: skip
    assert "  failing          no: its test ends with status 1: RuntimeError: no such" in text
    assert "  wrong            no: a sum of three edges on cpu is wrong: [[4.0, 5.0]" in text
    assert "  reference        available\n" in text


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pyg_accel {pyg_accel.__version__}\n"


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"xgboost": "3.1"}, "3.1"),
        ({"xgboost-cpu": "3.2"}, "3.2 (xgboost-cpu)"),
        ({}, "not installed"),
    ],
    ids=["plain", "cpu", "none"],
)
def test_the_version_comes_from_whichever_distribution_is_there(installed, told, monkeypatch):
    monkeypatch.setattr(program, "version", installed.__getitem__)
    monkeypatch.setattr(program, "find_spec", lambda module: None)
    assert program._version("xgboost", [*installed]) == told


def test_run_runs_a_script_patched_and_reports(tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom pyg_accel.patching import reasons\n"
                      "print(reasons.is_active(), sys.argv[1:])\n")  # fmt: skip
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert program.main(["run", str(script), "--flag"]) == 0
    assert capsys.readouterr().out.startswith("True ['--flag']\n\npyg_accel: ")
    assert program.main(["run", str(tmp_path / "none.py")]) == 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to run scripts and modules from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    pyg_accel.reset_report()
    return tmp_path


def test_run_takes_a_module_like_python(folder, capsys):
    package = folder / "run_as_module"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "value.py").write_text("VALUE = 3\n")
    code = "import sys\nfrom .value import VALUE\nprint(__name__, VALUE, sys.argv)\n"
    (package / "train.py").write_text(code)
    assert program.main(["run", "-m", "run_as_module.train", "-m", "--flag"]) == 0
    path = str(package / "train.py")
    out = capsys.readouterr().out
    assert out.startswith(f"__main__ 3 {[path, '-m', '--flag']}\n\npyg_accel: ")
    with pytest.raises(ImportError, match=r"No module named run_as_module\.none"):
        program.main(["run", "-m", "run_as_module.none"])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("def f():\n    return {}[1]\nf()\n", KeyError),
        ("raise KeyboardInterrupt\n", KeyboardInterrupt),
        ("x = = 1\n", SyntaxError),
    ],
    ids=["exception", "interrupt", "syntax"],
)
@pytest.mark.parametrize("module", [False, True])
def test_the_traceback_of_a_run_begins_at_the_script(module, code, kind, folder, capsys):
    (folder / "failing.py").write_text(code)
    with pytest.raises(kind) as raised:
        program.main(["run", *(["-m", "failing"] if module else ["failing.py"])])
    sys.excepthook(raised.type, raised.value, raised.tb.tb_next)  # without the frame of this test
    out, err = capsys.readouterr()
    assert kind.__name__ in err
    assert "runpy" not in err and "__main__.py" not in err
    frames = [line for line in err.splitlines() if line.startswith("  File ")]
    assert "failing.py" in frames[0]
    assert "patch()" not in out  # it is on, so nobody is asked about it


@pytest.mark.full
def test_a_run_that_fails_ends_with_the_status_and_the_traceback_of_python(folder):
    (folder / "failing.py").write_text("1 / 0\n")
    env = dict(os.environ) | {"PYTHONPATH": str(Path(program.__file__).parents[1])}
    ours, pythons = (
        subprocess.run([sys.executable, *words, "failing.py"], capture_output=True, text=True,
                       env=env, check=False)
        for words in (["-m", "pyg_accel", "run"], [])
    )  # fmt: skip
    assert ours.returncode == pythons.returncode == 1
    place = str(folder) + os.sep  # which `python failing.py` writes before the name
    assert ours.stderr.replace(place, "") == pythons.stderr.replace(place, "")


def test_run_leaves_the_status_of_a_script_alone(folder):
    (folder / "ending.py").write_text("raise SystemExit(7)\n")
    with pytest.raises(SystemExit) as ended:
        program.main(["run", "ending.py"])
    assert ended.value.code == 7


@pytest.mark.parametrize(
    ("module", "version", "newer"),
    [
        ("torch", "99.0.0+cpu", True), ("torch", "2.13.0+cpu", False), ("torch", "2.9", False),
        ("torch", "found, version unknown", False), ("torch_geometric", "3.0.0", True),
        ("torch_geometric", "2.8.1", False), ("triton", "99.0", False),
    ],
)  # fmt: skip
def test_versions_newer_than_what_was_tested_are_noted(module, version, newer):
    assert ("newer than" in program._untested(module, version)) is newer
