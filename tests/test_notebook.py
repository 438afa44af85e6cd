"""The notebook of examples/: it runs, and what GitHub shows of it was made by its own code."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


def outputs(cells: list[dict], kind: str) -> int:
    return sum(
        kind in output.get("data", {}) for cell in cells for output in cell.get("outputs", [])
    )


def test_the_committed_notebook_shows_its_plots_and_is_small():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert outputs(code, "image/png") == 3
    assert not any(o["output_type"] == "error" or o.get("name") == "stderr"
                   for cell in code for o in cell["outputs"])  # fmt: skip
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.full
def test_the_notebook_runs(monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="the notebook is run by nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources=where)
    client.execute()
    assert outputs(notebook.cells, "image/png") == 3
    text = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "90 of 90 forward calls accelerated" in text
