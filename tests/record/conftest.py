"""Steps with a layer are compared with stock PyG."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import pyg_accel
from benchmarks.layers.modes import traces
from tests.record.steps import Outcome, Step


@pytest.fixture
def like_stock(report_of: Any) -> Callable[..., str]:
    """Take steps with a layer and with a copy of it that is not patched; tell how each ran.

    "t": something was traced; "p": programs ran alone; ".": neither, so it was PyG's.
    """

    def check(layer: nn.Module, *steps: Step) -> str:
        other = copy.deepcopy(layer)
        expected, ways = [Outcome(other, step) for step in steps], ""
        with pyg_accel.patched():
            for number, (step, right) in enumerate(zip(steps, expected, strict=True)):
                pyg_accel.reset_report()
                with traces() as entered:
                    actual = Outcome(layer, step)
                ran = any(row.formula for row in report_of())
                ways += "t" if entered else "p" if ran else "."
                actual.equals(right, f"step {number} of {len(steps)} ({ways})")
        return ways

    return check
