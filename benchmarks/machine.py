"""What a figure was measured on, and how time is taken.

All times are wall-clock milliseconds of whole calls. Functions that are compared are run in turns,
so that a machine which slows down or speeds up half-way does so for all of them.
"""

import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import psutil
import torch

import pyg_accel

ROOT = Path(__file__).resolve().parents[1]
MIN_ROUNDS = 3  # fewer have no median


class Quantiles(NamedTuple):
    """Milliseconds of one call."""

    median: float
    p20: float
    p80: float


@runtime_checkable
class SelfTimed(Protocol):
    """A function that runs elsewhere and therefore takes its own time."""

    def lap(self, calls: int) -> float:
        """Seconds that `calls` calls in a row took."""


Timed = Callable[[], object] | SelfTimed


def facts() -> dict[str, str | int]:
    """Machine, versions, commit and date: the columns that every CSV row carries."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or 0,
        "threads": torch.get_num_threads(),
        "caches": _caches(),
        "torch": torch.__version__,
        "pyg": importlib.metadata.version("torch-geometric"),
        "pyg_accel": pyg_accel.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def copy_bandwidth(mib: int = 256) -> float:
    """GB/s, read plus written, of a copy that is much larger than the caches."""
    source = torch.ones(mib * 2**18)
    target = torch.empty_like(source)
    median = timed(lambda: target.copy_(source), repeats=9, min_time=0.1).median
    return 2 * source.nbytes / median / 1e6


def clock_of(device: str) -> Callable[[], float]:
    """A clock in seconds: for one thread of a CPU that of the processor, as others may share it."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def timed(fn: Timed, repeats: int = 9, min_time: float = 0.02) -> Quantiles:
    """Median, 20 and 80% quantile over `repeats` laps of at least `min_time` seconds each."""
    return side_by_side({"": fn}, repeats, min_time=min_time)[""]


def side_by_side(
    functions: Mapping[str, Timed],
    rounds: int = 9,
    *,
    min_time: float = 0.02,
    budget: float = math.inf,
) -> dict[str, Quantiles]:
    """Time several functions in turns, one lap each a round.

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


def quantiles(seconds: list[float]) -> Quantiles:
    """Quantiles in milliseconds of times in seconds."""
    return Quantiles(*(float(q) * 1e3 for q in np.quantile(seconds, (0.5, 0.2, 0.8))))


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
