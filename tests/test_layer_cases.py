"""The cases of benchmarks/layers.py: every layer of PyG is one, or is named with a reason."""

import pytest
import torch
from torch_geometric.nn import conv

from benchmarks.layer_cases import CASES, WITHOUT, inputs
from benchmarks.layers import Largest, largest_error, step_of


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
