"""Time, memory and facts of a GPU."""

import datetime
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine
from benchmarks.machine import Quantiles, _commit, quantiles

BUDGET = 0.1  # seconds for the laps of one function
MOST_LAPS = 50


def facts() -> dict[str, str | int]:
    """Device, versions, commit and date: the columns that every CSV row carries."""
    found = torch.cuda.get_device_properties()
    return {
        "gpu": found.name,
        "l2_mib": found.L2_cache_size >> 20,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "pyg": importlib.metadata.version("torch-geometric"),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def facts_of(device: str) -> dict[str, Any]:
    """What every row says of the machine, of a run on a CPU or on a GPU."""
    return facts() if device == "cuda" else machine.facts()


def copy_bandwidth(mib: int = 4096) -> float:
    """TB/s, read plus written, of a copy that is much larger than the caches."""
    source = torch.ones(mib * 2**18, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source)).median / 1e9


def timed(fn: Callable[[], Any], *, budget: float = BUDGET) -> Quantiles:
    """Median, 20 and 80% quantile in milliseconds by CUDA events, one pair a lap.

    The laps are queued without waiting in between, as the steps of a model are.
    """
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    fn()
    last.record()
    torch.cuda.synchronize()
    laps = max(3, min(MOST_LAPS, int(budget * 1e3 / max(first.elapsed_time(last), 1e-3))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * laps)]
    for lap in range(laps):
        events[2 * lap].record()
        fn()
        events[2 * lap + 1].record()
    torch.cuda.synchronize()
    return quantiles([events[2 * k].elapsed_time(events[2 * k + 1]) / 1e3 for k in range(laps)])


def captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """The same call as a CUDA graph: what the device needs, without the launching."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def peak_memory(fn: Callable[[], Any]) -> float:
    """MiB that a call takes beyond what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
