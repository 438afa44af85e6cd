"""What a figure was measured on, and how time and memory are taken.

Times are milliseconds of whole calls: of the clock on a CPU, between CUDA events on a GPU.
Functions that are compared run in turns: a machine which slows down half-way does so for all.
"""

import datetime
import importlib.metadata
import itertools
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import psutil
import torch

import pyg_accel

ROOT = Path(__file__).resolve().parents[2]
MIN_ROUNDS = 3  # fewer have no median
BUDGET, MOST_LAPS = 0.1, 50  # seconds and number of laps of one function on a GPU


class Quantiles(NamedTuple):
    """Milliseconds of one call."""

    median: float
    p20: float
    p80: float

    def columns(self, name: str = "ms", prefix: str = "") -> dict[str, float]:
        """As columns of a row."""
        return {name: self.median, f"{prefix}p20": self.p20, f"{prefix}p80": self.p80}


@runtime_checkable
class SelfTimed(Protocol):
    """A function that runs elsewhere and therefore takes its own time."""

    def lap(self, calls: int) -> float:
        """Seconds that `calls` calls in a row took."""


Timed = Callable[[], object] | SelfTimed


def facts(device: str = "cpu") -> dict[str, Any]:
    """Machine, versions, commit and date: the columns that every CSV row carries."""
    versions = {
        "torch": torch.__version__,
        "pyg": importlib.metadata.version("torch-geometric"),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties()
        return {"gpu": found.name, "l2_mib": found.L2_cache_size >> 20,
                "cuda": torch.version.cuda or "",
                "triton": importlib.metadata.version("triton"), **versions}  # fmt: skip
    return {"cpu": _cpu_model(), "cores": psutil.cpu_count(logical=False) or 0,
            "threads": torch.get_num_threads(), "caches": _caches(),
            "pyg_accel": pyg_accel.__version__, **versions}  # fmt: skip


def copy_bandwidth(device: str = "cpu") -> float:
    """GB/s, read plus written, of a copy that is much larger than the caches."""
    source = torch.ones(2**26 if device == "cpu" else 2**30, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), device).median / 1e6


def clock_of(device: str) -> Callable[[], float]:
    """A clock in seconds: for one thread of a CPU that of the processor, as others may share it."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def quantiles(seconds: list[float]) -> Quantiles:
    """Quantiles in milliseconds of times in seconds."""
    return Quantiles(*(float(q) * 1e3 for q in np.quantile(seconds, (0.5, 0.2, 0.8))))


def timed(
    fn: Timed, device: str = "cpu", *, repeats: int = 9, min_time: float = 0.02,
    budget: float = BUDGET,
) -> Quantiles:  # fmt: skip
    """Time one function.

    On a CPU, `repeats` laps of at least `min_time` seconds each. On a GPU, calls that are queued
    without waiting in between, as the steps of a model are, for `budget` seconds.
    """
    if device == "cpu":
        return side_by_side({"": fn}, repeats, min_time=min_time)[""]
    assert not isinstance(fn, SelfTimed)
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
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return quantiles([begin.elapsed_time(end) / 1e3
                      for begin, end in zip(events[::2], events[1::2], strict=True)])  # fmt: skip


def side_by_side(
    functions: Mapping[str, Timed], rounds: int = 9, *, min_time: float = 0.02,
    budget: float = math.inf,
) -> dict[str, Quantiles]:  # fmt: skip
    """Time several functions in turns, one lap each per round.

    A lap repeats a short function until it lasts `min_time` seconds. A function that has used up
    `budget` seconds drops out once it has three laps, so that one slow peer does not set the pace.
    """
    calls = {name: _calls_per_lap(fn, min_time) for name, fn in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for done in range(rounds):
        for name, fn in functions.items():
            if done < MIN_ROUNDS or sum(seconds[name]) * calls[name] < budget:
                seconds[name].append(_lap(fn, calls[name]) / calls[name])
    return {name: quantiles(values) for name, values in seconds.items()}


def in_turns(
    functions: Mapping[Any, Callable[[], Any]], device: str, rounds: int, warm_up: int = 1
) -> dict[Any, Quantiles]:
    """Time several functions in turns, one call each per round, after rounds that do not count."""
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for done in range(rounds + warm_up):
        for name, fn in functions.items():
            took = seconds_of(fn, device)
            if done >= warm_up:
                seconds[name].append(took)
    return {name: quantiles(values) for name, values in seconds.items()}


def seconds_of(fn: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of one call, by `clock_of` the device."""
    clock = clock_of(device)
    synchronize(device)
    start = clock()
    fn()
    synchronize(device)
    return clock() - start


def laps(step: Callable[[], object], device: str, seconds: float) -> Iterator[float]:
    """Seconds of each of some steps: as many as fit into the time, one at least."""
    begin = clock_of(device)()
    for number in itertools.count():
        if number and clock_of(device)() - begin > seconds:
            return
        yield seconds_of(step, device)


def synchronize(device: str) -> None:
    """Wait for the GPU if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


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
    """MiB of a GPU that a call takes beyond what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _calls_per_lap(fn: Timed, min_time: float) -> int:
    first = _lap(fn, 1)  # also the warm-up
    once = first if first > min_time else _lap(fn, 1)
    return max(1, math.ceil(min_time / max(once, 1e-7)))


def _lap(fn: Timed, calls: int) -> float:
    """Seconds for `calls` calls in a row."""
    if isinstance(fn, SelfTimed):
        return fn.lap(calls)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return time.perf_counter() - start


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _caches() -> str:
    """Such as `L1d 32K, L2 1024K, L3 32768K`: what one core sees."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (index / name).read_text().strip() for name in ("level", "type", "size")
        )
        if kind != "Instruction":
            found.append(f"L{level}{'d' if kind == 'Data' else ''} {size}")
    return ", ".join(found) or "unknown"


def _commit() -> str:
    """What git says; for a copy of the tree without git, PYG_ACCEL_COMMIT."""
    if given := os.environ.get("PYG_ACCEL_COMMIT"):
        return given
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
