"""What tests of interpreted Triton kernels share: when they run, graphs, the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pyg_accel import Graph, use_backend
from pyg_accel.backends import get_backend

BACKEND = get_backend("triton")
REASONS = BACKEND.unavailable_reasons()
INTERPRETED = [
    pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS)),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not interpreted"),
]


def make_graph(degrees: Sequence[int], num_cols: int = 13) -> Graph:
    rowptr = torch.tensor([0, *degrees]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    col = torch.randint(num_cols, (int(rowptr[-1]),), generator=generator)
    return Graph.from_csr(rowptr.int(), col.int(), num_cols=num_cols)


def on_both(run: Callable[[], Any]) -> list[Any]:
    """What a function returns with Triton's kernels, and with those of the reference."""
    answers = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            answers.append(run())
    return answers


def same_on_both(run: Callable[[], Any], **close: Any) -> None:
    torch.testing.assert_close(*on_both(run), **close)
