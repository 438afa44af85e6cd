"""``patch()`` on versions of PyG whose private names are others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_geometric

import pyg_accel

SCRIPT = """
import torch, torch_geometric, pyg_accel
from pyg_accel.settings import settings
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv import message_passing
print(message_passing.__file__)

class Own(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        return (x_i - x_j).relu()

class Later(Own):
    pass

torch.manual_seed(0)
x, edge_index = torch.randn(50, 8), torch.randint(50, (2, 300))
before = [SAGEConv(8, 4), GCNConv(8, 4), GATConv(8, 4), Own()]
expected = [layer(x, edge_index) for layer in before]
settings.always = True
for _ in range(2):
    with pyg_accel.patched():
        for layer, right in zip(before, expected):
            for _ in range(3):
                torch.testing.assert_close(layer(x, edge_index), right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(Later()(x, edge_index), expected[-1], rtol=1e-4, atol=1e-5)
        report = pyg_accel.report()
    assert sum(row.calls for row in report.rows if row.backend == "PyG") == 0, str(report)
for layer, right in zip(before, expected):
    assert torch.equal(layer(x, edge_index), right)
fast = pyg_accel.optimize(before[1], x, edge_index)
torch.testing.assert_close(fast(x, edge_index), expected[1], rtol=1e-4, atol=1e-5)
"""
STOCK = Path(torch_geometric.__file__).parent


def changed(folder: Path, how: str) -> str:
    """Write a copy of PyG with another message_passing.py, and return its path."""
    at, here = STOCK, folder / "torch_geometric"
    here.mkdir()
    for name in ("nn", "conv", "message_passing.py"):
        for entry in at.iterdir():
            if entry.name not in (name, "__pycache__"):
                (here / entry.name).symlink_to(entry)
        at, here = at / name, here / name
        if at.is_dir():
            here.mkdir()
    text = at.read_text()
    if how == "renamed":
        text = text.replace("_set_jittable_templates", "_set_templates")
    else:
        first, last = map(text.index, ("    def _set_jittable", "    def _get_propagate_signature"))
        text = (text[:first] + text[last:]).replace("self._set_jittable_templates()", "pass")
        assert "_jinja_propagate =" not in text
    assert "_set_jittable_templates" not in text
    here.write_text(text)
    return str(here)


@pytest.mark.full
@pytest.mark.parametrize("how", ["renamed", "no templates"])
def test_layers_are_accelerated_and_restored(tmp_path, how):
    path = changed(tmp_path, how)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(pyg_accel.__file__).parents[1]
    actual = os.pathsep.join([str(tmp_path), str(root)])
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": actual},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert path in run.stdout
