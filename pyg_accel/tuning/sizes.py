"""The three numbers that decide how large a call must be: see :mod:`pyg_accel.costs`."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_accel.costs import SHIPPED, Costs, work_of
from pyg_accel.formula import Computation, parse
from pyg_accel.patching import patched
from pyg_accel.settings import settings

__all__ = ["EDGES", "measure_costs"]

_nn: Any = torch_geometric.nn  # whose layers type checkers take for abstract
TINY, FEATURES, NARROW = 400, 64, 16
EDGES = {"cpu": 400_000, "cuda": 4_000_000}  # of a large graph
DEGREE = 8
ROUNDS, LAP = 7, 5e-3  # laps that are compared, and how long each is at least, in seconds
_SCORE = parse("sum(mul(leaky_relu(add(v0,u1),0.2),v2))")  # of GATv2Conv


def measure_costs(device: str) -> dict[str, float]:
    """Return the numbers of a kind of device, as a tuning file has them.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    torch.manual_seed(0)
    attention = _nn.GATv2Conv(FEATURES, FEATURES // 4, heads=4).to(device)
    total = _nn.SimpleConv("sum").to(device)
    with torch.no_grad():
        stock, _ = _seconds(attention, TINY, device)
        functions = work_of([Computation(parse("u1"), ("sum",), _SCORE)]).functions
        launch = stock / (functions + 2)  # and its two linear maps
        small = _saved(total, TINY, device)
        saved = (_saved(total, EDGES[device], device) - small) / EDGES[device]
        rate = 4 * FEATURES / saved / 1e9 if saved > 0 else SHIPPED[device].gigabytes
        small = _saved(total, TINY, device, NARROW, fresh=True)
        saved = (_saved(total, EDGES[device], device, NARROW, fresh=True) - small) / EDGES[device]
    costs = Costs(1e6 * launch, rate, max(4 * NARROW / rate - 1e9 * saved, 0.01))
    return {name: round(value, 3) for name, value in costs._asdict().items()}


def _saved(*args: Any, **kwargs: Any) -> float:
    stock, accelerated = _seconds(*args, **kwargs)
    return stock - accelerated


def _seconds(
    layer: torch.nn.Module,
    edges: int,
    device: str,
    features: int = FEATURES,
    *,
    fresh: bool = False,
) -> tuple[float, float]:
    """Seconds of a call of PyG's, and of one that is accelerated, side by side."""
    nodes = max(edges // DEGREE, 2)
    x = torch.randn(nodes, features, device=device)
    edge_index = torch.randint(nodes, (2, edges), device=device)

    def call() -> None:
        layer(x, edge_index.clone() if fresh else edge_index)

    laps: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        first = _lap(call, x)
        settings.always = True
        try:
            with patched(layer):
                for _ in range(4):
                    call()
                laps.append((first, _lap(call, x)))
        finally:
            settings.always = None
    mine, ours = (median(each) for each in zip(*laps, strict=True))
    return mine, ours


def _lap(call: Callable[[], None], x: Tensor) -> float:
    """Seconds of one of as many calls as a lap takes."""
    calls, seconds = 1, 0.0
    while seconds < LAP:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds, calls = time.perf_counter() - start, 2 * calls
    return 2 * seconds / calls
