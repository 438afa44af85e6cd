"""``scatter`` of extremes: what PyG returns, and its gradient at one row of each extreme."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv, global_max_pool
from torch_geometric.nn.aggr import MaxAggregation
from torch_geometric.utils import scatter

import pyg_accel
from pyg_accel.patching import extremes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
ROWS, GROUPS = 300, 12


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch) -> str:
    """On a CPU, kernels serve what they serve on a GPU alone."""
    if request.param == "cpu":
        monkeypatch.setattr(extremes, "_is_on_gpu", lambda *_: True)
    return request.param


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("shape", [(ROWS, 7), (ROWS, 1), (ROWS, 3, 4), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_gradients_are_those_of_pyg(device, reduce, shape, dtype):
    """Groups without rows are 0."""
    src = torch.randperm(max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()]
    src = (src.view(shape).to(dtype) - ROWS).to(device).requires_grad_()
    index = torch.randint(GROUPS - 2, shape[:1], device=device)
    grad = torch.randn(GROUPS, *shape[1:], dtype=dtype, device=device)
    results = []
    for accelerated in (False, True):
        with pyg_accel.patched() if accelerated else nullcontext():
            out = scatter(src, index, 0, GROUPS, reduce)
        results.append([out, torch.autograd.grad(out, src, grad)[0]])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_pools_and_aggregations_reach_it(device):
    x, batch = torch.randn(ROWS, 9, device=device, requires_grad=True), torch.arange(ROWS) // 20
    batch = batch.to(device)
    expected = global_max_pool(x, batch), MaxAggregation()(x, batch, dim_size=40)
    with pyg_accel.patched():
        actual = global_max_pool(x, batch), MaxAggregation()(x, batch, dim_size=40)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def calls(device, monkeypatch) -> list[str]:
    """The reductions that reach a kernel."""
    gspmm, made = extremes.ops.gspmm, []

    def seen(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["reduce"])
        return gspmm(*args, **kwargs)

    monkeypatch.setattr(extremes.ops, "gspmm", seen)
    return made


KINDS: dict[str, Callable[..., Tensor]] = {
    "vmap": lambda src, index: torch.func.vmap(lambda s: scatter(s, index, 0, GROUPS, "max"))(
        src[None]
    )[0],
    "compile": lambda src, index: torch.compile(
        lambda s: scatter(s, index, 0, GROUPS, "max"), backend="eager"
    )(src),
    "sum": lambda src, index: scatter(src, index, 0, GROUPS),
    "another dimension": lambda src, index: scatter(src.t(), index, 1, GROUPS, "max"),
    "one number a row": lambda src, index: scatter(src[:, 0], index, 0, GROUPS, "max"),
    "no gradient": lambda src, index: scatter(src.detach(), index, 0, GROUPS, "max"),
    "no grad": lambda src, index: torch.no_grad()(scatter)(src, index, 0, GROUPS, "max"),
    "half of the index": lambda src, index: scatter(src, index.view(2, -1)[0], 0, GROUPS, "max"),
    "max": lambda src, index: scatter(src, index, 0, GROUPS, "max"),
    "named": lambda src, index: scatter(src=src, index=index, dim=-2, reduce="min"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_calls_are_those_of_pyg(kind, device, calls):
    src = torch.randn(ROWS, 3, device=device, requires_grad=True)
    index = torch.randint(GROUPS, (ROWS,), device=device)
    results: list[Any] = []
    for accelerated in (False, True):
        with pyg_accel.patched() if accelerated else nullcontext():
            try:
                results.append(KINDS[kind](src, index))
            except RuntimeError as error:
                results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(results[1], results[0])
    assert calls == {"max": ["max"], "named": ["min"]}.get(kind, [])


def test_patched_models_leave_it_to_pyg(device, calls):
    src = torch.randn(ROWS, 3, device=device, requires_grad=True)
    with pyg_accel.patched(SAGEConv(3, 3)):
        scatter(src, torch.zeros(ROWS, dtype=torch.int64, device=device), 0, GROUPS, "max")
    assert not calls
