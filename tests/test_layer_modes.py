"""How every layer of PyG, and some of users, run in every mode: none may silently stop to."""

import pytest
import torch
import torch_geometric

import pyg_accel
from benchmarks.layers.modes import ALL, MODES, Row, losses, recorded, row
from pyg_accel.runtime.native import cpu_unavailable_reasons

# Compiling takes a second per layer: these in the quick tier, the others in the full one. Of the
# other modes, each layer is there in one or two.
COMPILED = {("GCNConv", ""), ("GATConv", "edge_attr"), ("user", "a constant of the module")}
VERSIONS = ("2.13", "2.8")  # of torch and PyG, with which the table was made
CASES = [
    pytest.param(
        *case, mode, id=" ".join((*case, mode)),
        marks=[pytest.mark.full]
        if (case not in COMPILED if mode == "compile" else (place + turn) % 3) else [],
    )
    for place, case in enumerate(ALL)
    for turn, mode in enumerate(MODES)
]  # fmt: skip


@pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="the table names the compiled kernels")
@pytest.mark.skipif(
    not (torch.__version__.startswith(VERSIONS[0])
         and torch_geometric.__version__.startswith(VERSIONS[1])),
    reason=f"the table was made with torch and PyG {VERSIONS}",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("layer", "option", "mode"), CASES)
def test_layers_run_as_the_table_says_or_better(layer, option, mode):
    with pyg_accel.patched():
        now = row(layer, option, mode)
    worse = losses(recorded()[layer, option, mode], now)
    assert not worse, f"{worse}; if that is meant: python -m benchmarks.layers.modes"


def test_the_table_has_every_layer_in_every_mode():
    assert list(recorded()) == [(*case, mode) for case in ALL for mode in MODES]


def changed(**others: str) -> Row:
    given = {"runs": "recorded", "formula": "sum_j u0; sum_j u1", "backend": "cpu", "reason": ""}
    return given | others


@pytest.mark.parametrize(
    "now",
    [
        changed(runs="raises", formula="", backend="", reason="ValueError: no"),
        changed(runs="PyG", formula="", backend="PyG", reason="a hook"),
        changed(runs="partly", backend="PyG+cpu"),
        changed(runs="traced"),
        changed(formula="sum_j u0"),
        changed(backend="reference"),
    ],
)
def test_a_loss_is_seen(now):
    assert losses(changed(), now) and not losses(now, now)
    assert not losses(changed(), changed(formula="sum_j u0; sum_j u1; max_j u0"))


def test_an_improvement_is_no_loss():
    before = changed(runs="PyG", formula="", backend="PyG", reason="a hook")
    assert not losses(before, changed())
