"""``python -m pyg_accel``."""

import importlib.metadata
import sys

import pytest

from pyg_accel import __main__ as program


def test_doctor_lists_packages_backends_and_a_verdict(capsys):
    status = program.main(["doctor"])
    text = capsys.readouterr().out
    assert f"torch            {importlib.metadata.version('torch')}" in text
    assert "backends:\n  reference        available" in text
    assert ("verdict: patch() accelerates models here" in text) == (status == 0)


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"xgboost": "3.1", "xgboost-cpu": "3.2"}, "3.1"),
        ({"xgboost-cpu": "3.2"}, "3.2 (xgboost-cpu)"),
        ({}, "not installed"),
    ],
    ids=["plain", "cpu", "none"],
)
def test_the_version_comes_from_whichever_distribution_is_there(installed, told, monkeypatch):
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(program, "version", version)
    monkeypatch.setattr(program, "find_spec", lambda module: None)
    assert program._version("xgboost", program.PACKAGES["xgboost"]) == told


def test_run_runs_a_script_patched_and_reports(tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom pyg_accel.patching import reasons\n"
                      "print(reasons.is_active(), sys.argv[1:])\n")  # fmt: skip
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert program.main(["run", str(script), "--flag"]) == 0
    assert capsys.readouterr().out.startswith("True ['--flag']\n\npyg_accel: ")
    assert program.main(["run", str(tmp_path / "none.py")]) == 2
