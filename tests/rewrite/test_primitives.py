from dataclasses import FrozenInstanceError

import pytest

from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures


def test_primitives_are_values():
    graph = GraphFeatures(3, 4, 5)
    assert {Primitive("spmm", 3, 4, 8, graph=graph): 1}[
        Primitive("spmm", 3, 4, 8, graph=graph)
    ] == 1
    with pytest.raises(FrozenInstanceError):
        graph.num_rows = 1
