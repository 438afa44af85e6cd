"""What a release consists of beside the package: one version, workflows, a table that is true."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import pyg_accel
from pyg_accel.__main__ import TESTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", [])]


def test_the_version_is_written_once():
    assert PROJECT["dynamic"] == ["version"]
    dynamic = PYPROJECT["tool"]["setuptools"]["dynamic"]
    assert dynamic["version"] == {"attr": "pyg_accel.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pyg_accel.__version__
    # A literal, or setuptools would import the package, and with it torch, to read it.
    text = (ROOT / "pyg_accel/__init__.py").read_text()
    assert f'\n__version__ = "{pyg_accel.__version__}"\n' in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_complete(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # jobs ask for more by name
    assert True in workflow  # the word `on`, which YAML reads as a truth value
    for name, job in workflow["jobs"].items():
        assert ("uses" in job) != ("runs-on" in job), name
        assert {job["needs"]} <= workflow["jobs"].keys() if "needs" in job else True
        for step in job.get("steps", []):
            assert ("uses" in step) != ("run" in step), (name, step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for step in steps(path):
        for target in re.findall(r"^\s*make ([\w-]+)", step.get("run", ""), re.MULTILINE):
            assert target in targets, target
        for script in re.findall(r"bash (\S+)", step.get("run", "")):
            assert (ROOT / script).is_file(), script
        if (used := step.get("uses", "")).startswith("./"):
            assert (ROOT / used).is_file(), used


def test_the_release_is_made_of_wheels_that_were_checked():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert (ROOT / jobs["wheels"]["uses"]).is_file()
    assert jobs["publish"]["needs"] == "wheels"
    assert jobs["notes"]["needs"] == "publish"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))


def compatibility() -> dict[str, tuple[str, str]]:
    text = (ROOT / "README.md").read_text().partition("## Compatibility")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text.partition("## ")[0], re.M)
    return {name: (needs, tested) for name, needs, tested in rows}


def least(requirements: list[str], package: str) -> str:
    return next(
        m[1] for r in requirements if (m := re.fullmatch(rf"{package}>=([\d.]+)(?:;.*)?", r))
    )


def test_the_compatibility_table_is_that_of_the_package():
    table = compatibility()
    bounds = {
        "Python": PROJECT["requires-python"].removeprefix(">="),
        "PyTorch": least(PROJECT["dependencies"], "torch"),
        "PyTorch Geometric": least(PROJECT["dependencies"], "torch-geometric"),
        "Triton, for GPUs": least(PROJECT["optional-dependencies"]["triton"], "triton"),
    }
    for name, bound in bounds.items():
        assert table[name][0] == f"{bound} or later"
    assert f"torch>={bounds['PyTorch']}" in PYPROJECT["build-system"]["requires"]
    readme = (ROOT / "README.md").read_text()
    assert f'"torch>={bounds["PyTorch"]}"' in readme
    assert (
        f"TARGET_VERSION=0x{int(bounds['PyTorch'].split('.')[0]):02x}"
        in (ROOT / "setup.py").read_text()
    )
    pinned = re.search(
        r"^TORCH  \?= torch==(\d+\.\d+)\.\d+$", (ROOT / "Makefile").read_text(), re.M
    )
    assert pinned and pinned[1] in table["PyTorch"][1].partition("(CPU)")[0]
    commands = re.findall(r'"(torch==[\d.]+)" --index-url https://download\S+/cpu', readme)
    assert commands == [pinned[0].removeprefix("TORCH  ?= ")]


def test_the_newest_versions_that_were_tested_are_those_of_the_table():
    for module, name in (("torch", "PyTorch"), ("torch_geometric", "PyTorch Geometric")):
        versions = re.findall(
            r"(?<![\d.])(\d+)\.(\d+)", re.sub(r"CUDA [\d.]+", "", compatibility()[name][1])
        )
        assert max((int(a), int(b)) for a, b in versions) == TESTED[module]


def test_the_matrix_of_the_workflow_has_the_oldest_of_everything():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    rows = jobs["tests"]["strategy"]["matrix"]["include"]
    oldest = {
        "python": PROJECT["requires-python"].removeprefix(">="),
        "torch": least(PROJECT["dependencies"], "torch"),
        "pyg": least(PROJECT["dependencies"], "torch-geometric"),
    }
    assert oldest in rows


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_compiles_again_when_any_file_below_csrc_changes():
    said = subprocess.run(["make", "-npq", "help"], cwd=ROOT, capture_output=True, text=True)
    sources = re.search(r"^SOURCES := (.*)$", said.stdout, re.MULTILINE)
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert sources and set(sources[1].split()) == {str(f.relative_to(ROOT)) for f in files}


@pytest.mark.full
def test_an_editable_install_is_found_from_everywhere(tmp_path):
    """Also beside a clone that has the name of the package: Python takes it for a namespace."""
    clone = tmp_path / "pyg_accel"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", ".*", "build", "*.egg-info", "results")
    shutil.copytree(ROOT, clone, ignore=ignore)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "own"], check=True)
    python = tmp_path / "own/bin/python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "all.pth").write_text(Path(torch.__file__).parents[1].as_posix() + "\n")
    for old in Path(site).glob("setuptools*"):  # older than what pyproject.toml asks for
        shutil.rmtree(old)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", clone]
    ran = subprocess.run(
        install, env=environment | {"PYG_ACCEL_NO_EXTENSION": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    code = "import pyg_accel; print(pyg_accel.__file__); pyg_accel.patch"
    for folder in (tmp_path, clone, tmp_path / "own"):
        actual = subprocess.run(
            [python, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert actual.returncode == 0, actual.stderr
        assert Path(actual.stdout.strip()) == clone / "pyg_accel/__init__.py"


def test_an_object_is_taken_by_environments_of_the_same_torch(tmp_path, monkeypatch):
    """What pip compiled is not compiled again by `make test` in its own environment."""
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: None)
    monkeypatch.chdir(ROOT)
    built = runpy.run_path(str(ROOT / "setup.py"))
    source, made = tmp_path / "a.cpp", tmp_path / "objects/a.o"
    source.write_text("int a() { return 1; }\n")
    scope = built["compile_all"].__globals__
    compiled = []
    run = subprocess.run

    def counted(command, **kwargs):
        compiled.append(command)
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", counted)
    for folder, number in (("one", 1), ("another", 1), ("third", 2)):
        scope["torch_folder"] = lambda folder=folder: tmp_path / folder
        scope["version"] = lambda name, number=number: f"2.{number}.0+cpu"
        built["compile_all"]({made: ["c++", f"-I{tmp_path / folder}/include", "-c", str(source)]})
    assert len(compiled) == 2
