"""The applications of the DGL paper: they learn, and patch() does not change what they learn."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pyg_accel
from benchmarks.epochs import applications
from benchmarks.tools import tasks
from benchmarks.tools.timing import ROOT
from pyg_accel.settings import settings

SMALL = {
    "gcn": "pubmed-like@0.02",
    "graphsage": "products-like@0.0001",
    "rgcn": "bgs-like@0.002",
    "lgnn": "block-models@0.01",
    "monet": "pubmed-like@0.02",
    "gcmc": "ml-1m-like@0.01",
    "gat": "molecules-like@0.01",
}


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example; it finds benchmarks/ by itself."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return applications.program(request.param)


def losses(program: ModuleType, data: str, size: int | None, epochs: int = 3) -> list[float]:
    """Those of all steps, in float64: training blows up the rounding of the steps before."""
    torch.manual_seed(0)
    loaded = tasks.load(data).apply(lambda t: t.double() if t.is_floating_point() else t)
    model = program.build(loaded).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    batches = program.batches(loaded, size) if hasattr(program, "batches") else [loaded]
    return [program.train(model, optimizer, b) for _ in range(epochs) for b in batches]


CASES = [(name, None) for name in SMALL] + [("graphsage", 32), ("gat", 32), ("lgnn", 1)]


@pytest.mark.parametrize(("program", "size"), CASES, indirect=["program"])
def test_patched_applications_learn_what_stock_ones_learn(program, size, report_of):
    data = SMALL[Path(program.__file__).stem]
    wanted = losses(program, data, size)
    settings.always = True
    with pyg_accel.patched():
        actual = losses(program, data, size)
    assert actual == pytest.approx(wanted, rel=1e-5)
    assert [row.reason for row in report_of() if not row.formula] == []


def test_the_line_graph_does_not_go_back():
    torch.manual_seed(0)
    data = tasks.with_lines(tasks.communities_graph(20, 3.0, torch.Generator().manual_seed(1)))
    edges = list(zip(*data.edge_index.tolist(), strict=True))
    wanted = {(i, j) for i, (u, v) in enumerate(edges) for j, (a, w) in enumerate(edges)
              if a == v and w != u}  # fmt: skip
    assert set(zip(*data.line_index.tolist(), strict=True)) == wanted
    assert data.line_index.size(1) == len(wanted) > 20


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_an_application_runs_and_gets_better(name):
    share = {"graphsage": "products-like@0.001", "lgnn": "block-models@0.5"}.get(name)
    data = share or SMALL[name].partition("@")[0] + "@0.1"
    command = [sys.executable, f"examples/applications/{name}.py", "--data", data]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after = (
        float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith(data)
    )
    assert after < before - 0.1 if name == "gcmc" else after > before + 0.1
