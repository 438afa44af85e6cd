"""The cases of benchmarks/layers/times.py: every layer of PyG is one, or is named with a reason."""

import pandas as pd
import pytest
import torch
from torch_geometric.nn import conv

from benchmarks.layers.cases import CASES, WITHOUT, inputs
from benchmarks.layers.times import Largest, largest_error, step_of
from benchmarks.tools import tables


def test_every_layer_of_pyg_has_a_case_or_a_reason():
    assert {layer for layer, _ in CASES} | WITHOUT.keys() == set(conv.__all__)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_cases_train(case):
    graph = inputs(50, 300, 16, "cpu")
    graph.x.requires_grad_()
    step = step_of(CASES[case], CASES[case].make(16), graph, train=True)
    torch.manual_seed(0)
    first = step()
    torch.manual_seed(0)
    assert len(first) > 1 and largest_error(step(), first) < 1e-4


def test_a_tensor_with_features_per_edge_is_found():
    x, index = torch.randn(5, 8), torch.zeros(40, dtype=torch.long)
    with Largest(40, 8) as seen:
        x.relu()
    assert not seen.found
    with Largest(40, 8) as seen:
        x[index]
    assert seen.found


def row(edges: int, ratio: float, **others) -> dict:
    given = {"layer": "GATConv", "option": "", "edges": edges, "width": 16, "pass": "forward",
             "ratio": ratio, "formula": "", "backend": "PyG", "reason": "",
             "edge_tensor": False}  # fmt: skip
    return given | others


def test_the_table_of_layers_shows_losses_and_how_far_they_go():
    rows = [row(1000, 0.5, reason="small: fewer than 40000 edges"),
            row(10**5, 8.0, formula="sum_j u0", edge_tensor=True)]  # fmt: skip
    (line,) = tables.layers(pd.DataFrame(rows))[2:]
    assert "0.50 to 8.00, **2.00**" in line and "`sum_j u0`" in line and "| yes |" in line
    assert "up to 1,000 edges: too small" in line
