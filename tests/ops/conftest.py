"""Tests of operators: what they do not write of a result is NaN."""

import pytest


@pytest.fixture(autouse=True)
def memory(poisoned: None) -> None:
    """Allocate NaN."""
