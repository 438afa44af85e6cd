"""What the report says of models that are replayed, and of calls that stay eager."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def replays(report_of: Callable[[], list[Any]]) -> Callable[[], int]:
    return lambda: sum(row.calls for row in report_of() if row.backend == "CUDA graph")


@pytest.fixture
def reasons(report_of: Callable[[], list[Any]]) -> Callable[[], set[str]]:
    return lambda: {r.reason for r in report_of() if r.backend == "eager"} - {"warming up"}
